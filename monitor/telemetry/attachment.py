"""Attaches the recorder to this process, with any launcher.

There are three ways: call `monitor.attach()` before or after the process groups are created; set
KEEPSTEP_MONITOR=1, which `import torch` evaluates through the entry point that PyTorch offers to
extensions (`keepstep.autoload`; PyTorch 2.5 and later, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0); or
run the script with `python -m keepstep.monitor.run script.py`.

With KEEPSTEP_MONITOR a process is recorded once it has entered the default process group: nothing
else distinguishes workers, and their ranks, from other processes with the same environment. Under
`srun torchrun`, Slurm's variables are those of torchrun's agent; the parent of
`torch.multiprocessing.spawn` has no rank; data loaders' processes have the worker's environment.

The rank comes from the default process group if there is one, else from the launcher's variables:
RANK and WORLD_SIZE, Slurm's or Open MPI's; the job from KEEPSTEP_JOB, torchrun's run id or Slurm's
job id; the node from KEEPSTEP_NODE or the host's name; the generation from torchrun's restart
count.

NCCL reports its launches to the recorder if NCCL_PROFILER_PLUGIN names it when a communicator is
created, which may be within `init_process_group`. So the variable is set before that, unless the
user has set it.
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
from keepstep.monitor.telemetry.coalescing import CoalescingHooks
from keepstep.monitor.telemetry.native import (
    PLUGIN_VARIABLE,
    NativeRecorder,
    build,
    name_as_nccl_plugin,
)
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
    """The recorder of this process and its hooks."""

    def __init__(self, identity: WorkerIdentity) -> None:
        try:
            native: NativeRecorder | None = NativeRecorder()
        except RecorderUnavailable as error:
            # Phases alone still show which rank is late, and the job must run in any case.
            _log.warning("rank %d: %s", identity.rank, error)
            native = None
        self._is_nccl_plugin = native is not None and name_as_nccl_plugin(os.environ)
        self.recorder = Recorder(identity, native)
        self.phases = AutomaticPhases(self.recorder)
        self._coalescing = None if native is None else CoalescingHooks(native)
        self.process = os.getpid()
        self._former_hook, sys.excepthook = sys.excepthook, self._on_exception
        # Child processes inherit the variables that give this rank; with this one they do not
        # replace the ring.
        os.environ[ATTACHED_VARIABLE] = (
            f"{identity.rank} {self.process} {process_started(self.process)}"
        )

    def remove(self) -> None:
        """Remove the hooks and stop recording."""
        self.phases.remove()
        if self._coalescing is not None:
            self._coalescing.remove()
        # A hook that was installed later calls this one.
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._former_hook
        if self.process == os.getpid():
            self.recorder.close()
            os.environ.pop(ATTACHED_VARIABLE, None)
            if self._is_nccl_plugin:
                os.environ.pop(PLUGIN_VARIABLE, None)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Record that the process ends by an exception; a keyboard interrupt is not recorded."""
        if issubclass(kind, Exception) and self.process == os.getpid():
            self.recorder.set_ending(Ending.FAILED if is_of_communication(error) else Ending.RAISED)
        self._former_hook(kind, error, trace)


def is_of_communication(error: BaseException) -> bool:
    """Return whether an exception, or a cause of it, is a failure of communication.

    gloo's failures, and many of NCCL's, have no type of their own, so their messages are searched.
    """
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
        job, rank, node, generation: override what the environment provides.

    Raises:
        MonitorError: the rank is not known.
        RingUnwritable: there is no space for the ring.
    """
    global _attached
    if _attached is None:
        identity = identify(os.environ)
        own_rank = identity.rank if rank is None else rank
        if own_rank < 0:
            raise MonitorError(
                "monitor.attach: the rank is not known. Set RANK, call it after "
                "init_process_group, or pass rank=."
            )
        _attached = Attachment(
            WorkerIdentity(
                job=identity.job if job is None else job,
                rank=own_rank,
                node=identity.node if node is None else node,
                generation=identity.generation if generation is None else generation,
                world_size=identity.world_size,
            )
        )
        # Not with `atexit`, whose functions do not run in processes forked by `multiprocessing`.
        Finalize(None, detach, exitpriority=0)
    return _attached.recorder


def attach_at_initialization() -> None:
    """Record this process once `init_process_group` has given it a rank; log a failure to do so.

    Called while PyTorch is imported.
    """
    if not dist.is_available():
        return
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if _attached is None:
            _prepare_native()
        original(*args, **kwargs)
        try:
            if not _is_child_of_recorded(os.environ, dist.get_rank()):
                attach()
        except Exception as error:  # noqa: BLE001 - the job must run even if the monitor fails
            _log.warning("rank %d is not recorded: %s", dist.get_rank(), error)

    # Modules of PyTorch have imported it by name already; one of them is that of
    # `init_device_mesh`, which calls it.
    name = "init_process_group"
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, init_process_group)


def _prepare_native() -> None:
    """Build the native recorder, and name it to NCCL, before a communicator may exist."""
    try:
        build()
        name_as_nccl_plugin(os.environ)
    except RecorderUnavailable:
        pass  # Said, with the rank, when it is attached.


def detach() -> None:
    """Stop recording. The ring remains for readers."""
    global _attached
    if _attached is not None:
        _attached.remove()
        _attached = None


def current() -> Recorder | None:
    """Return this process's recorder, if it is attached."""
    return None if _attached is None else _attached.recorder


def identify(environment: Mapping[str, str]) -> WorkerIdentity:
    """Return this worker's identity; with rank -1 if the rank is not known."""
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


def _is_child_of_recorded(environment: Mapping[str, str], rank: int) -> bool:
    """Return whether the environment comes from a living process that is recorded as this rank."""
    fields = [
        int(field) for field in environment.get(ATTACHED_VARIABLE, "").split() if field.isdecimal()
    ]
    if len(fields) != 3:
        return False
    recorded_rank, process, started = fields
    if recorded_rank != rank or process == os.getpid():
        return False
    # Environments outlive processes: a job may submit the next one.
    return process_started(process) == started


def _first_number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return None


def _detach_child() -> None:
    """Detach a forked child, which is not a worker: it must not write into its parent's ring."""
    if _attached is not None:
        detach()


os.register_at_fork(after_in_child=_detach_child)
