"""Computes the samples of each global batch from dataset size, batch size, seed and step. Pure.

The world size only determines how a batch is divided among ranks, so a job that shrinks, grows or
restarts sees the same samples in the same order. An epoch's permutation is a keyed Feistel network
over the indices with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains",
CT-RSA 2002): each element is computed alone, memory does not grow with the dataset, and the result
is the same on every machine and with every version of every library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.elastic.errors import UsageError

_ROUNDS = 4
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class DataOrder:
    """The order of one dataset of `samples` samples in global batches of `global_batch`.

    An epoch's last, incomplete batch is dropped. Passes over the data with different
    `pass_number`, counted from 0, have different orders.
    """

    samples: int
    global_batch: int
    seed: int = 0
    shuffle: bool = True
    pass_number: int = 0

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise UsageError(f"global_batch={self.global_batch}: give at least 1")
        if self.samples < self.global_batch:
            raise UsageError(
                f"the dataset has {self.samples} samples, fewer than one global batch of "
                f"{self.global_batch}; give a smaller global_batch"
            )

    @property
    def key(self) -> int:
        """The key of this pass's randomness."""
        return pass_key(self.seed, self.pass_number)

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole global batches in the dataset."""
        return self.samples // self.global_batch

    def indices(self, step: int) -> Sequence[int]:
        """Return the dataset indices of global batch `step`, counted from 0 over all epochs."""
        return self._slice(step, 0, self.global_batch)

    def local_indices(self, step: int, rank: int, world_size: int) -> Sequence[int]:
        """Return one rank's share of global batch `step`: contiguous; sizes differ by at most one.

        Raises:
            UsageError: there are more ranks than samples in a batch.
        """
        return self._slice(step, *share(self.global_batch, rank, world_size))

    def loss_scale(self, rank: int, world_size: int) -> float:
        """Return the factor for a rank's mean loss that makes the mean over ranks exact.

        It is 1.0 if all shares have the same size.

        Raises:
            UsageError: there are more ranks than samples in a batch.
        """
        return loss_scale(self.global_batch, rank, world_size)

    def _slice(self, step: int, begin: int, end: int) -> Sequence[int]:
        epoch, within = divmod(step, self.steps_per_epoch)
        first = within * self.global_batch
        if not self.shuffle:
            return range(first + begin, first + end)
        return [
            permute(i, self.samples, mix(self.key, epoch))
            for i in range(first + begin, first + end)
        ]


def pass_key(seed: int, pass_number: int) -> int:
    """Return the key, of 64 bits, of a pass's randomness; the first pass is 0."""
    return mix(seed, pass_number) if pass_number else seed & _MASK


def share(global_batch: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return where a rank's share of a global batch begins and ends.

    Raises:
        UsageError: there are more ranks than samples in a batch.
    """
    if global_batch < world_size:
        raise UsageError(
            f"global_batch={global_batch} leaves some of {world_size} data-parallel ranks "
            f"without a sample; give at least {world_size}"
        )
    return global_batch * rank // world_size, global_batch * (rank + 1) // world_size


def loss_scale(global_batch: int, rank: int, world_size: int) -> float:
    """Return the factor for a rank's mean loss that makes the mean over ranks exact.

    Raises:
        UsageError: there are more ranks than samples in a batch.
    """
    begin, end = share(global_batch, rank, world_size)
    return (end - begin) * world_size / global_batch


def permute(index: int, size: int, key: int) -> int:
    """Return the image of `index` under a keyed pseudorandom permutation of `range(size)`."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & half_mask
        for round_number in range(_ROUNDS):
            left, right = right, left ^ (mix(key + round_number, right) & half_mask)
        index = (left << half_bits) | right
        # The network permutes a power of four that is at least `size`; repeating it until the
        # result is below `size` gives a permutation of `range(size)`.
        if index < size:
            return index


def mix(key: int, value: int) -> int:
    """Hash two integers to 64 bits with splitmix64's finalizer (Steele et al., OOPSLA 2014)."""
    mixed = (key * 0x9E3779B97F4A7C15 + value * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
