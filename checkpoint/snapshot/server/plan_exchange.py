"""Plans a checkpoint together with the servers of the snapshot's other holders.

There is a planner for every few ranks (`checkpoint.format.stored.shared_plan`): the server that
holds the first of them. Each server plans its planners' shares from what it reads of all holders,
then reads from all planners what its own ranks write. The one that publishes reads the tensors from
the planners, and documents from the holders; of documents that are alike it reads one. So what a
server receives depends little on the number of nodes, and what has not changed since the last
checkpoint is not sent again.

All that a share is planned from is answered at once from memory (`plan_answers`), and a server
plans its own shares before it waits for others'. So no two servers wait for each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.documents import last_holders, merged_documents
from keepstep.checkpoint.format.stored.chunking import (
    ChunkPlan,
    Compression,
    StoredTensor,
    check_storable,
)
from keepstep.checkpoint.format.stored.shared_plan import (
    TensorPlan,
    WriterPlan,
    merged_tensor_plan,
    merged_writer_plan,
    plan_share,
    planner_count,
    planner_rank,
)
from keepstep.checkpoint.snapshot.memory.erasure_group import Count
from keepstep.checkpoint.snapshot.memory.messages import (
    DocumentBytes,
    DocumentDigests,
    PersistTask,
    PlanBytes,
    PlanInputBytes,
    ReadDocumentDigests,
    ReadDocuments,
    ReadPlan,
    ReadPlanInput,
    ReadTensorPlan,
    TensorPlanBytes,
    Unchanged,
)
from keepstep.checkpoint.snapshot.server.holder_servers import (
    HolderServer,
    HolderServers,
    PlanServer,
    Stop,
)
from keepstep.checkpoint.snapshot.server.plan_answers import PlanAnswers
from keepstep.checkpoint.snapshot.server.plan_inputs import PlanInput
from keepstep.checkpoint.snapshot.server.plan_shares import PlannedShare

_HeldBoxes = list[list[tuple[str, str, list[Count], list[Count], list[Count]]]]
"""What `entries_by_planner` returns for one planner, of several ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """What the ranks of one node write of a checkpoint.

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
    """What is published of a checkpoint beside its parts.

    Attributes:
        tensors: all tensors.
        chunk_parts: for each tensor, the number of the holder that writes each chunk, in C order.
        documents: everything that is no tensor.
    """

    tensors: Mapping[str, StoredTensor]
    chunk_parts: Mapping[str, Sequence[int]]
    documents: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class _Planners:
    """Which holder plans which shares of a task.

    Attributes:
        ranks: all ranks, ascending.
        by_holder: each holder's planners, by the holder's number in the task.
    """

    ranks: tuple[int, ...]
    by_holder: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, task: PersistTask) -> _Planners:
        ranks = tuple(sorted(rank for holder in task.holders for rank in holder.ranks))
        planners = {
            ranks[planner_rank(planner)]: planner for planner in range(planner_count(len(ranks)))
        }
        return cls(
            ranks,
            tuple(
                tuple(planners[rank] for rank in holder.ranks if rank in planners)
                for holder in task.holders
            ),
        )

    @property
    def count(self) -> int:
        return sum(map(len, self.by_holder))


@dataclass(frozen=True, slots=True)
class _Share:
    """One planner's share, of so many planners', of what these ranks hold or write."""

    planner: int
    planners: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _OwnChunks:
    """What a planner has this node's ranks write, and the digest of the share it is from."""

    digest: str
    plans: tuple[WriterPlan | None, ...]


