"""Attaches a training loop that owns its objects to the job that this process was started for."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.descriptions import NOT_DESCRIBED, Descriptions
from keepstep.checkpoint.format.stored.chunking import Compression
from keepstep.checkpoint.format.stored.urls import url_text
from keepstep.checkpoint.live.model_parameters import ModelParameters
from keepstep.checkpoint.ranks.control_group import CONTROL_GROUPS, ControlGroup, separate_group
from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer.attached import Attached
from keepstep.elastic.trainer.job_options import JobOptions
from keepstep.elastic.trainer.mesh_rule import Mesh, MeshRule, data_share
from keepstep.elastic.trainer.start_from import StartFrom
from keepstep.elastic.trainer.state import State, Stateful
from keepstep.elastic.trainer.training_state import TrainingState
from keepstep.elastic.worker.launched_session import launched_session
from keepstep.elastic.worker.messages import Ready
from keepstep.elastic.worker.script_modules import imported_modules
from keepstep.elastic.worker.script_signals import leave_notices_to_agent
from keepstep.elastic.worker.session import Session, current, wall_clock_s
from keepstep.elastic.worker.unmanaged_session import announced_unmanaged_session

# keepstep decides when a rank is lost; a rank may evaluate for hours while the others wait.
_COLLECTIVE_TIMEOUT = timedelta(days=1)


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    *,
    extra: Mapping[str, Stateful] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | Literal["auto"] | None = None,
    checkpoint_compression: Compression | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    start_from: str | os.PathLike[str] | StartFrom | None = None,
    snapshot_every: int | Literal["auto"] = 1,
    mesh: Mesh | None = None,
    seed: int = 0,
    descriptions: Descriptions = NOT_DESCRIBED,
    config: Json = None,
) -> Attached:
    """Protect objects that the script has made; every rank calls it once, before its loop.

    For loops that own their model and process groups, as frameworks do. The process ends with its
    generation: after a failure a warm process runs the script from its first line, and `restore`
    fills the objects from memory. With `join`, the process survives, which is faster.

    Under torchrun with `--rdzv-backend keepstep` it is torchrun that runs the script again, in new
    processes. Elsewhere the script runs without recovery, snapshots and stored checkpoints, and
    says so once.

    Args:
        model: sharded and wrapped as it is trained; not on the meta device.
        optimizer: the optimizer, or all of them.
        scheduler: the learning-rate scheduler, or all of them.
        extra: objects that are saved and restored by name, such as a GradScaler, an average of
            the weights, or a StatefulDataLoader; rank 0's state where it is not tensors.
        checkpoint: as for `join`, like the next ones: URL to store checkpoints under.
        checkpoint_every: number of steps between stored checkpoints.
        checkpoint_compression: how they are compressed.
        keep_last: number of the newest checkpoints to keep.
        keep_every: which older ones to keep.
        start_from: checkpoint that a new job begins from.
        snapshot_every: number of steps between snapshots in memory.
        mesh: as for `join`: which numbers of ranks fit, and which ranks have samples of their own.
            The script makes its device mesh itself.
        seed: seed of the order of `Attached.batches` and `Attached.batch_sampler`, and of the
            generators of ranks that the restored state has none for.
        descriptions: as for `State`: what the model's tensors are.
        config: as for `State`: the model's configuration, as JSON.

    Raises:
        UsageError: an argument is invalid, the process has attached or joined before, or the
            script has several ranks and has not called `init_process_group` yet.
        CheckpointError: an optimizer updates parameters that the model does not have, or a state
            cannot be stored.
    """
    checkpoint = None if checkpoint is None else url_text(checkpoint)
    options = JobOptions(
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        checkpoint_compression=checkpoint_compression,
        keep_last=keep_last,
        keep_every=keep_every,
        snapshot_every=snapshot_every,
        seed=seed,
    )
    optimizers = _all_of(optimizer, Optimizer, "optimizer")
    schedulers = _all_of(scheduler, LRScheduler, "scheduler")
    _check_schedulers(schedulers, optimizers)
    state = State(model, lambda _: optimizers, extra=extra or {}, descriptions=descriptions,
                  config=config)  # fmt: skip
    device = _device_of(model)
    rule = MeshRule(mesh)
    limits = rule.limits()
    session = _session(checkpoint)
    assignment = session.wait_for_assignment(0)
    _check_groups(assignment.world_size)
    if session.answers_notices:
        leave_notices_to_agent()
    awaits_order = _awaits_abort_order()
    # What one worker of a node has imported, the others have too.
    reports_modules = session.is_managed and assignment.local_rank == 0
    modules = imported_modules(session.own_modules) if reports_modules else ()
    session.report(
        options.joined(
            limits, awaits_abort_order=awaits_order, restarts_script=True, modules=modules
        )
    )
    sizes = rule.sizes(assignment.world_size)
    if sizes is None:
        # Its ranks were chosen before any worker knew the mesh; the leader ends the generation.
        session.wait_for_closing(assignment.generation)
        session.end_for_successor(assignment.generation)
    ranks = separate_group(
        CONTROL_GROUPS.of(), f"keepstep/attach/{assignment.generation}", _COLLECTIVE_TIMEOUT
    )
    session.report(Ready(generation=assignment.generation, at_s=wall_clock_s()))
    share = data_share(sizes, assignment.rank)
    training = TrainingState(
        state,
        device,
        assignment.rank,
        share,
        is_stage=_differ_in_parameters(model, ranks),
        schedulers=schedulers,
        seeds_new_job=False,
    )
    return Attached(
        session=session,
        assignment=assignment,
        training=training,
        ranks=ranks,
        device=device,
        checkpoint=checkpoint,
        start_from=StartFrom.of(start_from),
        snapshot_every=options.snapshot_interval,
        # NumPy's numbers overflow where Python's grow.
        seed=operator.index(seed),
        share=share,
        awaits_abort_order=awaits_order,
    )


def _session(checkpoint: str | None) -> Session:
    session = current() or launched_session()
    if session is None:
        return announced_unmanaged_session(checkpoint, has_groups=True)
    if session.has_joined:
        raise UsageError(
            "this process has attached a model or joined a job before: call keepstep.attach once, "
            "with all optimizers, and put what belongs to other models into extra="
        )
    return session


def _check_schedulers(schedulers: Sequence[LRScheduler], optimizers: Sequence[Optimizer]) -> None:
    attached = {id(_unwrapped(it)) for it in optimizers}
    for number, scheduler in enumerate(schedulers):
        if id(_unwrapped(scheduler.optimizer)) not in attached:
            raise UsageError(
                f"attach(scheduler=...): scheduler {number} drives an optimizer that is not among "
                "those of attach(optimizer=...): give all optimizers that the script steps"
            )


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside those of frameworks, such as Accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, Optimizer) else optimizer


def _check_groups(world_size: int) -> None:
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() != world_size:
            raise UsageError(
                f"the script has made a default process group of {dist.get_world_size()} ranks, "
                f"and the job has {world_size}: call torch.distributed.init_process_group without "
                "rank and world_size, which it finds in the environment"
            )
    elif world_size > 1:
        raise UsageError(
            f"the job has {world_size} ranks: call torch.distributed.init_process_group before "
            "keepstep.attach"
        )


def _awaits_abort_order() -> bool:
    """Return whether a collective that is aborted may return garbage, as NCCL's may."""
    if not dist.is_initialized():
        return False
    back_ends = dist.get_backend_config().split(",")
    return any(part.rpartition(":")[2] != "gloo" for part in back_ends)


def _differ_in_parameters(model: nn.Module, ranks: ControlGroup) -> bool:
    """Return whether ranks have other parameters, as those of a pipeline's stages."""
    names = ranks.gather(sorted(ModelParameters(model).all_names()))
    return any(other != names[0] for other in names)


def _device_of(model: nn.Module) -> torch.device:
    tensors = [*model.parameters(), *model.buffers()]
    on_meta = [tensor for tensor in tensors if tensor.is_meta]
    if on_meta:
        raise UsageError(
            f"{len(on_meta)} tensors of the model are on the meta device: give them memory, as by "
            "model.to_empty(device=...), before keepstep.attach"
        )
    return tensors[0].device if tensors else torch.device("cpu")


def _all_of(given: Any, kind: type[Any], name: str) -> tuple[Any, ...]:
    """Return one object or several as a tuple; an empty one for None."""
    if given is None:
        return ()
    items = (given,) if isinstance(given, kind) else given
    if not isinstance(items, Sequence) or not all(isinstance(item, kind) for item in items):
        raise UsageError(
            f"attach({name}=...) is of type {type(given).__name__}: give a {kind.__module__}."
            f"{kind.__name__}, or several in a list; of a framework's wrapper, what it wraps"
        )
    if len({id(item) for item in items}) < len(items):
        raise UsageError(f"attach({name}=...) has one of them twice: give each once")
    return tuple(items)
