"""Provides the session of a process without an agent: `python`, a notebook, plain torchrun.

The same script computes the same steps there, with the ranks that it was started with: nothing is
taken over from a lost rank, and no snapshot is taken. So a script can be debugged, and go back to
torchrun, which restarts it as it does any other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from keepstep.elastic.errors import UsageError
from keepstep.elastic.worker.messages import Assignment, WorkerMessage
from keepstep.elastic.worker.session import Session

log = logging.getLogger("keepstep")

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_NEEDS_RUN = "start the script with `keepstep run --nproc-per-node N SCRIPT`"


class UnmanagedSession(Session):
    """A session with no agent: one generation, whose ranks are given by the environment.

    Args:
        environment: where torchrun names this process's place; without its variables the process is
            the only rank.
        has_groups: the script has made its process groups, and needs no store for them.
    """

    is_managed = answers_notices = False

    def __init__(self, environment: Mapping[str, str], *, has_groups: bool = False) -> None:
        if all(name in environment for name in _TORCHRUN):
            rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local_rank = int(environment["LOCAL_RANK"])
            local_size = int(environment.get("LOCAL_WORLD_SIZE", "1"))
            host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
            serves = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        else:
            rank, size, local_rank, local_size = 0, 1, 0, 1
            host, port, serves = "127.0.0.1", 0, True
        # Kept: it is served for as long as the process groups live.
        self._served = (
            TCPStore(host, port, is_master=True, wait_for_workers=False)
            if serves and not has_groups
            else None
        )
        attempt = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._place = Assignment(
            generation=1,
            node="local",
            rank=rank,
            world_size=size,
            local_rank=local_rank,
            local_world_size=local_size,
            node_rank=int(environment.get("GROUP_RANK", "0")),
            node_count=int(environment.get("GROUP_WORLD_SIZE", "1")),
            store_host=host,
            store_port=self._served.port if self._served is not None else port,
            server="",
            secret="",
            job=environment.get("TORCHELASTIC_RUN_ID", "local") + f"/{attempt}",
            max_restarts=int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")),
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._place.world_size

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._place.rank

    def report(self, message: WorkerMessage) -> None:
        """Do nothing: there is no agent."""

    def progress(self, generation: int, step: int) -> None:
        """Do nothing: there is no agent."""

    def wait_for_assignment(self, newer_than: int) -> Assignment:
        """Return the only one.

        Raises:
            UsageError: another generation is asked for.
        """
        if newer_than >= self._place.generation:
            raise UsageError(
                f"the job would go back to a snapshot here, and this process has none: {_NEEDS_RUN}"
            )
        return self._place

    def is_closing(self, generation: int) -> bool:
        """Return False."""
        return False

    def is_aborting(self, generation: int) -> bool:
        """Return False."""
        return False

    def may_seal(self, generation: int) -> bool:
        """Return True: nothing is aborted."""
        return True

    def is_committed(self, step: int) -> bool:
        """Return True: nothing is waited for."""
        return True

    @property
    def committed_step(self) -> int:
        """No step is committed."""
        return -1

    @property
    def stored_step(self) -> int:
        """No step is stored."""
        return -1

    def roll_back(self, generation: int, step: int) -> None:
        """Nothing was stored."""

    def wait_for_commit(self, step: int, generation: int, *, also_closing: bool = False) -> bool:
        """Return True: nothing is waited for."""
        return True

    def wait_for_stored(self, step: int, generation: int) -> bool:
        """Return True: nothing is waited for."""
        return True

    def wait_for_closing(self, generation: int, timeout_s: float | None = None) -> bool:
        """Return False, or raise UsageError where only another number of ranks could go on."""
        if timeout_s is None:
            raise UsageError(f"mesh= does not fit {self.world_size} ranks; give another number")
        return False

    def on_abort(self, abort: Callable[[], None] | None, *, awaits_order: bool) -> None:
        """Nobody orders an abort."""

    def end_for_successor(self, generation: int) -> NoReturn:
        """Raise UsageError: nobody replaces this process."""
        raise UsageError(f"the job's only generation is over; {_NEEDS_RUN}")

    def exit_for_replacement(self, reason: str, *, is_fault: bool = False) -> NoReturn:
        """Raise UsageError: nobody replaces this process."""
        raise UsageError(f"{reason}; {_NEEDS_RUN}")

    def restart_script(self, reason: str) -> NoReturn:
        """Raise UsageError: there is no agent to restart the script."""
        raise UsageError(f"{reason}; {_NEEDS_RUN}")


def announced_unmanaged_session(
    checkpoint: str | None, *, has_groups: bool = False
) -> UnmanagedSession:
    """Return a session for this process, by its environment, and say once what that means.

    Args:
        checkpoint: the URL that the script gave to store checkpoints under, if any.
        has_groups: as for `UnmanagedSession`.
    """
    session = UnmanagedSession(os.environ, has_groups=has_groups)
    if session.rank == 0:
        stores = " What is stored is read, and no checkpoint is stored." if checkpoint else ""
        log.warning(
            "keepstep: `keepstep run` has not started this process: the job runs on %d rank%s "
            "without recovery, snapshots and elasticity.%s",
            session.world_size,
            "" if session.world_size == 1 else "s, as torchrun has started them,",
            stores,
        )
    return session
