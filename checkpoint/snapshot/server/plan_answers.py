"""Answers what other nodes' servers ask to plan a checkpoint together.

What a node's ranks hold, and their documents, is answered at once. A share of the plan is waited
for a short while; it is planned by the thread that writes (`plan_exchange`), which for that needs
nothing but answers of the first kind. So no server waits for one that waits for it.
"""

from __future__ import annotations

import json

from keepstep.checkpoint.format.layout.documents import document_digests
from keepstep.checkpoint.snapshot.memory.messages import (
    DocumentBytes,
    DocumentDigests,
    PlanBytes,
    PlanInputBytes,
    PlanPending,
    PlanReply,
    PlanRequest,
    ReadDocumentDigests,
    ReadDocuments,
    ReadPlan,
    ReadPlanInput,
    ReadTensorPlan,
    TensorPlanBytes,
    Unchanged,
)
from keepstep.checkpoint.snapshot.server.plan_inputs import PlanInputs
from keepstep.checkpoint.snapshot.server.plan_shares import PlanShares
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory


class PlanAnswers:
    """Answers from a node's memory and from what it has planned. Thread-safe.

    Attributes:
        shares: what this node plans.
    """

    def __init__(self, memory: SnapshotMemory) -> None:
        self.shares = PlanShares()
        self._memory = memory
        self._inputs = PlanInputs(memory)

    def answer_plan(self, request: PlanRequest) -> tuple[PlanReply, bytes | bytearray]:
        """Return the reply to a request, and its payload.

        Raises:
            SnapshotUnavailable: the snapshot is not held here, or the share cannot be had.
            LayoutMismatch: what the node's ranks hold cannot be stored.
            ValueError: there is no such planner or document.
        """
        match request:
            case ReadPlanInput():
                given = self._inputs.get(
                    request.snapshot, request.ranks, request.planner, request.planners
                )
                if given.digest == request.known:
                    return Unchanged(), b""
                return PlanInputBytes(digest=given.digest), given.encoded
            case ReadPlan():
                share = self.shares.get(request.attempt, request.planner)
                if share is None:
                    return PlanPending(), b""
                if share.digest == request.known:
                    return Unchanged(), b""
                plans = b",".join(share.plans.get(rank, b"null") for rank in request.ranks)
                return PlanBytes(digest=share.digest), b"[" + plans + b"]"
            case ReadTensorPlan():
                share = self.shares.get(request.attempt, request.planner)
                if share is None:
                    return PlanPending(), b""
                return TensorPlanBytes(), share.tensors
            case ReadDocumentDigests(snapshot=snapshot, ranks=ranks):
                indexes = [self._memory.index(snapshot, rank) for rank in ranks]
                digests = tuple(document_digests(index.documents) for index in indexes)
                return DocumentDigests(digests=digests), b""
            case ReadDocuments(snapshot=snapshot, rank=rank, names=names):
                documents = self._memory.index(snapshot, rank).documents
                if not documents.keys() >= set(names):
                    raise ValueError(f"rank {rank} does not have all of the documents {names}")
                return DocumentBytes(), json.dumps({n: documents[n] for n in names}).encode()

    def close(self) -> None:
        """End all waits."""
        self.shares.close()
