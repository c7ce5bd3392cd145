"""Plans a checkpoint together with the servers of the snapshot's other holders.

There is a planner for every few ranks (`checkpoint.format.stored.shared_plan`): the server that
holds the first of them. The servers plan in three stages. At each one a server posts what it has
for others (`plan_outbox`), then reads what they have posted for it:

- boxes: each planner gets those of its tensors, the first one also digests of all documents;
- chunks: each holder gets from the planners what its ranks write, and from the first one which of
  its documents are stored: of equal ones, one rank's;
- content: the server that publishes gets the planners' tensors, and these documents.

So what a server receives depends little on the number of nodes. While the
layout is the same, it is sent again, but not planned again.

The ranks do not plan: they could do so only together, in the step after the first snapshot of a
layout. If they failed in that step, the snapshot could not be stored.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec.msgpack import decode, encode

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.format.layout.boxes import Entry, Json, ShardIndex
from keepstep.checkpoint.format.layout.documents import (
    document_digests,
    last_holders,
    merged_documents,
)
from keepstep.checkpoint.format.stored.chunking import (
    ChunkPlan,
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
from keepstep.checkpoint.snapshot.memory.messages import (
    PersistTask,
    PlanStage,
    RankHolder,
    ReadPlan,
)
from keepstep.checkpoint.snapshot.server.plan_outbox import PlanOutbox
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory

_PARALLEL_SERVERS = 8

# How long to wait for one server. Its agent begins the attempt within moments; its thread may be at
# work on a chunk of an attempt that was given up, or remove older checkpoints.
_SERVER_LIMIT_S = 600.0

Stop = Callable[[], bool]
"""Whether the attempt is given up."""

_Item = TypeVar("_Item")
_Message = TypeVar("_Message")

_Shares = list[tuple[dict[int, WriterPlan], TensorPlan]]
"""For each planner, what `plan_share` returned."""


class _Boxes(msgspec.Struct):
    """By rank, its boxes for each planner of the receiver, and its documents' digests."""

    boxes: list[list[list[Entry]]]
    digests: list[dict[str, str]]


class _Chunks(msgspec.Struct):
    """By planner, what the receiver's ranks write; by rank, the documents of it that are stored."""

    plans: list[dict[int, WriterPlan]]
    documents: list[list[str]]


