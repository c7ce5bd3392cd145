"""Describes an erasure group, and where the shards of a node lie in the node's bytes. Pure.

The stripes of a group are cut from each node's own bytes: the shards of its ranks, one after the
other. A node's shard table lists where each of them begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
"""A number of bytes, an offset or a position; a peer's negative ones are rejected on arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureGroup:
    """An erasure group as one of its nodes sees it.

    Args:
        generation: whose snapshots it protects.
        addresses: where the nodes' snapshot servers answer, by position.
        position: which of them this is.
        parity: how many of them may be lost.
    """

    generation: int
    addresses: tuple[str, ...]
    position: Count
    parity: Count

    def __post_init__(self) -> None:
        size = len(self.addresses)
        if not (self.position < size and self.parity < size):
            raise ValueError(
                f"position {self.position} with {self.parity} parity blocks is in no group of "
                f"{size} nodes"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLocation:
    """A rank's shard as part of its node's bytes.

    Args:
        rank: whose shard.
        offset: where it begins in the node's bytes.
        nbytes: its size.
        index_offset: where its index begins in the shard; it reaches to the shard's end.
        crc: the shard's CRC-32C.
    """

    rank: Count
    offset: Count
    nbytes: Count
    index_offset: Count
    crc: Count

    def __post_init__(self) -> None:
        if self.index_offset > self.nbytes:
            raise ValueError(f"rank {self.rank}'s index lies beyond its shard's end")


ShardTable = tuple[ShardLocation, ...]
"""A node's shards in the order in which they make up its bytes."""


def table_nbytes(table: ShardTable) -> int:
    """Return the number of a node's own bytes."""
    return table[-1].offset + table[-1].nbytes if table else 0
