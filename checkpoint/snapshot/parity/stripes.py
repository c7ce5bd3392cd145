"""Placement of an erasure group's blocks on its nodes: rotating parity, as in RAID-5 and RAID-6.

Pure. After REFT's RAIM5 (arXiv 2310.12670), for any number of parity blocks. A group of n nodes
with m parity blocks has n stripes of n blocks, one block on each node. A node's own data, as one
string of bytes, is cut into k = n - m blocks, each in a different stripe; of the m other stripes
the node keeps a parity block. So every node stores the same share, m/k of the size of its own data,
and the loss of any m nodes takes at most m blocks of each stripe.

Blocks of a stripe need not be equally long: shorter ones are treated as followed by zeros.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from keepstep.checkpoint.format.layout.integers import ceil_div
from keepstep.checkpoint.snapshot.parity.erasure import Row, rebuilding_row

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Stripes:
    """The geometry of a group of `size` nodes with `parity` parity blocks in each stripe.

    A node is identified by its position in the group.
    """

    size: int
    parity: int

    def __post_init__(self) -> None:
        if not 0 <= self.parity < self.size:
            raise ValueError(
                f"a group of {self.size} nodes cannot hold {self.parity} parity blocks per stripe"
            )

    @property
    def data(self) -> int:
        """Number of data blocks in each stripe, and of blocks that each node's data is cut into."""
        return self.size - self.parity

    def parity_stripes(self, position: int) -> tuple[tuple[int, int], ...]:
        """Return the (stripe, row) of each parity block that a node keeps."""
        return tuple(((position - row) % self.size, row) for row in range(self.parity))

    def stripe(self, position: int, block: int) -> int:
        """Return the stripe of a node's own block, which is the stripe's data block `block`."""
        return (position - self.parity - block) % self.size

    def holder(self, stripe: int, number: int) -> int:
        """Return the position of the node that holds a block of a stripe.

        Args:
            stripe: the stripe.
            number: the block; data blocks are numbered first, then parity blocks.
        """
        distance = self.parity + number if number < self.data else number - self.data
        return (stripe + distance) % self.size

    def number(self, stripe: int, position: int) -> int:
        """Return the number of the block that a node holds of a stripe; the inverse of `holder`."""
        distance = (position - stripe) % self.size
        return distance - self.parity if distance >= self.parity else self.data + distance

    def block_nbytes(self, nbytes: int) -> int:
        """Return the size of the blocks that a node's `nbytes` bytes of own data are cut into."""
        return ceil_div(nbytes, self.data * _ALIGNMENT) * _ALIGNMENT

    def block_range(self, nbytes: int, block: int) -> tuple[int, int]:
        """Return the begin and end of a node's own block, in bytes of the node's own data.

        The last blocks may be short or empty.
        """
        size = self.block_nbytes(nbytes)
        return min(block * size, nbytes), min((block + 1) * size, nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilding:
    """A range of a lost node's data, as a linear combination of a stripe's blocks.

    The range is `count` bytes from `offset` of the node's data; in every block of the stripe it
    begins at byte `block_offset`. `sources` are the positions of the nodes that hold the blocks,
    `coefficients` their coefficients, in the same order.
    """

    offset: int
    count: int
    stripe: int
    block_offset: int
    sources: tuple[int, ...]
    coefficients: Row


def plan_rebuilding(
    stripes: Stripes, lost: Collection[int], position: int, nbytes: int, start: int, stop: int
) -> tuple[Rebuilding, ...]:
    """Plan how to rebuild a range of a lost node's data.

    Args:
        stripes: the group.
        lost: positions of all lost nodes, including this one.
        position: the lost node whose data is rebuilt.
        nbytes: size of the node's own data.
        start: first byte to rebuild.
        stop: one past the last byte.

    Raises:
        ValueError: more nodes are lost than there are parity blocks.
    """
    if len(lost) > stripes.parity:
        raise ValueError(f"{len(lost)} nodes of a group are lost, {stripes.parity} can be rebuilt")
    if stop <= start:
        return ()
    parts = []
    size = stripes.block_nbytes(nbytes)
    for block in range(start // size, ceil_div(stop, size)):
        first, last = max(start, block * size), min(stop, (block + 1) * size)
        stripe = stripes.stripe(position, block)
        present = [n for n in range(stripes.size) if stripes.holder(stripe, n) not in lost]
        combined = tuple(present[: stripes.data])
        row = rebuilding_row(stripes.data, stripes.parity, combined, block)
        nonzero = [(n, c) for n, c in zip(combined, row, strict=True) if c]
        parts.append(
            Rebuilding(
                offset=first,
                count=last - first,
                stripe=stripe,
                block_offset=first - block * size,
                sources=tuple(stripes.holder(stripe, n) for n, _ in nonzero),
                coefficients=tuple(c for _, c in nonzero),
            )
        )
    return tuple(parts)