class PlanExchange:
    """Plans with other servers, and keeps the plan while the layout is the same. For one thread.

    Args:
        answers: what this server answers; it gets the shares that are planned here.
        connect: connects to another server.
    """

    def __init__(self, answers: PlanAnswers, connect: Callable[[str], PlanServer]) -> None:
        self._answers = answers
        self._servers = HolderServers(answers, connect)
        # All of the last plan: what it was made of, this node's shares, its ranks' chunks.
        self._inputs: Mapping[_Share, PlanInput] = {}
        self._shares: Mapping[int, PlannedShare] = {}
        self._chunks: Mapping[_Share, _OwnChunks] = {}

    def plan(self, task: PersistTask, stop: Stop) -> NodePlan:
        """Return what this node's ranks write, and answer others' requests for what theirs do.

        Args:
            task: of which one holder is this node.
            stop: called between requests; True ends the attempt.

        Raises:
            LayoutMismatch: the ranks' shards do not fit together.
            SnapshotUnavailable: a holder cannot be reached or has lost the snapshot, a planner has
                failed or did not answer in time, or the attempt was given up.
        """
        planners = _Planners.of(task)
        try:
            self._shares = self._plan_shares(task, planners, stop)
        except Exception as error:
            self._answers.shares.fail(task.attempt, error)
            raise
        self._answers.shares.complete(task.attempt, self._shares)
        own = next(tuple(sorted(h.ranks)) for h in task.holders if h.address is None)
        self._chunks = self._read_chunks(task, planners, own, stop)
        merged = [
            merged_writer_plan(
                plan
                for chunks in self._chunks.values()
                if (plan := chunks.plans[position]) is not None
            )
            for position in range(len(own))
        ]
        tensors = {key: tensor for plan in merged for key, tensor in plan.tensors.items()}
        return NodePlan(
            ranks=planners.ranks,
            own=own,
            chunks=ChunkPlan(tensors, tuple(plan.chunks for plan in merged)),
        )

    def content(self, task: PersistTask, stop: Stop) -> PublishedContent:
        """Return what is to be published of an attempt whose parts are all written.

        Raises as `plan` does.
        """
        planners = _Planners.of(task)

        def tensors_of(server: HolderServer) -> list[TensorPlan]:
            plans = []
            for planner in planners.by_holder[server.number]:
                request = ReadTensorPlan(attempt=task.attempt, planner=planner)
                _, payload = server.ask(request, TensorPlanBytes)
                with server.reading():
                    plans.append(TensorPlan.from_json(json.loads(payload)))
            return plans

        gathered = self._servers.of_all(task.holders, tensors_of, stop)
        merged = merged_tensor_plan(plan for plans in gathered for plan in plans)
        # Each planner has seen its own tensors only.
        check_storable(merged.tensors)
        parts = {rank: part for part, holder in enumerate(task.holders) for rank in holder.ranks}
        return PublishedContent(
            tensors=merged.tensors,
            chunk_parts={
                key: [parts[planners.ranks[writer]] for writer in writers]
                for key, writers in merged.writers.items()
            },
            documents=self._read_documents(task, planners.ranks, stop),
        )

    def _plan_shares(
        self, task: PersistTask, planners: _Planners, stop: Stop
    ) -> dict[int, PlannedShare]:
        """Plan the shares of this node's planners, from what all holders have of them."""
        own = next(
            planners.by_holder[number]
            for number, holder in enumerate(task.holders)
            if holder.address is None
        )
        if not own:
            return {}

        def inputs_of(server: HolderServer) -> dict[_Share, PlanInput]:
            shares = [_Share(planner, planners.count, server.holder.ranks) for planner in own]
            return {share: self._read_input(task, share, server) for share in shares}

        self._inputs = {
            share: given
            for inputs in self._servers.of_all(task.holders, inputs_of, stop)
            for share, given in inputs.items()
        }
        planned = {}
        for planner in own:
            inputs = {s.ranks: given for s, given in self._inputs.items() if s.planner == planner}
            digests = sorted([list(ranks), given.digest] for ranks, given in inputs.items())
            digest = hashlib.blake2b(
                _encoded([planner, planners.count, digests, task.compression]), digest_size=16
            ).hexdigest()
            known = self._shares.get(planner)
            planned[planner] = (
                known
                if known is not None and known.digest == digest
                else _planned(planner, planners.ranks, inputs, task.compression, digest)
            )
        return planned

    def _read_input(self, task: PersistTask, share: _Share, server: HolderServer) -> PlanInput:
        known = self._inputs.get(share)
        request = ReadPlanInput(
            snapshot=task.snapshot,
            ranks=share.ranks,
            planner=share.planner,
            planners=share.planners,
            known=None if known is None else known.digest,
        )
        reply, payload = server.ask(request, PlanInputBytes, Unchanged)
        with server.reading():
            if not isinstance(reply, PlanInputBytes):
                return self._inputs[share]
            held = msgspec.json.decode(payload, type=_HeldBoxes)
            if len(held) != len(share.ranks):
                raise ValueError(f"boxes of {len(held)} ranks, not of {len(share.ranks)}")
            return PlanInput(reply.digest, bytes(payload))

    def _read_chunks(
        self, task: PersistTask, planners: _Planners, own: tuple[int, ...], stop: Stop
    ) -> dict[_Share, _OwnChunks]:
        """Read what this node's ranks write from all planners, in the planners' order."""

        def chunks_of(server: HolderServer) -> dict[_Share, _OwnChunks]:
            shares = [
                _Share(planner, planners.count, own)
                for planner in planners.by_holder[server.number]
            ]
            return {share: self._read_share(task, share, server) for share in shares}

        gathered = self._servers.of_all(task.holders, chunks_of, stop)
        chunks = {share: found for by_share in gathered for share, found in by_share.items()}
        return {share: chunks[share] for share in sorted(chunks, key=lambda share: share.planner)}

    def _read_share(self, task: PersistTask, share: _Share, server: HolderServer) -> _OwnChunks:
        known = self._chunks.get(share)
        request = ReadPlan(
            attempt=task.attempt,
            planner=share.planner,
            ranks=share.ranks,
            known=None if known is None else known.digest,
        )
        reply, payload = server.ask(request, PlanBytes, Unchanged)
        with server.reading():
            if not isinstance(reply, PlanBytes):
                return self._chunks[share]
            plans = tuple(
                None if plan is None else WriterPlan.from_json(plan) for plan in json.loads(payload)
            )
            if len(plans) != len(share.ranks):
                raise ValueError(f"plans of {len(plans)} ranks, not of {len(share.ranks)}")
            return _OwnChunks(reply.digest, plans)

    def _read_documents(
        self, task: PersistTask, ranks: Sequence[int], stop: Stop
    ) -> dict[str, Json]:
        """Read all ranks' documents, merged; of those that are alike the last."""

        def digests_of(server: HolderServer) -> list[tuple[int, Mapping[str, str]]]:
            request = ReadDocumentDigests(snapshot=task.snapshot, ranks=server.holder.ranks)
            reply, _ = server.ask(request, DocumentDigests)
            with server.reading():
                return list(zip(server.holder.ranks, reply.digests, strict=True))

        gathered = self._servers.of_all(task.holders, digests_of, stop)
        digests = dict(found for of_holder in gathered for found in of_holder)
        wanted: dict[int, list[str]] = {}
        for (name, _), position in last_holders([digests[rank] for rank in ranks]).items():
            wanted.setdefault(ranks[position], []).append(name)

        def documents_of(server: HolderServer) -> list[tuple[int, Mapping[str, Json]]]:
            found: list[tuple[int, Mapping[str, Json]]] = []
            for rank in server.holder.ranks:
                if rank in wanted:
                    names = tuple(wanted[rank])
                    request = ReadDocuments(snapshot=task.snapshot, rank=rank, names=names)
                    _, payload = server.ask(request, DocumentBytes)
                    with server.reading():
                        found.append((rank, dict(json.loads(payload))))
            return found

        gathered_documents = self._servers.of_all(task.holders, documents_of, stop)
        documents = dict(found for of_holder in gathered_documents for found in of_holder)
        return merged_documents(documents[rank] for rank in sorted(documents))


def _planned(
    planner: int,
    ranks: Sequence[int],
    inputs: Mapping[tuple[int, ...], PlanInput],
    compression: Compression | None,
    digest: str,
) -> PlannedShare:
    entries: dict[int, Json] = {}
    for own, given in inputs.items():
        entries.update(zip(own, json.loads(given.encoded), strict=True))
    plans, tensors = plan_share([entries[rank] for rank in ranks], planner, compression)
    return PlannedShare(
        digest=digest,
        plans={ranks[writer]: _encoded(plan.to_json()) for writer, plan in plans.items()},
        tensors=_encoded(tensors.to_json()),
    )


def _encoded(data: Json) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()
