"""Which node of an erasure group holds which block: rotating parity, as in RAID-5 and RAID-6.

Pure. After REFT's RAIM5 (arXiv 2310.12670), for any number of parity blocks. A group of n nodes with m parity blocks has n stripes of n
blocks, one on each node. What a node holds of its own, seen as one string of bytes, is cut into k = n - m blocks, and each belongs
to another stripe; of the m other stripes it keeps a parity block. So every node carries the same share, m/k of what it
holds of its own, and the loss of any m nodes takes at most m blocks of each stripe.

Blocks of a stripe need not be equally long: the shorter ones count as followed by zeros.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from keepstep.checkpoint.parity.erasure import Row, rebuilding_row

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Stripes:
    """The geometry of a group of `size` nodes, known by their positions, with `parity` parity blocks in each stripe."""

    size: int
    parity: int

    def __post_init__(self) -> None:
        if not 0 <= self.parity < self.size:
            raise ValueError(
                f"a group of {self.size} nodes cannot carry {self.parity} parity blocks a stripe"
            )

    @property
    def data(self) -> int:
        """Data blocks in each stripe, and blocks that each node's bytes are cut into."""
        return self.size - self.parity

    def parity_stripes(self, position: int) -> tuple[tuple[int, int], ...]:
        """Return the (stripe, row) of each parity block that a node keeps."""
        return tuple(((position - row) % self.size, row) for row in range(self.parity))

    def stripe(self, position: int, block: int) -> int:
        """Return the stripe that a node's own block belongs to, as its data block of the same number."""
        return (position - self.parity - block) % self.size

    def holder(self, stripe: int, number: int) -> int:
        """Return the position of the node that holds a stripe's block: data blocks are numbered first, then parity blocks."""
        ahead = self.parity + number if number < self.data else number - self.data
        return (stripe + ahead) % self.size

    def number(self, stripe: int, position: int) -> int:
        """Return the number of the block that a node holds of a stripe."""
        ahead = (position - stripe) % self.size
        return ahead - self.parity if ahead >= self.parity else self.data + ahead

    def block_nbytes(self, nbytes: int) -> int:
        """Return the size of the blocks that a node's `nbytes` bytes are cut into."""
        return -(-nbytes // (self.data * _ALIGNMENT)) * _ALIGNMENT

    def block_range(self, nbytes: int, block: int) -> tuple[int, int]:
        """Return where a node's own block begins and ends in its bytes; the last ones may be short or empty."""
        size = self.block_nbytes(nbytes)
        return min(block * size, nbytes), min((block + 1) * size, nbytes)


@dataclass(frozen=True, slots=True)
class Rebuilding:
    """`count` bytes from `offset` of a lost node's bytes are this combination of bytes from `block_offset` of a stripe's blocks.

    `sources` are the positions of the nodes that hold them, `coefficients` go with these.
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
    """Plan how bytes of a lost node come back.

    Args:
        stripes: the group.
        lost: positions of all nodes that are lost, this one among them.
        position: which of them.
        nbytes: how many bytes it held of its own.
        start: first byte wanted.
        stop: one past the last.

    Raises:
        ValueError: more nodes are lost than there are parity blocks.
    """
    if len(lost) > stripes.parity:
        raise ValueError(f"{len(lost)} nodes of a group are lost, {stripes.parity} can be rebuilt")
    parts = []
    size = stripes.block_nbytes(nbytes)
    for block in range(start // size, -(-stop // size)) if stop > start else ():
        first, last = max(start, block * size), min(stop, (block + 1) * size)
        stripe = stripes.stripe(position, block)
        present = [n for n in range(stripes.size) if stripes.holder(stripe, n) not in lost][
            : stripes.data
        ]
        row = rebuilding_row(stripes.data, stripes.parity, tuple(present), block)
        used = [(stripes.holder(stripe, n), c) for n, c in zip(present, row, strict=True) if c]
        sources, coefficients = tuple(p for p, _ in used), tuple(c for _, c in used)
        parts.append(
            Rebuilding(first, last - first, stripe, first - block * size, sources, coefficients)
        )
    return tuple(parts)
