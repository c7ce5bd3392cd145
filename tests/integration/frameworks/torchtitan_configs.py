"""Configs for torchtitan's Trainer that record each step's samples, loss and other metrics."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

from keepstep.integrations.torchtitan import protected
from keepstep.integrations.torchtitan.config_registry import llama3_debugmodel
from keepstep.integrations.torchtitan.dataloader import collate

generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
read: list[int] = []


class Rows:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        read.append(index)
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 2048, (self.length,), generator=generator)


class Record(MetricsProcessor):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        pause_s: float = 0.0

    def __init__(self, config: Config, *, dump_folder: str, **rest: Any) -> None:
        super().__init__(config, dump_folder=dump_folder, **rest)
        self.directory = Path(dump_folder)

    def log(self, step: int, loss: float, *rest: Any, extra_metrics: Any = None) -> None:
        rank = int(os.environ["RANK"])
        line = {
            "step": step,
            "generation": generation,
            "rank": rank,
            "samples": read.copy(),
            "loss": loss.hex(),
            "metrics": extra_metrics,
            "world_size": int(os.environ["WORLD_SIZE"]),
        }
        read.clear()
        with (self.directory / f"rank-{rank}.{os.getpid()}.jsonl").open("a") as file:
            print(json.dumps(line), file=file)
        if not (self.directory / "hurry").exists():
            time.sleep(self.config.pause_s)


def small() -> Any:
    """Return a config that processors can compute."""
    config = protected(llama3_debugmodel(), lambda tokenizer, length: Rows(length))
    config.metrics = Record.Config(log_freq=1)
    config.training.seq_len = 16
    config.training.local_batch_size = 4
    config.training.global_batch_size = 16
    config.training.mixed_precision_param = "float32"
    if torch.__version__ < "2.14":
        config.parallelism.spmd_backend = "partial_dtensor"
    config.optimizer.implementation = "for-loop"
    config.debug.seed = 7
    model = config.model_spec.model
    del model.layers[1:]
    for _, _, parent, name in list(model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    return config


def own_manager() -> Any:
    """Return the config with a checkpoint manager and a loader of torchtitan's kind."""
    config = small()
    config.checkpoint = CheckpointManager.Config(enable=True, last_save_model_only=False)
    config.dataloader = OwnLoader.Config()
    return config


class OwnLoader(BaseDataLoader):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self.rows, self.size = Rows(seq_len + 1), local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            yield collate([self.rows[index] for index in range(self.size)])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass
