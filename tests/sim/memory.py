"""Plays a node's snapshot server around production's `snapshot_table`: buffers, parity, parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory import snapshot_table
from keepstep.checkpoint.snapshot.memory.snapshot_table import SnapshotTable

PLENTY = 2**40
SHARD_NBYTES = 100


@dataclass
class Memory:
    """Buffers by number with what was last written there, and whose blocks the parity has."""

    table: SnapshotTable = field(default_factory=SnapshotTable)
    buffers: dict[int, tuple[SnapshotId, int]] = field(default_factory=dict)
    pulled: dict[SnapshotId, set[str]] = field(default_factory=dict)
    garbage: dict[SnapshotId, set[str]] = field(default_factory=dict)
    """Servers of whose blocks the parity is, and which an abort had spoilt."""
    damaged: set[SnapshotId] = field(default_factory=set)
    """Snapshots that were forgotten because their memory had changed."""
    begun: set[tuple[SnapshotId, int]] = field(default_factory=set)
    """The shards that ranks copy."""
    _sealed: tuple[SnapshotTable | None, int, frozenset[SnapshotId]] = (None, 0, frozenset())

    def begin(self, snapshot: SnapshotId, rank: int) -> None:
        """Have a rank begin to copy its shard; raises SnapshotUnavailable."""
        self.table, held = snapshot_table.begin(self.table, snapshot, rank, SHARD_NBYTES, PLENTY)
        self.buffers[held.buffer] = (snapshot, rank)
        self.begun.add((snapshot, rank))

    def seal(self, snapshot: SnapshotId, rank: int) -> None:
        """Have a rank complete its shard; raises SnapshotUnavailable."""
        self.begun.discard((snapshot, rank))
        self.table = snapshot_table.seal(self.table, snapshot, rank)

    def seal_garbage(self, snapshot: SnapshotId, rank: int) -> None:
        """Have a rank seal what an aborted collective left; raises SnapshotUnavailable."""
        self.seal(snapshot, rank)
        self.buffers[self.table.shards[snapshot, rank].buffer] = (snapshot, -1 - rank)

    def fence(self, generation: int) -> None:
        """Refuse what is still begun or sealed in a generation."""
        self.table = snapshot_table.fence(self.table, generation)

    def abandon_begun(self) -> None:
        """Forget the shards of writers that have ended."""
        for snapshot, rank in sorted(self.begun):
            self.table = snapshot_table.abandon(self.table, snapshot, rank)
        self.begun.clear()

    def open_generation(self, generation: int) -> None:
        """Refuse older generations from now on."""
        self.table = snapshot_table.open_generation(self.table, generation)

    def commit(self, snapshot: SnapshotId) -> None:
        """Free what is older than the committed snapshot."""
        self.table = snapshot_table.commit(self.table, snapshot)

    def discard(self, snapshot: SnapshotId) -> None:
        """Forget a snapshot whose memory has changed."""
        self.damaged.add(snapshot)
        self.table = snapshot_table.discard(self.table, snapshot)

    def adopt(self, snapshot: SnapshotId, rank: int) -> None:
        """Rebuild a lost node's shard here; raises SnapshotUnavailable."""
        self.table, held = snapshot_table.adopt(self.table, snapshot, rank, SHARD_NBYTES, PLENTY)
        self.buffers[held.buffer] = (snapshot, rank)
        self.table = snapshot_table.complete_adoption(self.table, snapshot, rank)

    def pin(self, snapshot: SnapshotId) -> None:
        """Keep a snapshot; raises SnapshotUnavailable."""
        self.table = snapshot_table.pin(self.table, snapshot)

    def unpin(self, snapshot: SnapshotId) -> None:
        """Let go of a pinned snapshot."""
        self.table = snapshot_table.unpin(self.table, snapshot)

    def sealed(self, ranks: int) -> frozenset[SnapshotId]:
        """Return the snapshots that all of the node's ranks have sealed."""
        if self._sealed[0] is not self.table or self._sealed[1] != ranks:
            complete = (s for s, sealed in self.table.sealed().items() if len(sealed) == ranks)
            self._sealed = (self.table, ranks, frozenset(complete))
        return self._sealed[2]

    def content(self, snapshot: SnapshotId, rank: int) -> tuple[SnapshotId, int] | None:
        """Return what a sealed shard's buffer holds; None if there is no such shard."""
        shard = self.table.shards.get((snapshot, rank))
        return self.buffers[shard.buffer] if shard is not None and shard.sealed else None

    def is_spoilt(self, snapshot: SnapshotId) -> bool:
        """Whether a shard is what an aborted collective left."""
        owners = (
            self.buffers[held.buffer][1]
            for (s, _), held in self.table.shards.items()
            if s == snapshot
        )
        return any(rank < 0 for rank in owners)

    def is_intact(self, snapshot: SnapshotId, ranks: range) -> bool:
        """Whether every shard is sealed, and its buffer holds what was written for it."""
        return all(self.content(snapshot, rank) == (snapshot, rank) for rank in ranks)
