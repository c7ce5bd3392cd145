"""Protects each step of torchtitan's Trainer in memory, and stores checkpoints.

Trainer's seams are those of the versions in `TRIED`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torchtitan
from torchtitan.components.checkpointer import TRAIN_STATE, CheckpointManager
from torchtitan.tools import filesystem

from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer.attach import attach
from keepstep.elastic.trainer.attached import Attached
from keepstep.elastic.trainer.mesh_rule import resolved
from keepstep.integrations.torchtitan.dataloader import KeepstepDataLoader
from keepstep.integrations.versions import warn_if_untried

TRIED = ("0.3",)
"""Versions of torchtitan that were tried."""

_WITHOUT_EFFECT: Mapping[str, Any] = {
    "async_mode": "disabled",
    "create_seed_checkpoint": False,
    "enable_first_step_checkpoint": False,
    "exclude_from_loading": [],
    "load_only": False,
    "load_step": -1,
}
"""Options of torchtitan's manager that this one does not follow, and their defaults."""

_UNTRIED_DEGREES = (
    "pipeline_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
)


class KeepstepCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """Takes the place of torchtitan's manager.

    It inherits how a job begins, from a checkpoint of torchtitan in `folder` or
    `initial_load_path` or from weights of Hugging Face, and how a last checkpoint becomes such.

    Raises:
        UsageError: an option has no effect here, or what it asks for was not tried; or as
            `keepstep.attach` raises.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """Has torchtitan's options; steps are protected in memory without `enable`, too."""

        start_from: str | None = None
        """Checkpoint of keepstep's that a new job begins from."""

        snapshot_every: int = 1
        """Number of steps between snapshots in memory."""

    _attached: Attached | None = None

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: Sequence[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        base_folder: str = "",
        **rest: Any,
    ) -> None:
        warn_if_untried("torchtitan", torchtitan.__version__, TRIED)
        trainer = states[TRAIN_STATE]
        _check(config, trainer.config, dataloader, model_parts)
        super().__init__(
            config,
            dataloader=dataloader,
            model_parts=model_parts,
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            states=states,
            base_folder=base_folder,
            **rest,
        )
        self._config = config
        self._trainer = trainer
        storage: dict[str, Any] = {}
        if config.enable:
            storage = {
                "checkpoint": filesystem.join(base_folder, config.folder),
                "checkpoint_every": config.interval,
                "keep_last": config.keep_latest_k or None,
            }
        self._attached = attach(
            model_parts[0],
            optimizers.optimizers,
            lr_schedulers.schedulers,
            extra={"torchtitan": _Tokens(trainer)},
            start_from=config.start_from,
            snapshot_every=config.snapshot_every,
            mesh=mesh_of(trainer.config),
            seed=trainer.config.debug.seed or 0,
            **storage,
        )
        dataloader.follow(self._attached, trainer.config.training)
        # The base's methods call those below only then, and these need no storage.
        self.enable = True

    def _load(self, step: int = -1) -> bool:
        assert self._attached is not None
        # Trainer has counted a step already when its state is handed over: the position counts.
        self._trainer.step = self._attached.restore(step=self._begin)
        return self._attached.source != "start"

    def _begin(self) -> int:
        """Load what torchtitan begins with, and return its number of steps."""
        if self._config.enable and self._config.start_from is None:
            super()._load()
        return int(self._trainer.step)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        assert self._attached is not None
        if last_step and self._config.enable and self._config.last_save_in_hf:
            # A job that is interrupted here computes the step again, and comes here again.
            self._save_last_step(curr_step)
        self._attached.step_done()
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: the optimizers themselves wait until their state is copied."""

    def _close(self) -> None:
        attached, self._attached = self._attached, None
        if attached is None:
            return
        # Trainer is also closed after an error.
        error = sys.exception()
        if error is None:
            attached.finish()
        else:
            attached.end_if_lost(error)
        if self._config.enable:
            super()._close()


class _Tokens:
    """Trainer's number of tokens, of which each rank counts its own."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        dims = trainer.parallel_dims
        self._ranks = dims.dp_replicate * dims.dp_shard

    def state_dict(self) -> dict[str, int]:
        """Return the number over all ranks."""
        return {"tokens": self._trainer.ntokens_seen * self._ranks}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore this rank's share."""
        self._trainer.ntokens_seen = state["tokens"] // self._ranks


def mesh_of(config: Any) -> Callable[[int], dict[str, int] | None]:
    """Return the rule of the mesh that torchtitan makes for a number of ranks.

    It gives None for numbers that torchtitan refuses, such as those whose micro-batches do not
    divide the global batch.

    Args:
        config: a `Trainer.Config`.
    """
    parallelism, training = config.parallelism, config.training
    sizes = {
        "dp_replicate": parallelism.data_parallel_replicate_degree,
        "dp_shard": parallelism.data_parallel_shard_degree,
        "tp": parallelism.tensor_parallel_degree,
    }

    def rule(ranks: int) -> dict[str, int] | None:
        mesh = resolved(sizes, ranks)
        if mesh is None:
            return None
        shares = mesh["dp_replicate"] * mesh["dp_shard"]
        return None if training.global_batch_size % (training.local_batch_size * shares) else mesh

    return rule


def _check(
    config: KeepstepCheckpointManager.Config,
    trainer: Any,
    dataloader: Any,
    model_parts: Sequence[torch.nn.Module],
) -> None:
    for name, default in _WITHOUT_EFFECT.items():
        value = getattr(config, name)
        if value != default:
            raise UsageError(
                f"checkpoint.{name}={value!r} has no effect with keepstep's checkpoint manager: "
                f"leave it at {default!r}"
            )
    if config.export_dtype != "float32" and not config.last_save_in_hf:
        raise UsageError(
            f"checkpoint.export_dtype={config.export_dtype!r} is for checkpoint.last_save_in_hf: "
            "keepstep stores the whole state, as it is trained"
        )
    if config.start_from is not None and (config.initial_load_path or config.initial_load_in_hf):
        raise UsageError(
            "checkpoint.start_from and checkpoint.initial_load_... both say what the job begins "
            "from: give one of them"
        )
    if not isinstance(dataloader, KeepstepDataLoader):
        raise UsageError(
            f"{type(dataloader).__name__} has positions that hold for one number of ranks: take "
            "the config from keepstep.integrations.torchtitan.protected, which has keepstep's "
            "data loader"
        )
    if trainer.training.global_batch_size < 1:
        raise UsageError(
            "without training.global_batch_size the batch would depend on the number of ranks: "
            "give --training.global_batch_size"
        )
    if not trainer.training.disable_cuda_graphs:
        raise UsageError(
            "keepstep copies the state while a step computes, which was not tried while CUDA "
            "records a graph: give --training.disable_cuda_graphs"
        )
    for name in _UNTRIED_DEGREES:
        degree = getattr(trainer.parallelism, name)
        if degree > 1:
            raise UsageError(
                f"parallelism.{name}={degree} was not tried under keepstep: leave it at 1"
            )
    assert len(model_parts) == 1, "only a pipeline has several"
