"""Represents the numbers of ranks for which the training's mesh has places, in bounded size.

Pure. A node's record carries the form, so each agent and the leader can read it. Numbers are exact:
a bit for each multiple of the greatest common divisor, compressed. A mesh that has places for every
multiple needs no bits.
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

MOST_RANKS = 16_384
"""The greatest number of ranks that a user's mesh rule is asked about."""

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class RankLimits:
    """The numbers of ranks for which the training's mesh has places.

    Attributes:
        multiple: the number must be a multiple of this: the product of the mesh's fixed sizes.
        most: the greatest number; 0 for any.
        fitting: which multiples up to `most` fit, as `of` encodes them; empty for all.
    """

    multiple: int = 1
    most: int = 0
    fitting: str = ""

    @classmethod
    def of(cls, numbers: Iterable[int]) -> RankLimits:
        """Return the limits that allow these numbers and no others.

        Args:
            numbers: from 1 to `MOST_RANKS`; at least one.

        Raises:
            ValueError: there are none, or one is out of range.
        """
        allowed = set(numbers)
        if not allowed or min(allowed) < 1 or max(allowed) > MOST_RANKS:
            raise ValueError(f"numbers of ranks from 1 to {MOST_RANKS} are needed")
        multiple, most = math.gcd(*allowed), max(allowed)
        if len(allowed) == most // multiple:
            return cls(multiple, most)
        bits = sum(1 << (number // multiple - 1) for number in allowed)
        packed = zlib.compress(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), 9)
        return cls(multiple, most, base64.b64encode(packed).decode())

    def allow(self, ranks: int) -> bool:
        """Whether a generation may have this many ranks."""
        if ranks <= 0 or ranks % self.multiple or (self.most and ranks > self.most):
            return False
        return not self.fitting or bool(
            decode_fitting(self.fitting) >> (ranks // self.multiple - 1) & 1
        )

    def describe(self) -> str:
        """Return in words which numbers are allowed."""
        if not self.fitting:
            at_most = f", at most {self.most}" if self.most else ""
            return f"a multiple of {self.multiple}{at_most}"
        every = range(self.multiple, self.most + 1, self.multiple)
        allowed = [str(ranks) for ranks in every if self.allow(ranks)]
        more = ", ..." if len(allowed) > _SHOWN else ""
        return f"one of {', '.join(allowed[:_SHOWN])}{more}"


ANY_NUMBER = RankLimits()
"""The limits until the workers know the mesh."""


@lru_cache(maxsize=16)
def decode_fitting(fitting: str) -> int:
    """Return the bits of `RankLimits.fitting`: the lowest is for one time `multiple`.

    Raises:
        ValueError: it is not what `RankLimits.of` encodes.
    """
    try:
        unpacking = zlib.decompressobj()
        unpacked = unpacking.decompress(base64.b64decode(fitting, validate=True), MOST_RANKS // 8)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"no numbers of ranks: {error}") from error
    if not unpacking.eof:
        raise ValueError(f"numbers of ranks beyond {MOST_RANKS}, or cut off")
    return int.from_bytes(unpacked, "little")


def largest_sum_of_few(sizes: Sequence[int], most_nodes: int, limits: RankLimits) -> list[int]:
    """Return the positions of at most `most_nodes` nodes that have the most ranks that are allowed.

    Among several choices it takes the one with the most of the largest nodes, and the first of each
    size.

    Args:
        sizes: number of ranks of each node; the first ones are preferred.
        most_nodes: greatest number of nodes to choose.
        limits: which sums are allowed.
    """
    by_size = sorted(Counter(sizes).items(), reverse=True)
    largest = sum(sorted(sizes, reverse=True)[:most_nodes])
    for ranks in range(largest, 0, -1):
        counts = _counts(by_size, ranks, most_nodes) if limits.allow(ranks) else None
        if counts is not None:
            left = {size: count for (size, _), count in zip(by_size, counts, strict=False)}
            chosen = []
            for position, size in enumerate(sizes):
                if left.get(size, 0):
                    left[size] -= 1
                    chosen.append(position)
            return chosen
    return []


def _counts(by_size: Sequence[tuple[int, int]], ranks: int, most_nodes: int) -> list[int] | None:
    """Return how many nodes of each size, the largest first, have `ranks` ranks together.

    Unused sizes may be left out at the end. None if there is no such choice.
    """
    if not ranks:
        return []
    if not by_size or ranks > by_size[0][0] * most_nodes:
        return None
    (size, present), *smaller = by_size
    for count in range(min(present, most_nodes, ranks // size), -1, -1):
        rest = _counts(smaller, ranks - count * size, most_nodes - count)
        if rest is not None:
            return [count, *rest]
        if not smaller or ranks - count * size > smaller[0][0] * (most_nodes - count):
            # With fewer of this size, there would be even more left for the smaller ones.
            return None
    return None


def largest_sum(sizes: Sequence[int], limits: RankLimits) -> list[int]:
    """Return the positions of nodes that together have the most ranks that the limits allow.

    Among several choices it takes the one that leaves out the last nodes rather than the first
    ones. It is empty if no choice is allowed.

    Args:
        sizes: number of ranks of each node; the first ones are preferred.
        limits: which sums are allowed.
    """
    if len(set(sizes)) <= 1:
        totals = list(accumulate(sizes))
        count = max((n for n, ranks in enumerate(totals, 1) if limits.allow(ranks)), default=0)
        return list(range(count))
    # Bit s of `reachable[n]`: some of the nodes from position n on have s ranks together.
    reachable = [1]
    for size in reversed(sizes):
        reachable.append(reachable[-1] | reachable[-1] << size)
    reachable.reverse()
    sums = (ranks for ranks in range(sum(sizes), 0, -1) if reachable[0] >> ranks & 1)
    rest = next((ranks for ranks in sums if limits.allow(ranks)), 0)
    chosen = []
    for position, size in enumerate(sizes):
        if rest >= size and reachable[position + 1] >> (rest - size) & 1:
            chosen.append(position)
            rest -= size
    return chosen
