"""Claims about reading: what is drawn at random for a sample follows from its number alone."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from keepstep.elastic.data.batches import Batches
from keepstep.elastic.data.data_pass import DataPass
from keepstep.elastic.data.order import DataOrder
from keepstep.elastic.data.partitions import Partition
from keepstep.elastic.data.position import Position
from keepstep.elastic.errors import UsageError

SAMPLES = 24
GLOBAL_BATCH = 6
Sample = tuple[int, float, float, float]


def drawn(index: int) -> Sample:
    return index, torch.rand(()).item(), random.random(), float(np.random.rand())


class Augmented:
    """Draws from all global generators for each sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        return drawn(index)


class AugmentedInGroups(Augmented):
    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        return [drawn(index) for index in indices]


def uncollated(samples: list[Sample]) -> list[Sample]:
    return samples


def read(
    first: int = 0,
    world_size: int = 1,
    workers: int = 0,
    dataset: Any = None,
    pass_number: int = 0,
    **loader_options: Any,
) -> dict[int, list[Sample]]:
    """Return the samples of each global batch from `first` on, of all ranks."""
    order = DataOrder(SAMPLES, GLOBAL_BATCH, seed=3, pass_number=pass_number)
    batches: Batches[Sample] = Batches(
        dataset or Augmented(), order, uncollated, workers, loader_options
    )
    end = 2 * order.steps_per_epoch
    found: dict[int, list[Sample]] = {step: [] for step in range(first, end)}
    for rank in range(world_size):
        shares: Iterator[list[Sample]] = batches.from_position(first, end, rank, world_size)
        for step, share in zip(found, shares, strict=True):
            found[step] += share
    return found


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_samples_are_the_same_for_any_number_of_ranks(world_size: int) -> None:
    assert read(world_size=world_size) == read()


def test_samples_are_the_same_wherever_a_run_resumed() -> None:
    undisturbed = read()
    assert read(first=5) == {step: undisturbed[step] for step in range(5, 8)}


@pytest.mark.slow
def test_samples_are_the_same_by_loader_processes() -> None:
    # Other tests have left threads in this process, which a fork does not survive.
    options = {"multiprocessing_context": "forkserver"}
    assert read(workers=2, persistent_workers=True, prefetch_factor=3, **options) == read()


def test_samples_of_one_run_are_drawn_differently() -> None:
    samples = [sample for batch in read().values() for sample in batch]
    for generator in (1, 2, 3):
        assert len({sample[generator] for sample in samples}) == len(samples)


def test_samples_read_in_groups_are_the_same_for_the_same_number_of_ranks() -> None:
    undisturbed = read(dataset=AugmentedInGroups(), world_size=2)
    resumed = read(dataset=AugmentedInGroups(), world_size=2, first=3)
    assert resumed == {step: undisturbed[step] for step in range(3, 8)}


class Folded(Subset[Sample]):
    """A subset of a kind of the user's own."""


@pytest.mark.parametrize("kinds", [[Subset], [Subset, Folded]])
def test_samples_of_a_subset_are_the_same_for_any_number_of_ranks(kinds: list[Any]) -> None:
    """It has `__getitems__`, even where what it is made of has not."""
    dataset: Any = Augmented()
    for kind in kinds:
        dataset = kind(dataset, range(SAMPLES))
    assert read(dataset=dataset, world_size=2) == read(dataset=dataset) == read()


def test_subset_of_what_reads_samples_in_groups_reads_them_so() -> None:
    groups: list[int] = []

    class Counted(AugmentedInGroups):
        def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
            groups.append(len(indices))
            return super().__getitems__(indices)

    read(dataset=Subset(Counted(), range(SAMPLES)), world_size=2, first=7)
    assert groups == [GLOBAL_BATCH // 2] * 2


def test_reading_takes_nothing_from_the_generators_of_the_training_state() -> None:
    def states() -> tuple[bytes, object, str]:
        return (
            torch.get_rng_state().numpy().tobytes(),
            random.getstate(),
            repr(np.random.get_state(legacy=False)),
        )

    before = states()
    read()
    assert states() == before


def test_each_pass_has_an_order_of_its_own() -> None:
    orders = [[sample[0] for sample in read(pass_number=number)[0]] for number in range(3)]
    assert len({tuple(order) for order in orders}) == 3


def test_an_argument_that_the_job_gives_the_loader_is_refused() -> None:
    # Out of order, loader processes' pieces of different batches would be joined.
    for name, value in (("shuffle", True), ("in_order", False)):
        message = rf"loader_options=\{{'{name}': ...\}}: job.batches sets it"
        with pytest.raises(UsageError, match=message):
            read(**{name: value})


class Exhausted(Augmented):
    """Calls `next` on an iterator that has no more, for a sample or for several."""

    def __getitem__(self, index: int) -> Sample:
        return next(iter(())) if index == 13 else super().__getitem__(index)


class ExhaustedInGroups(Exhausted):
    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        return [self[index] for index in indices]


def exhausted_collate(samples: list[Sample]) -> list[Sample]:
    return next(iter(()))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dataset", "collate", "named"),
    [
        (Exhausted(), uncollated, r"dataset\[13\] raised StopIteration"),
        (ExhaustedInGroups(), uncollated, r"dataset\.__getitems__\(\[.*\) raised StopIteration"),
        (Augmented(), exhausted_collate, "collate raised StopIteration"),
    ],
)
def test_a_stop_iteration_of_the_users_is_an_error_and_no_end_of_the_data(
    dataset: Any, collate: Any, named: str, workers: int
) -> None:
    """The loader ended, and was made again for ever."""
    options = {"multiprocessing_context": "forkserver"} if workers else {}
    data: DataPass[Sample] = DataPass(
        0, 0, 3, dataset, GLOBAL_BATCH, collate=collate, workers=workers, loader_options=options
    )
    with pytest.raises(RuntimeError, match=named):
        list(data.from_position(Position(), 0, 1))


def end_at_once(_: int) -> None:
    raise StopIteration


@pytest.mark.slow
def test_a_loader_that_ends_before_the_pass_is_an_error() -> None:
    options = {"multiprocessing_context": "forkserver", "worker_init_fn": end_at_once}
    data: DataPass[Sample] = DataPass(
        0, 0, 3, Augmented(), GLOBAL_BATCH, workers=1, loader_options=options
    )
    with pytest.raises(RuntimeError, match="ended 4 global batches before the end of the pass"):
        list(data.from_position(Position(), 0, 1))


class ExhaustedSource:
    def most_partitions(self) -> int:
        return 1

    def open_partition(self, partition: Partition, state: Any) -> Any:
        return self

    def read(self) -> Any:
        return next(iter(()))

    def state(self) -> Any:
        return None


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stop_iteration_of_a_source_is_an_error(workers: int) -> None:
    options = {"multiprocessing_context": "forkserver"} if workers else {}
    data: DataPass[Any] = DataPass(
        0, 0, 3, ExhaustedSource(), 2, steps=3, workers=workers, loader_options=options
    )
    with pytest.raises(RuntimeError, match="the source of partition 0 raised StopIteration"):
        list(data.from_position(Position(), 0, 1))
