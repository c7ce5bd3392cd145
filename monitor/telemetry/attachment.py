"""Attaching the recorder to this process, whoever launched it.

Three ways, with the same effect: call `monitor.attach()` before or after the process groups are made; or set KEEPSTEP_MONITOR=1, which
`import torch` acts upon in every worker, by the entry point that PyTorch offers to extensions (`keepstep_monitor`; PyTorch 2.5 and
later, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0); or run the script by `python -m monitor.run script.py`.

Who the worker is comes from the default process group if there is one, else from what launchers set: RANK and WORLD_SIZE, Slurm's or
Open MPI's variables; the job from KEEPSTEP_JOB, torchrun's run id or Slurm's job id; the node from KEEPSTEP_NODE or the host's name; the
generation from torchrun's restart count.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
from collections.abc import Mapping
from types import TracebackType

import torch.distributed as dist

from monitor.errors import MonitorError, RecorderUnavailable
from monitor.telemetry.native import NativeRecorder
from monitor.telemetry.phases import AutomaticPhases
from monitor.telemetry.recorder import Recorder
from monitor.telemetry.ring import Identity

_log = logging.getLogger(__name__)
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
ATTACHED_VARIABLE = "KEEPSTEP_MONITOR_ATTACHED"

_attached: Attachment | None = None


class Attachment:
    """The recorder of this process with its hooks."""

    def __init__(self, identity: Identity) -> None:
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
        # So that processes that this one starts, which inherit its rank, do not take its ring from it.
        os.environ[ATTACHED_VARIABLE] = str(self.process)

    def remove(self) -> None:
        """Take away the hooks and stop recording."""
        self.phases.remove()
        # Whoever has put a hook of its own in place calls on to ours.
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._former_hook
        if self.process == os.getpid():
            self.recorder.close()
            os.environ.pop(ATTACHED_VARIABLE, None)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Note that the process ends by an exception; a person who interrupts it is none."""
        if issubclass(kind, Exception) and self.process == os.getpid():
            self.recorder.raised()
        self._former_hook(kind, error, trace)


def attach(
    *, job: str | None = None, rank: int | None = None, node: str | None = None, generation: int | None = None
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
            Identity(
                identity.job if job is None else job,
                found,
                identity.node if node is None else node,
                identity.generation if generation is None else generation,
                identity.world_size,
            )
        )
    return _attached.recorder


def detach() -> None:
    """Stop recording. The ring stays for others to read."""
    global _attached
    if _attached is not None:
        _attached.remove()
        _attached = None


def current() -> Recorder | None:
    """Return this process's recorder, if it is attached."""
    return None if _attached is None else _attached.recorder


def identify(environment: Mapping[str, str]) -> Identity:
    """Return who this worker is; with rank -1 if nothing tells."""
    is_initialized = dist.is_available() and dist.is_initialized()
    rank = _first_number(environment, _RANKS)
    size = _first_number(environment, _SIZES)
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    return Identity(
        job=environment.get("KEEPSTEP_JOB") or (run if run != "none" else environment.get("SLURM_JOB_ID") or "default"),
        rank=dist.get_rank() if is_initialized else -1 if rank is None else rank,
        node=environment.get("KEEPSTEP_NODE") or socket.gethostname(),
        generation=int(environment.get("TORCHELASTIC_RESTART_COUNT") or -1) + 1,
        world_size=dist.get_world_size() if is_initialized else size or 0,
    )


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
atexit.register(detach)
