"""Joins the job that this process was started for: checks what the user asked for, reports it."""

from __future__ import annotations

import operator
import os
from typing import Literal, get_args

from keepstep.checkpoint.format.stored.chunking import Compression
from keepstep.checkpoint.format.stored.urls import url_text
from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer.bad_steps import BadSteps
from keepstep.elastic.trainer.devices import DeviceType, device_type
from keepstep.elastic.trainer.events import Callbacks
from keepstep.elastic.trainer.job import Job
from keepstep.elastic.trainer.job_options import JobOptions
from keepstep.elastic.trainer.mesh_rule import Mesh, MeshRule
from keepstep.elastic.trainer.process_groups import ProcessGroups
from keepstep.elastic.trainer.replicas import OnDivergence
from keepstep.elastic.trainer.start_from import StartFrom
from keepstep.elastic.trainer.state import Build
from keepstep.elastic.worker.device_environment import set_device_variables
from keepstep.elastic.worker.script_signals import leave_notices_to_agent
from keepstep.elastic.worker.session import current
from keepstep.elastic.worker.unmanaged_session import announced_unmanaged_session

_NO_CALLBACKS = Callbacks()


def join(
    build: Build,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | Literal["auto"] | None = None,
    checkpoint_compression: Compression | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    start_from: str | os.PathLike[str] | StartFrom | None = None,
    snapshot_every: int | Literal["auto"] = 1,
    mesh: Mesh | None = None,
    seed: int = 0,
    compare_replicas_every: int | None = 100,
    on_divergence: OnDivergence = "report",
    on_bad_step: BadSteps | None = None,
    device: DeviceType | None = None,
    backend: str | None = None,
    callbacks: Callbacks = _NO_CALLBACKS,
) -> Job:
    """Join the job that this worker was started for; use the result as a context manager.

    In a process that `keepstep run` has not started, such as `python train.py`, a notebook or a
    rank of torchrun, the same loop runs without recovery, snapshots and stored checkpoints: on one
    rank, or on those of torchrun.

    Args:
        build: creates the sharded model and its optimizer for a given world; called for every
            generation.
        checkpoint: URL to store checkpoints under and to resume from (`/path`, `file://`,
            `s3://bucket/prefix`).
        checkpoint_every: number of steps between stored checkpoints; "auto": the interval with the
            least expected loss (`keepstep.elastic.rendezvous.intervals`); None: only at the end,
            and when a preempted job would lose its memory.
        checkpoint_compression: "zstd": compress stored tensors of 1 MiB or more, without loss;
            None: nothing.
        keep_last: number of the newest checkpoints to keep; older ones are removed when a new one
            is complete, and their bytes deleted an hour later. Kept, too, is the newest from which
            `on_bad_step` may have to go on (`BadSteps(roll_back=...)`). None: all are kept.
        keep_every: with `keep_last`, also keep the steps that are multiples of this.
        start_from: checkpoint that the job begins from if it has none of its own under
            `checkpoint`, nor a snapshot: of another job, or of another tool, in any format that
            `keepstep ckpt convert` reads (`deepspeed:/path` if the files do not tell). It must have
            all of the module's names and no others; data types are converted. What it has of
            optimizers and schedulers is taken, and its step, 0 if it has none. Data and random
            numbers begin as in any new job, `State.extra` keeps its initial state, and
            `State.initialize` is not called. `StartFrom` says to take less, or by rules.
        snapshot_every: number of steps between snapshots in memory; "auto": the interval with the
            least expected loss.
        mesh: names and sizes of the device mesh's dimensions, of which one may be -1; default
            `{"dp": -1}`. Or a function of the number of ranks that returns them, and None for a
            number that does not fit: then the job takes another mesh when ranks are lost or come,
            and nodes without a place wait. It must return the same on all ranks. Names begin with
            `dp`, `ddp`, `fsdp`, `replicate`, `shard` or `ep` where each rank has samples of its
            own, and with `tp`, `cp`, `pp`, `sp` or `etp` where all ranks compute the same ones.
        seed: seed of the random number generators and of the data order, from -2**63 to 2**64 - 1.
        compare_replicas_every: number of steps after which ranks that hold the same parts of the
            state compare them, besides the first step of each generation; None: never.
        on_divergence: what to do if they differ. "report": log it; "repair": also give the odd
            ranks the state of the majority, if there is one; "roll back": return to the last
            snapshot, of which all were compared then, and find out by computing the steps again
            who was wrong, if no majority shows it; "replace": also evict the node of who was wrong,
            if enough others are left; "stop": end the job.
        on_bad_step: what `Step.report` rejects, such as a loss that is not a number, and how far
            the job then goes back; None: nothing is reported.
        device: the type of device to compute on, "cuda" or "cpu"; default: GPUs where the machine
            has any.
        backend: back ends of the process groups, as `torch.distributed.init_process_group` takes
            them; default: NCCL on GPUs, and gloo.
        callbacks: functions that are called for a new generation, a recovery, a committed snapshot,
            a stored checkpoint and a rejected step; on every rank, in the thread that trains,
            between steps.

    Raises:
        UsageError: an argument is invalid.
        DeviceUnavailable: GPUs are to be used, and PyTorch cannot use them.
    """
    if compare_replicas_every is not None and compare_replicas_every < 1:
        raise UsageError(f"compare_replicas_every={compare_replicas_every!r}: give at least 1")
    if on_divergence not in get_args(OnDivergence):
        choices = ", ".join(map(repr, get_args(OnDivergence)))
        raise UsageError(f"on_divergence={on_divergence!r}: give one of {choices}")
    checkpoint = None if checkpoint is None else url_text(checkpoint)
    options = JobOptions(
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        checkpoint_compression=checkpoint_compression,
        keep_last=keep_last,
        keep_every=keep_every,
        snapshot_every=snapshot_every,
        seed=seed,
        roll_back=on_bad_step.roll_back if on_bad_step is not None else 0,
    )
    session = current() or announced_unmanaged_session(checkpoint)
    rule = MeshRule(mesh)
    limits = rule.limits()
    kind = device_type(device, backend)
    if kind == "cuda":
        set_device_variables(os.environ)
    groups = ProcessGroups(kind, backend)
    if session.is_managed:
        leave_notices_to_agent()
    session.report(options.joined(limits, awaits_abort_order=groups.awaits_abort_order))
    return Job(
        session=session,
        groups=groups,
        build=build,
        mesh=rule,
        checkpoint=checkpoint,
        start_from=StartFrom.of(start_from),
        snapshot_every=options.snapshot_interval,
        # NumPy's numbers overflow where Python's grow.
        seed=operator.index(seed),
        compare_replicas_every=compare_replicas_every,
        on_divergence=on_divergence,
        on_bad_step=on_bad_step,
        callbacks=callbacks,
    )
