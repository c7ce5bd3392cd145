"""Defines the kinds of sources that data.py measures, and a computation on their samples."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset

import keepstep

KINDS = (
    "indexed", "sharded", "shuffled", "iterable", "positioned", "mixture", "packed", "loader",
)  # fmt: skip
SHARDS, LINES = 12, 30


def write_shards(directory: Path) -> None:
    """Write the files that sharded streams are read from: lines of JSON of different lengths."""
    directory.mkdir(parents=True, exist_ok=True)
    for shard in range(SHARDS):
        lines = [
            json.dumps({"id": shard * 1000 + number, "text": "x" * (number * 7 % 23)}) + "\n"
            for number in range(LINES + shard % 3)
        ]
        (directory / f"{shard:02d}.jsonl").write_text("".join(lines))


def source(kind: str, directory: Path) -> Any:
    """Return a dataset of a kind, as a script makes it; shards are in `directory`."""
    paths = sorted(directory.glob("*.jsonl"))
    match kind:
        case "indexed":
            return Indexed("indexed", 200)
        case "sharded":
            return keepstep.ShardedStream(paths, read_lines)
        case "shuffled":
            return keepstep.Shuffled(keepstep.ShardedStream(paths, read_lines), 9)
        case "iterable":
            return Iterated("iterable", 70)
        case "positioned":
            return Positioned("positioned", 70)
        case "mixture":
            return keepstep.Mixture(
                [
                    keepstep.ShardedStream(paths, read_lines),
                    Indexed("mixed", 50),
                    keepstep.SplitStream(lambda part, parts: Positioned("split", 90, part, parts)),
                ],
                [5, 2, 1.5],
            )
        case "packed":
            documents = keepstep.ShardedStream(paths, read_documents)
            return keepstep.Packed(keepstep.Mixture([documents, Documents()], [3, 1]), 64)
        case _:
            return keepstep.SplitStream(make_loader)


def augmented(name: str, number: int) -> tuple[str, int, int]:
    """Return a sample that draws from all global generators."""
    drawn = (torch.rand(()).item(), random.random(), float(np.random.rand()))
    return name, number, zlib.crc32(repr(drawn).encode())


class Indexed(Dataset[Any]):
    """A dataset with an index."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return augmented(self._name, index)


class Documents(Dataset[Any]):
    """A dataset of token sequences of different lengths."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> list[int]:
        return [10_000 + index] * (1 + index * 17 % 150)


class Iterated(IterableDataset[Any]):
    """An iterable, or a part of one, without a state."""

    def __init__(self, name: str, size: int, part: int = 0, parts: int = 1) -> None:
        self._name = name
        self._numbers = range(part, size, parts)

    def __iter__(self) -> Iterator[Any]:
        for number in self._numbers:
            yield augmented(self._name, number)


class Positioned(Iterated):
    """The same with a state."""

    _next = _start = 0

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, 0
        for place, number in enumerate(self._numbers[start:], start):
            self._next = place + 1
            yield augmented(self._name, number)

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = self._start = state["next"]


def read_lines(path: Path, offset: int) -> Iterator[tuple[Any, int]]:
    for line, end in lines_of(path, offset):
        yield augmented("shard", line["id"]), end


def read_documents(path: Path, offset: int) -> Iterator[tuple[list[int], int]]:
    for line, end in lines_of(path, offset):
        yield [line["id"]] * (1 + 3 * len(line["text"])), end


def lines_of(path: Path, offset: int) -> Iterator[tuple[Any, int]]:
    with path.open("rb") as file:
        file.seek(offset)
        while line := file.readline():
            yield json.loads(line), file.tell()


def make_loader(part: int, parts: int) -> Any:
    """Return torchdata's loader of a part of a dataset, shuffled by its sampler."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset = Indexed("loader", 96)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, parts, part, seed=3)
    return StatefulDataLoader(dataset, batch_size=2, sampler=sampler, collate_fn=as_list)


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def name_of(sample: Any) -> str:
    """Return what tells a sample from others, and one reading of it from another."""
    if isinstance(sample, keepstep.PackedRow):
        rows = (sample.tokens.tolist(), sample.documents.tolist())
        return f"row {zlib.crc32(repr(rows).encode()):08x} of {rows[0][0]}"
    return repr(sample)


MODES = ("samples", "micro_batches", "tokens")
"""How the job weights its losses: by the mean over samples, that of micro-batches, or tokens."""


def mode_of(pass_number: int) -> str:
    return MODES[pass_number % len(MODES)]


def features(samples: Sequence[Any]) -> torch.Tensor:
    """Return float64 of shape (samples, 4) that follows from the samples alone."""
    numbers = [zlib.crc32(name_of(sample).encode()) for sample in samples]
    return torch.sin(torch.tensor(numbers, dtype=torch.float64)[:, None] * torch.arange(1.0, 5.0))


def losses_of(
    model: Callable[[torch.Tensor], torch.Tensor], samples: Sequence[Any]
) -> torch.Tensor:
    """Return a loss for each sample."""
    return (model(features(samples))[:, 0] - 1) ** 2


def tokens_of(samples: Sequence[Any]) -> torch.Tensor:
    """Return how many tokens each sample counts as, in a mean over tokens."""
    return torch.tensor([1 + len(name_of(sample)) % 7 for sample in samples], dtype=torch.float64)
