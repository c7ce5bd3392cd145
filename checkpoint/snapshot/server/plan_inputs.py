"""What a node's ranks hold of a snapshot, split by the planners of a checkpoint.

A planner asks every node for the boxes of its own tensors only. The split is made at the first
request, and kept while the ranks' boxes stay the same.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from keepstep.checkpoint.format.layout.boxes import Entry
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.format.stored.chunking import check_storable
from keepstep.checkpoint.format.stored.shared_plan import entries_by_planner
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory


@dataclass(frozen=True, slots=True)
class PlanInput:
    """The boxes of one planner's tensors, a list for each rank, as JSON; and their digest."""

    digest: str
    encoded: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """The inputs of so many planners, made of these ranks' entries.

    `snapshot` is the last one that had these entries.
    """

    snapshot: SnapshotId
    ranks: tuple[int, ...]
    entries: tuple[tuple[Entry, ...], ...]
    inputs: tuple[PlanInput, ...]


class PlanInputs:
    """Splits what ranks of a node hold. Thread-safe; keeps the last split."""

    def __init__(self, memory: SnapshotMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._split: _Split | None = None

    def get(
        self, snapshot: SnapshotId, ranks: Sequence[int], planner: int, planners: int
    ) -> PlanInput:
        """Return what ranks hold of the tensors that fall to one of so many planners.

        Raises:
            SnapshotUnavailable: a rank's shard is not held here.
            LayoutMismatch: the name of a tensor cannot be stored.
            ValueError: there is no such planner.
        """
        if planner >= planners:
            raise ValueError(f"there is no planner {planner} of {planners}")
        with self._lock:
            split = self._split
            if (
                split is None
                or (split.snapshot, split.ranks) != (snapshot, tuple(ranks))
                or len(split.inputs) != planners
            ):
                split = self._split = self._updated(split, snapshot, tuple(ranks), planners)
            return split.inputs[planner]

    def _updated(
        self, last: _Split | None, snapshot: SnapshotId, ranks: tuple[int, ...], planners: int
    ) -> _Split:
        entries = tuple(self._memory.index(snapshot, rank).entries for rank in ranks)
        if (
            last is not None
            and (last.ranks, len(last.inputs)) == (ranks, planners)
            and last.entries == entries
        ):
            return replace(last, snapshot=snapshot)
        check_storable({entry.key for own in entries for entry in own})
        split = [entries_by_planner(own, planners) for own in entries]
        inputs = []
        for planner in range(planners):
            encoded = json.dumps([own[planner] for own in split], separators=(",", ":")).encode()
            digest = hashlib.blake2b(encoded, digest_size=16).hexdigest()
            inputs.append(PlanInput(digest, encoded))
        return _Split(snapshot=snapshot, ranks=ranks, entries=entries, inputs=tuple(inputs))
