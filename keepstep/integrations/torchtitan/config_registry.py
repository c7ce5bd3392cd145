"""Configs for torchtitan's `--module` and `--config`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.models.llama3 import config_registry as llama3

from keepstep.integrations.torchtitan.checkpointer import KeepstepCheckpointManager
from keepstep.integrations.torchtitan.dataloader import KeepstepDataLoader, MakeRows
from keepstep.integrations.torchtitan.tokens import TokenIds


def protected(config: Any, rows: MakeRows | None = None) -> Any:
    """Change a config of torchtitan to keepstep's checkpoint manager and data loader.

    Args:
        config: a `Trainer.Config`. Options of its checkpoint manager are kept.
        rows: makes what the loader reads, as `MakeRows` says; None: the token ids in the file
            `dataloader.dataset_path`.

    Returns:
        The config.
    """
    checkpoint = {
        field.name: getattr(config.checkpoint, field.name)
        for field in fields(CheckpointManager.Config)
        # keepstep always stores while training goes on.
        if field.name != "async_mode" and hasattr(config.checkpoint, field.name)
    }
    config.checkpoint = KeepstepCheckpointManager.Config(**checkpoint)
    config.dataloader = KeepstepDataLoader.Config(rows=rows)
    return config


def llama3_debugmodel() -> Any:
    """Return torchtitan's small Llama, which reads the token ids in `dataloader.dataset_path`."""
    config = protected(llama3.llama3_debugmodel())
    config.tokenizer = TokenIds.Config()
    config.training.global_batch_size = 64
    config.training.disable_cuda_graphs = True
    return config
