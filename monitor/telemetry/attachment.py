"""Attaching the recorder to this process, whoever launched it.

Three ways: call `monitor.attach()` before or after the process groups are made; or set KEEPSTEP_MONITOR=1, which `import torch` acts
upon, by the entry point that PyTorch offers to extensions (`keepstep.autoload`; PyTorch 2.5 and later, unless
TORCH_DEVICE_BACKEND_AUTOLOAD=0); or run the script by `python -m keepstep.monitor.run script.py`.

By KEEPSTEP_MONITOR a process is recorded once it has entered the default process group: nothing else tells workers, and their ranks,
from what runs in the same environment. Under `srun torchrun`, Slurm's variables are those of torchrun's agent; the parent of
`torch.multiprocessing.spawn` has no rank at all; data loaders' processes have the worker's.

Who the worker is comes from the default process group if there is one, else from what launchers set: RANK and WORLD_SIZE, Slurm's or
Open MPI's variables; the job from KEEPSTEP_JOB, torchrun's run id or Slurm's job id; the node from KEEPSTEP_NODE or the host's name; the
generation from torchrun's restart count.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import socket
import sys
from collections.abc import Mapping
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

import torch.distributed as dist

from keepstep.monitor.errors import MonitorError, RecorderUnavailable
from keepstep.monitor.records import Ending
from keepstep.monitor.telemetry.native import NativeRecorder
from keepstep.monitor.telemetry.phases import AutomaticPhases
from keepstep.monitor.telemetry.recorder import Recorder
from keepstep.monitor.telemetry.ring import WorkerIdentity, process_started

_log = logging.getLogger(__name__)
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
_BACK_ENDS = re.compile(r"gloo/|Gloo|NCCL|ProcessGroup|Connection (closed|reset) by peer")
ATTACHED_VARIABLE = "KEEPSTEP_MONITOR_ATTACHED"

_attached: Attachment | None = None


class Attachment:
    """The recorder of this process with its hooks."""

    def __init__(self, identity: WorkerIdentity) -> None:
        try:
            native: NativeRecorder | None = NativeRecorder()
        except RecorderUnavailable as error:
            # Phases alone still tell who is late, and the job is more important than either.
            _log.warning("rank %d: %s", identity.rank, error)
            native = None
        self.recorder = Recorder(identity, native)
        self.phases = AutomaticPhases(self.recorder)
        self.process = os.getpid()
        self._former_hook, sys.excepthook = sys.excepthook, self._on_exception
        # So that processes that this one starts, and that take themselves for its rank, do not take its ring from it.
        os.environ[ATTACHED_VARIABLE] = (
            f"{identity.rank} {self.process} {process_started(self.process)}"
        )

    def remove(self) -> None:
        """Take away the hooks and stop recording."""
        self.phases.remove()
        # Whoever has put a hook of its own in place calls on to ours.
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._former_hook
        if self.process == os.getpid():
            self.recorder.close()
            os.environ.pop(ATTACHED_VARIABLE, None)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Note that the process ends by an exception; a person who interrupts it is none."""
        if issubclass(kind, Exception) and self.process == os.getpid():
            self.recorder.set_ending(Ending.FAILED if is_of_communication(error) else Ending.RAISED)
        self._former_hook(kind, error, trace)


def is_of_communication(error: BaseException) -> bool:
    """Return whether an exception, or one that it came of, is a failure of communication; gloo's and many of NCCL's have no type of their own."""
    seen = set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, dist.DistError) or (
            isinstance(cause, RuntimeError) and _BACK_ENDS.search(str(cause))
        ):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def attach(
    *,
    job: str | None = None,
    rank: int | None = None,
    node: str | None = None,
    generation: int | None = None,
) -> Recorder:
    """Record this worker from now on; a second call returns the same recorder.

    Args:
        job, rank, node, generation: who this is, where the environment does not tell or tells wrong.

    Raises:
        MonitorError: the rank is not known.
        RingUnwritable: there is no room for the ring.
    """
    global _attached
    if _attached is None:
        identity = identify(os.environ)
        found = identity.rank if rank is None else rank
        if found < 0:
            raise MonitorError(
                "monitor.attach: which rank is this? Set RANK, call it after init_process_group, or pass rank=."
            )
        _attached = Attachment(
            WorkerIdentity(
                identity.job if job is None else job,
                found,
                identity.node if node is None else node,
                identity.generation if generation is None else generation,
                identity.world_size,
            )
        )
        # Not by `atexit`, which processes that `multiprocessing` has forked do not heed.
        Finalize(None, detach, exitpriority=0)
    return _attached.recorder


def attach_at_initialization() -> None:
    """Record this process once `init_process_group` has told its rank; what goes wrong then is logged. Called while PyTorch is imported."""
    if not dist.is_available():
        return
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        try:
            if not _is_anothers(os.environ, dist.get_rank()):
                attach()
        except Exception as error:  # noqa: BLE001 - a monitor that fails must leave the job running
            _log.warning("rank %d is not recorded: %s", dist.get_rank(), error)

    # Modules of PyTorch have it by name already, of which `init_device_mesh` calls it.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("init_process_group") is original:
            setattr(module, "init_process_group", init_process_group)  # noqa: B010 - not every module has it


def detach() -> None:
    """Stop recording. The ring stays for others to read."""
    global _attached
    if _attached is not None:
        _attached.remove()
        _attached = None


def current() -> Recorder | None:
    """Return this process's recorder, if it is attached."""
    return None if _attached is None else _attached.recorder


def identify(environment: Mapping[str, str]) -> WorkerIdentity:
    """Return who this worker is; with rank -1 if nothing tells."""
    is_initialized = dist.is_available() and dist.is_initialized()
    rank = _first_number(environment, _RANKS)
    size = _first_number(environment, _SIZES)
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    return WorkerIdentity(
        job=environment.get("KEEPSTEP_JOB")
        or (run if run != "none" else environment.get("SLURM_JOB_ID") or "default"),
        rank=dist.get_rank() if is_initialized else -1 if rank is None else rank,
        node=environment.get("KEEPSTEP_NODE") or socket.gethostname(),
        generation=int(environment.get("TORCHELASTIC_RESTART_COUNT") or -1) + 1,
        world_size=dist.get_world_size() if is_initialized else size or 0,
    )


def _is_anothers(environment: Mapping[str, str], rank: int) -> bool:
    """Return whether a process that lives is recorded as this rank, and has handed its environment down to this one."""
    marked = [
        int(field) for field in environment.get(ATTACHED_VARIABLE, "").split() if field.isdecimal()
    ]
    if len(marked) != 3 or marked[0] != rank or marked[1] == os.getpid():
        return False
    # Environments outlive processes: a job may submit the next one.
    return process_started(marked[1]) == marked[2]


def _first_number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return None


def _detach_child() -> None:
    """A forked child is no worker: a data loader's process must not write into its parent's ring."""
    if _attached is not None:
        detach()


os.register_at_fork(after_in_child=_detach_child)
