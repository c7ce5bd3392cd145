"""Seeds the random numbers that datasets draw, by the sample's number in the job.

An augmentation then depends neither on the number of ranks and loader processes nor on where a run
resumed, and takes nothing from the generators that belong to the training state. A dataset that
reads several samples at once, by a `__getitems__` of its own, is seeded once for each share of a
batch that a rank reads: its random numbers depend on the number of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import Subset

from keepstep.elastic.data import numpy_generator
from keepstep.elastic.data.collation import ended_early
from keepstep.elastic.data.datasets import Dataset
from keepstep.elastic.data.order import mix

T = TypeVar("T")


class SeededSamples(Generic[T]):
    """A dataset whose samples are read by `(number in the job, index)`, each with its own seed.

    It seeds the global generators of torch (CPU), Python and NumPy.
    """

    def __init__(self, dataset: Dataset[T], seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int], /) -> T:
        """Return one sample."""
        number, index = key
        seed_generators(mix(self._seed, number))
        try:
            return self.dataset[index]
        except StopIteration as stop:
            raise ended_early(f"dataset[{index}]") from stop


class SeededBatches(SeededSamples[T]):
    """The same for a dataset with `__getitems__`, which reads several samples at once.

    They share the seed of the first one.
    """

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        """Return several samples."""
        seed_generators(mix(self._seed, keys[0][0]))
        indices = [index for _, index in keys]
        try:
            return self.dataset.__getitems__(indices)  # type: ignore[attr-defined]
        except StopIteration as stop:
            raise ended_early(f"dataset.__getitems__({indices})") from stop


def seeded(dataset: Dataset[T], seed: int) -> SeededSamples[T]:
    """Return a dataset whose samples have seeds of their own, made from `seed`."""
    reads_several = _reads_several(dataset)
    return SeededBatches(dataset, seed) if reads_several else SeededSamples(dataset, seed)


def _reads_several(dataset: Any) -> bool:
    """Return whether a dataset itself can read several samples at once."""
    # A subset has `__getitems__` whatever it is made of, and may only read one after another.
    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch (CPU), Python and NumPy with 64 bits."""
    # torch.manual_seed would seed the GPUs, too, whose generators belong to the training state.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy_generator.seed(seed)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Leave the global generators of torch (CPU), Python and NumPy as they were at the start."""
    kept = torch.get_rng_state(), random.getstate(), numpy_generator.kept_state()
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        numpy_generator.restore_kept(kept[2])
