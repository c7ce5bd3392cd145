"""Plans a checkpoint together with the servers of the snapshot's other holders.

There is a planner for every few ranks (`checkpoint.format.stored.shared_plan`): the server that
holds the first of them. The servers plan in three stages. At each one a server posts what it has
for others (`plan_outbox`), then reads what they have posted for it:

- boxes: each planner gets those of its tensors, the first one also digests of all documents;
- chunks: each holder gets from the planners what its ranks write, and from the first one which of
  its documents are stored: of equal ones, one rank's;
- content: the server that publishes gets the planners' tensors, and these documents.

So what a server receives depends little on the number of nodes. What has not changed since the last
checkpoint is sent again, but not planned again.

The ranks do not plan: they could do so only together, in the step after the first snapshot of a
layout. If they failed in that step, the snapshot could not be stored.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.format.layout.boxes import Entry, Json, ShardIndex
from keepstep.checkpoint.format.layout.documents import (
    document_digests,
    last_holders,
    merged_documents,
)
from keepstep.checkpoint.format.stored.chunking import (
    ChunkPlan,
    Compression,
    StoredTensor,
    check_storable,
)
from keepstep.checkpoint.format.stored.shared_plan import (
    TensorPlan,
    WriterPlan,
    entries_by_planner,
    merged_tensor_plan,
    merged_writer_plan,
    plan_share,
    planner_count,
    planner_rank,
)
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient
from keepstep.checkpoint.snapshot.memory.erasure_group import Count
from keepstep.checkpoint.snapshot.memory.messages import PersistTask, RankHolder, ReadPlan
from keepstep.checkpoint.snapshot.server.holder_servers import HolderServers, Stop
from keepstep.checkpoint.snapshot.server.plan_outbox import PlanOutbox
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_Boxes = list[list[list[tuple[str, str, list[Count], list[Count], list[Count]]]]]
"""For each rank of one holder and each planner of another, what `entries_by_planner` returns."""

_BoxesMessage = tuple[msgspec.Raw, list[dict[str, str]]]
"""`_Boxes`, and each rank's digests of documents."""

