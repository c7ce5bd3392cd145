"""Makes torchtitan's small Llama small enough for processors, and records its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from ops.bench.frameworks.plan import GLOBAL_BATCH, SAMPLES, STEPS
from ops.bench.frameworks.record import end_step, read

LENGTH = 16


class Rows(Dataset[torch.Tensor]):
    """Sequences of tokens, which say when they are read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        read.append(index)
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 2048, (LENGTH + 1,), generator=generator)


class Endless(IterableDataset[torch.Tensor]):
    """A rank's share of one epoch after the other, which goes on where its state says."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rows, self.rank, self.ranks = Rows(), rank, ranks
        self.epoch, self.begin = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            generator = torch.Generator().manual_seed(self.epoch)
            order = torch.randperm(SAMPLES, generator=generator).tolist()
            for index in order[self.rank :: self.ranks][self.begin :]:
                self.begin += 1
                yield self.rows[index]
            self.epoch, self.begin = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "begin": self.begin}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.begin = state["epoch"], state["begin"]


class Loader(ParallelAwareDataloader):
    """Reads as torchtitan's own loaders do."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_rank: int, dp_world_size: int, local_batch_size: int, **_: Any
    ) -> None:
        super().__init__(
            Endless(dp_rank, dp_world_size),
            dp_rank,
            dp_world_size,
            batch_size=local_batch_size,
            collate_fn=collate,
        )


def collate(rows: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tokens = torch.stack(rows)
    positions = torch.arange(LENGTH).expand(len(rows), -1)
    return {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]


class Record(MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, *, dump_folder: str, **rest: Any) -> None:
        super().__init__(config, dump_folder=dump_folder, **rest)
        self.directory = Path(dump_folder)

    def log(self, step: int, *_: Any, **__: Any) -> None:
        end_step(self.directory, step)


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


def small_llama() -> Any:
    """Return torchtitan's small Llama with one layer, and what PyTorch 2.13 needs."""
    config = llama3_debugmodel()
    config.metrics = Record.Config(log_freq=1)
    config.tokenizer = NoTokenizer.Config()
    config.training.steps = STEPS
    config.training.seq_len = LENGTH
    config.training.local_batch_size = GLOBAL_BATCH // 2
    config.training.global_batch_size = GLOBAL_BATCH
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    config.optimizer.implementation = "for-loop"
    model = config.model_spec.model
    del model.layers[1:]
    for _, _, parent, name in list(model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    return config