class _Content(msgspec.Struct):
    """The tensors of the sender's planners; by rank, its stored documents, as JSON."""

    tensors: list[TensorPlan]
    documents: bytes


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
        self._connect = connect
        self._planned: tuple[object, _Shares] = (None, [])

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
        messages = self._read_all(task.attempt, task.holders, "content", None, stop, _Content)
        for holder, message in zip(task.holders, messages, strict=True):
            plans += message.tensors
            documents.update(_paired(holder, holder.ranks, json.loads(message.documents)))
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
        content = _Content(tensors, json.dumps(documents).encode())
        self._outbox.post(task.attempt, "content", {None: encode(content)})
        return plan

    def _post_boxes(
        self, task: PersistTask, holders: _Holders, indexes: Sequence[ShardIndex]
    ) -> None:
        """Post what this node's ranks hold of the tensors of each holder's planners."""
        check_storable({entry.key for index in indexes for entry in index.entries})
        count = sum(map(len, holders.planners))
        split = [entries_by_planner(index.entries, count) for index in indexes]
        digests = [document_digests(index.documents) for index in indexes]
        messages: dict[int | None, bytes] = {}
        for number in holders.planning:
            boxes = [[own[planner] for planner in holders.planners[number]] for own in split]
            messages[number] = encode(_Boxes(boxes, digests if holders.has_first(number) else []))
        self._outbox.post(task.attempt, "boxes", messages)

    def _plan_shares(
        self, task: PersistTask, holders: _Holders, own: int, stop: Stop
    ) -> list[TensorPlan]:
        """Plan the shares of this node's planners, if it has any; return their tensors."""
        planners = holders.planners[own]
        if not planners:
            return []
        messages = self._read_all(task.attempt, task.holders, "boxes", own, stop, _Boxes)
        held: dict[int, list[list[Entry]]] = {}
        digests: dict[int, dict[str, str]] = {}
        for holder, message in zip(task.holders, messages, strict=True):
            for rank, boxes in _paired(holder, holder.ranks, message.boxes):
                held[rank] = [part for _, part in _paired(holder, planners, boxes)]
            if holders.has_first(own):
                digests.update(_paired(holder, holder.ranks, message.digests))
        # Layouts seldom change between checkpoints.
        layout = (planners, task.compression, held)
        if self._planned[0] != layout:
            by_planner = zip(*(held[rank] for rank in holders.ranks), strict=True)
            self._planned = (
                layout,
                [
                    plan_share(parts, planner, task.compression)
                    for planner, parts in zip(planners, by_planner, strict=True)
                ],
            )
        shares = self._planned[1]
        names = _stored_documents(digests)
        plans_by_rank = [
            {holders.ranks[writer]: plan for writer, plan in plans.items()} for plans, _ in shares
        ]
        messages_of: dict[int | None, bytes] = {}
        for number, holder in enumerate(task.holders):
            chunks = [
                {rank: plans[rank] for rank in holder.ranks if rank in plans}
                for plans in plans_by_rank
            ]
            messages_of[number] = encode(_Chunks(chunks, [names[rank] for rank in holder.ranks]))
        self._outbox.post(task.attempt, "chunks", messages_of)
        return [tensors for _, tensors in shares]

    def _read_chunks(
        self, task: PersistTask, holders: _Holders, own: int, stop: Stop
    ) -> tuple[NodePlan, list[list[str]]]:
        """Read from all planners what this node's ranks write, and which documents are stored."""
        planning = [task.holders[number] for number in holders.planning]
        messages = self._read_all(task.attempt, planning, "chunks", own, stop, _Chunks)
        shares: dict[int, dict[int, WriterPlan]] = {}
        names: list[list[str]] = []
        for number, message in zip(holders.planning, messages, strict=True):
            holder = holders.holders[number]
            shares.update(_paired(holder, holders.planners[number], message.plans))
            if holders.has_first(number):
                names = message.documents
        ranks = tuple(sorted(holders.holders[own].ranks))
        merged = [
            merged_writer_plan(plans[rank] for _, plans in sorted(shares.items()) if rank in plans)
            for rank in ranks
        ]
        tensors = {key: tensor for plan in merged for key, tensor in plan.tensors.items()}
        chunks = ChunkPlan(tensors, tuple(plan.chunks for plan in merged))
        return NodePlan(ranks=holders.ranks, own=ranks, chunks=chunks), names

    def _read_all(
        self,
        attempt: str,
        holders: Sequence[RankHolder],
        stage: PlanStage,
        own: int | None,
        stop: Stop,
        message_type: type[_Message],
    ) -> list[_Message]:
        """Return what the servers of these holders have posted for this node.

        A server begins with itself, so that not all ask the same one at the same time. After a
        failure all give up.
        """
        request = ReadPlan(attempt=attempt, stage=stage, holder=own)
        first = next((n for n, holder in enumerate(holders) if holder.address is None), 0)
        has_failed = threading.Event()

        def is_over() -> bool:
            return has_failed.is_set() or stop()

        def read(holder: RankHolder) -> _Message:
            if is_over():
                raise _given_up()
            if holder.address is None:
                message = _read_one("this node", self._outbox.read_plan, request, is_over)
            else:
                with closing(self._connect(holder.address)) as server:
                    message = _read_one(holder.address, server.read_plan, request, is_over)
            try:
                return decode(message, type=message_type)
            except msgspec.MsgspecError as error:
                raise _unreadable(holder, f"{error!r:.200}") from error

        with ThreadPoolExecutor(_PARALLEL_SERVERS) as pool:
            order = [*range(first, len(holders)), *range(first)]
            futures = {number: pool.submit(read, holders[number]) for number in order}
            done, pending = wait(futures.values(), return_when=FIRST_EXCEPTION)
            if pending:
                has_failed.set()
            for future in done:
                future.result()
            return [futures[number].result() for number in range(len(holders))]


def _read_one(
    address: str, read: Callable[[ReadPlan], bytes | None], request: ReadPlan, is_over: Stop
) -> bytes:
    deadline_s = time.monotonic() + _SERVER_LIMIT_S
    while (message := read(request)) is None:
        if is_over():
            raise _given_up()
        if time.monotonic() > deadline_s:
            raise SnapshotUnavailable(
                f"the snapshot server at {address} did not plan its share within "
                f"{_SERVER_LIMIT_S:.0f} s: its node is slow, or its agent has not begun to store "
                "the snapshot"
            )
    return message


def _paired(
    holder: RankHolder, keys: Sequence[int], items: Sequence[_Item]
) -> Iterator[tuple[int, _Item]]:
    """Pair ranks or planners with what a holder's server has sent of each."""
    if len(keys) != len(items):
        raise _unreadable(holder, f"{len(items)} items instead of {len(keys)}")
    return zip(keys, items, strict=True)


def _unreadable(holder: RankHolder, reason: str) -> SnapshotUnavailable:
    return SnapshotUnavailable(
        f"the snapshot server at {holder.address} sent a plan that cannot be read ({reason}); run "
        "one version of keepstep on all nodes"
    )


def _given_up() -> SnapshotUnavailable:
    return SnapshotUnavailable("this attempt was given up, or its generation is over")


def _stored_documents(digests: Mapping[int, Mapping[str, str]]) -> Mapping[int, list[str]]:
    """Return the names of each rank's documents, except those that are equal on a higher rank."""
    ranks = sorted(digests)
    names: dict[int, list[str]] = defaultdict(list)
    for (name, _), position in last_holders([digests[rank] for rank in ranks]).items():
        names[ranks[position]].append(name)
    return names