_ChunksMessage = tuple[msgspec.Raw, list[list[str]]]
"""A `WriterPlan` or None for each planner of one holder and each rank of another, and the names of
each rank's documents that are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """The part of a checkpoint that the ranks of one node write.

    Attributes:
        ranks: all ranks of the snapshot; the holders of pieces are positions in it.
        own: the node's ranks.
        chunks: their chunks, by position in `own`.
    """

    ranks: tuple[int, ...]
    own: tuple[int, ...]
    chunks: ChunkPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedContent:
    """The published facts about a checkpoint in addition to its parts.

    Attributes:
        tensors: all tensors.
        chunk_parts: for each tensor, the number of the holder that writes each chunk, in C order.
        documents: everything that is no tensor.
    """

    tensors: Mapping[str, StoredTensor]
    chunk_parts: Mapping[str, Sequence[int]]
    documents: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class _Holders:
    """The holders of a snapshot, by their number in the task, and which of them plan.

    Attributes:
        holders: their addresses and ranks.
        own: the number of this node; None if it holds nothing.
        ranks: all ranks, ascending.
        planners: each holder's planners.
    """

    holders: tuple[RankHolder, ...]
    own: int | None
    ranks: tuple[int, ...]
    planners: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, task: PersistTask) -> _Holders:
        ranks = tuple(sorted(rank for holder in task.holders for rank in holder.ranks))
        numbers = {ranks[planner_rank(n)]: n for n in range(planner_count(len(ranks)))}
        return cls(
            task.holders,
            next((n for n, holder in enumerate(task.holders) if holder.address is None), None),
            ranks,
            tuple(
                tuple(numbers[rank] for rank in holder.ranks if rank in numbers)
                for holder in task.holders
            ),
        )

    @property
    def planning(self) -> tuple[int, ...]:
        """The holders that plan."""
        return tuple(number for number, planners in enumerate(self.planners) if planners)

    def has_first(self, number: int) -> bool:
        """Whether a holder has the first planner, which decides on documents."""
        return 0 in self.planners[number]


@dataclass(frozen=True, slots=True)
class _Shares:
    """The plans of this node's planners, as JSON.

    Attributes:
        chunks: for each holder the `WriterPlan` of each of its ranks, by planner.
        tensors: the `TensorPlan` of each planner.
    """

    chunks: tuple[bytes, ...]
    tensors: bytes


class _Last(Generic[_Key, _Value]):
    """Keeps what was last made, and of what: layouts seldom change between checkpoints."""

    def __init__(self) -> None:
        self._last: tuple[_Key, _Value] | None = None

    def get(self, key: _Key, make: Callable[[], _Value]) -> _Value:
        """Return what was made of this key, or make it."""
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = key, make()
        return self._last[1]


class PlanExchange:
    """Plans with other servers, and keeps the plan while the layout is the same. For one thread.

    Args:
        memory: the node's shards.
        outbox: gets what this server has for others.
        connect: connects to another server.
    """

    def __init__(
        self, memory: SnapshotMemory, outbox: PlanOutbox, connect: Callable[[str], SnapshotClient]
    ) -> None:
        self._memory = memory
        self._outbox = outbox
        self._servers = HolderServers(outbox, connect)
        self._boxes: _Last[object, Mapping[int, bytes]] = _Last()
        self._shares: _Last[object, _Shares] = _Last()
        self._node_plan: _Last[object, NodePlan] = _Last()

    def plan(self, task: PersistTask, stop: Stop) -> NodePlan:
        """Return what this node's ranks write; other holders get what they need to do the same.

        Args:
            task: of which one holder is this node.
            stop: called between requests; True ends the attempt.

        Raises:
            LayoutMismatch: the ranks' shards do not fit together.
            SnapshotUnavailable: a holder cannot be reached or has lost the snapshot, another server
                has failed or did not answer in time, or the attempt was given up.
        """
        try:
            return self._plan(task, stop)
        except Exception as error:
            self._outbox.fail(task.attempt, error)
            raise

    def content(self, task: PersistTask, stop: Stop) -> PublishedContent:
        """Return what is to be published of an attempt whose parts are all written.

        Raises as `plan` does.
        """
        holders = _Holders.of(task)
        plans: list[TensorPlan] = []
        documents: dict[int, Mapping[str, Json]] = {}
        request = ReadPlan(attempt=task.attempt, stage="content", holder=None)
        messages = self._servers.read_all(task.holders, request, stop)
        for holder, message in zip(task.holders, messages, strict=True):
            with _reading(holder):
                tensors, own_documents = json.loads(message)
                plans += map(TensorPlan.from_json, tensors)
                documents.update(zip(holder.ranks, own_documents, strict=True))
        merged = merged_tensor_plan(plans)
        # Each planner has seen its own tensors only.
        check_storable(merged.tensors)
        parts = {rank: part for part, holder in enumerate(task.holders) for rank in holder.ranks}
        return PublishedContent(
            tensors=merged.tensors,
            chunk_parts={
                key: [parts[holders.ranks[writer]] for writer in writers]
                for key, writers in merged.writers.items()
            },
            documents=merged_documents(documents[rank] for rank in holders.ranks),
        )

    def _plan(self, task: PersistTask, stop: Stop) -> NodePlan:
        holders = _Holders.of(task)
        assert holders.own is not None, "a node that holds nothing is not asked to write"
        own = holders.own
        indexes = [self._memory.index(task.snapshot, rank) for rank in holders.holders[own].ranks]
        self._post_boxes(task, holders, indexes)
        tensors = self._plan_shares(task, holders, own, stop)
        plan, names = self._read_chunks(task, holders, own, stop)
        documents = [
            {name: index.documents[name] for name in stored}
            for index, stored in zip(indexes, names, strict=True)
        ]
        self._outbox.post(
            task.attempt, "content", {None: b"[%b,%b]" % (tensors, _encoded(documents))}
        )
        return plan

    def _post_boxes(
        self, task: PersistTask, holders: _Holders, indexes: Sequence[ShardIndex]
    ) -> None:
        entries = tuple(index.entries for index in indexes)
        boxes = self._boxes.get(
            (holders.planners, entries), lambda: _boxes_by_holder(entries, holders)
        )
        digests = _encoded([document_digests(index.documents) for index in indexes])
        self._outbox.post(
            task.attempt,
            "boxes",
            {
                number: b"[%b,%b]" % (own, digests if holders.has_first(number) else b"[]")
                for number, own in boxes.items()
            },
        )

    def _plan_shares(self, task: PersistTask, holders: _Holders, own: int, stop: Stop) -> bytes:
        """Plan the shares of this node's planners, if it has any; return the tensors as JSON."""
        if not holders.planners[own]:
            return b"[]"
        request = ReadPlan(attempt=task.attempt, stage="boxes", holder=own)
        messages = self._servers.read_all(task.holders, request, stop)
        held: list[bytes] = []
        digests: dict[int, dict[str, str]] = {}
        for holder, message in zip(task.holders, messages, strict=True):
            with _reading(holder):
                boxes, own_digests = msgspec.json.decode(message, type=_BoxesMessage)
                held.append(bytes(boxes))
                if holders.has_first(own):
                    digests.update(zip(holder.ranks, own_digests, strict=True))
        shares = self._shares.get(
            (own, task.compression, [holder.ranks for holder in task.holders], held),
            lambda: _planned(holders, own, held, task.compression),
        )
        names = _stored_documents(digests)
        self._outbox.post(
            task.attempt,
            "chunks",
            {
                number: b"[%b,%b]" % (chunks, _encoded([names[rank] for rank in holder.ranks]))
                for number, (holder, chunks) in enumerate(
                    zip(task.holders, shares.chunks, strict=True)
                )
            },
        )
        return shares.tensors

    def _read_chunks(
        self, task: PersistTask, holders: _Holders, own: int, stop: Stop
    ) -> tuple[NodePlan, list[list[str]]]:
        """Read from all planners what this node's ranks write, and which documents are stored."""
        request = ReadPlan(attempt=task.attempt, stage="chunks", holder=own)
        planning = [task.holders[number] for number in holders.planning]
        messages = self._servers.read_all(planning, request, stop)
        chunks: list[bytes] = []
        names: list[list[str]] = []
        for number, message in zip(holders.planning, messages, strict=True):
            with _reading(task.holders[number]):
                encoded, stored = msgspec.json.decode(message, type=_ChunksMessage)
                chunks.append(bytes(encoded))
                if holders.has_first(number):
                    names = stored
        plan = self._node_plan.get(
            (own, [holder.ranks for holder in task.holders], chunks),
            lambda: _node_plan(holders, own, chunks),
        )
        return plan, names


