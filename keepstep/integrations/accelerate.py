"""Attaches a loop that is written for Accelerate.

    from keepstep.integrations.accelerate import attach

    model, optimizer = accelerator.prepare(model, optimizer)
    training = attach(accelerator, scheduler=scheduler)

It takes the objects that Accelerate has prepared or registered out of its wrappers. The loop is as
`keepstep.attach` describes it.

The attributes of Accelerator that it reads are those of the versions in `TRIED`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import accelerate
from accelerate.utils import DistributedType
from torch.optim.lr_scheduler import LRScheduler

from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer import attach as loops
from keepstep.elastic.trainer.attached import Attached
from keepstep.integrations.extra_objects import joined_extra
from keepstep.integrations.versions import warn_if_untried

TRIED = ("1.15",)
"""Versions of accelerate that were tried."""

_OWN_ENGINES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def attach(
    accelerator: Any, scheduler: LRScheduler | Sequence[LRScheduler] = (), **options: Any
) -> Attached:
    """Protect what `accelerator.prepare` has wrapped; every rank calls it once, before its loop.

    Objects of `accelerator.register_for_checkpointing` are protected with it, and a GradScaler.

    Args:
        accelerator: an Accelerator that has prepared one model and its optimizers.
        scheduler: schedulers that it has not prepared, and that step once for each step. A prepared
            one steps once for each rank.
        options: other arguments of `keepstep.attach`.

    Raises:
        UsageError: another number of models is prepared, an engine of DeepSpeed or Megatron has the
            state, or as `keepstep.attach` raises.
    """
    warn_if_untried("accelerate", accelerate.__version__, TRIED)
    if accelerator.distributed_type in _OWN_ENGINES:
        raise UsageError(
            f"{accelerator.distributed_type.value} keeps the training state in an engine of its "
            "own, which keepstep does not read: prepare the model with DDP or FSDP2"
        )
    models = accelerator._models
    if len(models) != 1:
        raise UsageError(
            f"Accelerator has prepared {len(models)} models: prepare one before "
            "keepstep.integrations.accelerate.attach, with all that is trained as its parts"
        )
    extra = {f"custom_{number}": made for number, made in enumerate(accelerator._custom_objects)}
    if accelerator.scaler is not None:
        extra["scaler"] = accelerator.scaler
    extra = joined_extra(extra, options.pop("extra", None))
    own = (scheduler,) if isinstance(scheduler, LRScheduler) else scheduler
    return loops.attach(
        models[0],
        [prepared.optimizer for prepared in accelerator._optimizers],
        [*(prepared.scheduler for prepared in accelerator._schedulers), *own],
        extra=extra,
        **options,
    )