def _boxes_by_holder(entries: Sequence[Sequence[Entry]], holders: _Holders) -> Mapping[int, bytes]:
    """Return what ranks with these entries hold of the tensors of each holder's planners."""
    check_storable({entry.key for of_rank in entries for entry in of_rank})
    count = sum(map(len, holders.planners))
    split = [entries_by_planner(of_rank, count) for of_rank in entries]
    return {
        number: _encoded(
            [[of_rank[planner] for planner in holders.planners[number]] for of_rank in split]
        )
        for number in holders.planning
    }


def _planned(
    holders: _Holders, own: int, held: Sequence[bytes], compression: Compression | None
) -> _Shares:
    """Plan the shares of this node's planners.

    Args:
        holders: all holders.
        own: this node's number.
        held: what each holder's ranks hold of these shares, as `_Boxes`.
        compression: as for `plan_chunks`.
    """
    planners = holders.planners[own]
    boxes: dict[int, Json] = {}
    for holder, encoded in zip(holders.holders, held, strict=True):
        with _reading(holder):
            decoded = msgspec.json.decode(encoded, type=_Boxes)
            for rank, of_rank in zip(holder.ranks, decoded, strict=True):
                boxes[rank] = dict(zip(planners, of_rank, strict=True))
    shares = [
        plan_share([boxes[rank][planner] for rank in holders.ranks], planner, compression)
        for planner in planners
    ]
    encoded_plans = [
        {holders.ranks[writer]: plan.to_json() for writer, plan in plans.items()}
        for plans, _ in shares
    ]
    return _Shares(
        chunks=tuple(
            _encoded([[plans.get(rank) for rank in holder.ranks] for plans in encoded_plans])
            for holder in holders.holders
        ),
        tensors=_encoded([tensors.to_json() for _, tensors in shares]),
    )


def _stored_documents(digests: Mapping[int, Mapping[str, str]]) -> Mapping[int, list[str]]:
    """Return the names of each rank's documents, except those that are equal on a higher rank."""
    ranks = sorted(digests)
    names: dict[int, list[str]] = defaultdict(list)
    for (name, _), position in last_holders([digests[rank] for rank in ranks]).items():
        names[ranks[position]].append(name)
    return names


def _node_plan(holders: _Holders, own: int, chunks: Sequence[bytes]) -> NodePlan:
    """Return what a holder's ranks write, given what the planners have for it."""
    ranks = holders.holders[own].ranks
    plans: dict[int, dict[int, WriterPlan]] = {}
    for number, encoded in zip(holders.planning, chunks, strict=True):
        with _reading(holders.holders[number]):
            for planner, share in zip(holders.planners[number], json.loads(encoded), strict=True):
                plans[planner] = {
                    rank: WriterPlan.from_json(plan)
                    for rank, plan in zip(ranks, share, strict=True)
                    if plan is not None
                }
    merged = [
        merged_writer_plan(share[rank] for _, share in sorted(plans.items()) if rank in share)
        for rank in sorted(ranks)
    ]
    tensors = {key: tensor for plan in merged for key, tensor in plan.tensors.items()}
    return NodePlan(
        ranks=holders.ranks,
        own=tuple(sorted(ranks)),
        chunks=ChunkPlan(tensors, tuple(plan.chunks for plan in merged)),
    )


@contextmanager
def _reading(holder: RankHolder) -> Iterator[None]:
    """Raise SnapshotUnavailable where what a holder's server sent cannot be read."""
    try:
        yield
    except (
        msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError, RecursionError
    ) as error:  # fmt: skip
        raise SnapshotUnavailable(
            f"the snapshot server at {holder.address} sent a plan that cannot be read "
            f"({error!r:.200}); run one version of keepstep on all nodes"
        ) from error


def _encoded(data: Json) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()
