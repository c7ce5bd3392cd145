"""Plans what each rank writes of a checkpoint, together with all ranks.

Each rank sends its boxes to the planners of their tensors and gets back which chunks it writes
(`keepstep.checkpoint.stored.shared_plan`), so that no rank looks at what all ranks hold. Rank 0,
which publishes, gets the tensors and the documents; of documents that several ranks have alike, one
rank sends its own. Then the ranks exchange the pieces of chunks that their writers do not hold.

Every rank must make the same calls in the same order, as for `keepstep.checkpoint.collective`.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from keepstep.checkpoint.agreement import on_all_ranks, on_all_ranks_gathering
from keepstep.checkpoint.collective import (
    Bytes,
    all_gather_json,
    box_of,
    exchange,
    exchange_bytes,
    rank,
    world_size,
)
from keepstep.checkpoint.layout.boxes import Box, Entry, Json
from keepstep.checkpoint.layout.documents import merged_documents
from keepstep.checkpoint.layout.dtypes import numpy_dtype
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor
from keepstep.checkpoint.stored.chunking import PlannedChunk
from keepstep.checkpoint.stored.format import Attempt, StoredStep
from keepstep.checkpoint.stored.shared_plan import (
    TensorPlan,
    WriterPlan,
    entries_by_planner,
    merged_tensor_plan,
    merged_writer_plan,
    pieces_by_holder,
    plan_share,
    planner_count,
    planner_rank,
)
from keepstep.checkpoint.stored.writer import ReadBox

# What a rank receives at once when pieces are exchanged.
_ROUND_NBYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePlan:
    """What this rank writes, and what rank 0 publishes.

    Attributes:
        attempt: the attempt, of the same name on all ranks.
        own: the chunks that this rank writes.
        read_box: returns the bytes of one of these chunks.
        tensors: all tensors; of no rank's chunks but on rank 0.
        documents: all ranks' documents, merged; empty but on rank 0.
        failures: what each rank tells about its last save.
    """

    attempt: Attempt
    own: WriterPlan
    read_box: ReadBox
    tensors: TensorPlan
    documents: Mapping[str, Json]
    failures: tuple[Json, ...]


@dataclass(frozen=True, slots=True)
class _Shares:
    """What ranks have planned for one layout; valid while all ranks hold the same boxes.

    `name` is that of the attempt for which it was planned, `layout` a digest of this rank's boxes;
    `rounds` are those of the exchange of pieces, each with an entry for every rank.
    """

    name: str
    layout: str
    own: WriterPlan
    tensors: TensorPlan
    rounds: tuple[tuple[_Round, ...], ...]


@dataclass(frozen=True, slots=True)
class _Round:
    """The pieces that this rank exchanges with one other rank at once, in the order of sending."""

    wanted: tuple[tuple[PlannedChunk, Box], ...]
    asked: tuple[tuple[str, Box], ...]


class PlanCache:
    """Keeps the plan of the last save, which the next one reuses if no rank's boxes have changed.

    Used by one thread.
    """

    def __init__(self) -> None:
        self._shares: _Shares | None = None

    def name_for(self, layout: str) -> str | None:
        """Return the name of the plan that fits this rank's boxes, if there is one."""
        shares = self._shares
        return shares.name if shares is not None and shares.layout == layout else None

    def take(self) -> _Shares:
        """Return the plan."""
        assert self._shares is not None, "the ranks have agreed that each of them has a plan"
        return self._shares

    def keep(self, shares: _Shares | None) -> None:
        """Keep a plan instead of the one before."""
        self._shares = shares


def plan_collectively(
    stored: StoredStep, capture: Callable[[], LiveState], failure: Json, cache: PlanCache
) -> CollectivePlan:
    """Plan a save with all ranks.

    Args:
        stored: the checkpoint to write.
        capture: returns this rank's live state.
        failure: what this rank tells the others about its last save.
        cache: has the plan of the last save of the same ranks.

    Raises:
        CheckpointError: a rank could not capture its state, or the ranks' states do not fit
            together; every rank raises.
    """

    def prepare() -> tuple[LiveState, tuple[Entry, ...], str]:
        live = capture()
        entries = entries_of(live)
        return live, entries, layout_digest(entries, world_size())

    # All ranks take the name that rank 0 gives the attempt.
    (live, entries, layout), gathered = on_all_ranks_gathering(
        prepare,
        lambda prepared: [
            uuid.uuid4().hex,
            cache.name_for(prepared[2]),
            {name: _digest(content) for name, content in prepared[0].documents.items()},
            failure,
        ],
    )
    attempt = Attempt(stored, gathered[0][0])
    known = {name for _, name, _, _ in gathered}
    if len(known) > 1 or None in known:
        cache.keep(None)
        cache.keep(_plan(attempt.name, entries, layout))
    shares = cache.take()
    tensors: dict[str, list[LiveTensor]] = defaultdict(list)
    for tensor in live.tensors:
        tensors[tensor.key].append(tensor)
    collected = _gather_chunks(shares, tensors)

    def read_box(key: str, box: Box) -> Bytes:
        return collected[key, box] if (key, box) in collected else _box_of(tensors[key], box)

    return CollectivePlan(
        attempt=attempt,
        own=shares.own,
        read_box=read_box,
        tensors=shares.tensors,
        documents=_gather_documents(live.documents, [digests for _, _, digests, _ in gathered]),
        failures=tuple(failure for *_, failure in gathered),
    )


def entries_of(live: LiveState) -> tuple[Entry, ...]:
    """Return which boxes of which tensors a rank holds; the offsets mean nothing."""
    return tuple(
        Entry(
            key=tensor.key,
            dtype=tensor.dtype,
            global_shape=tensor.global_shape,
            box=tensor.box,
            byte_offset=0,
            nbytes=tensor.data.numel() * tensor.data.element_size(),
        )
        for tensor in live.tensors
    )


def layout_digest(entries: Sequence[Entry], ranks: int) -> str:
    """Return a digest of the boxes that a rank holds, one of so many ranks."""
    return _digest([ranks, [entry.to_json() for entry in entries]])


def _plan(name: str, entries: Sequence[Entry], layout: str) -> _Shares:
    """Plan together what each rank writes, and which pieces it gets from which rank."""
    ranks = world_size()
    planners = planner_count(ranks)
    split = entries_by_planner(entries, planners)
    held = _exchange_json({planner_rank(number): part for number, part in enumerate(split)})

    def plan_own_share() -> dict[int, Json]:
        number, is_planner = divmod(rank(), planner_rank(1))
        if is_planner != 0:
            return {}
        plans, tensors = plan_share([held[holder] for holder in range(ranks)], number)
        answers = {writer: [plan.to_json(), None] for writer, plan in plans.items()}
        answers[0] = [answers.get(0, [None])[0], tensors.to_json()]
        return answers

    answers = _exchange_json(on_all_ranks(plan_own_share)).values()
    own = merged_writer_plan(WriterPlan.from_json(plan) for plan, _ in answers if plan is not None)
    tensors = merged_tensor_plan(
        TensorPlan.from_json(tensors) for _, tensors in answers if tensors is not None
    )
    return _Shares(name, layout, own, tensors, _agree_on_rounds(own))


def _agree_on_rounds(own: WriterPlan) -> tuple[tuple[_Round, ...], ...]:
    """Ask all ranks for the pieces that this one lacks; return the rounds of the exchange.

    Each round has an entry for every rank. All ranks have the same number of rounds.
    """
    ranks = world_size()
    wanted: list[dict[int, list[tuple[PlannedChunk, Box]]]] = []
    nbytes = _ROUND_NBYTES
    for holder, pieces in sorted(pieces_by_holder(own).items()):
        for chunk, box in pieces:
            if nbytes >= _ROUND_NBYTES:
                wanted.append(defaultdict(list))
                nbytes = 0
            wanted[-1][holder].append((chunk, box))
            nbytes += box.size * numpy_dtype(own.tensors[chunk.key].dtype).itemsize
    requests: dict[int, Json] = defaultdict(list)
    for number, pieces_of_round in enumerate(wanted):
        for holder, pieces in pieces_of_round.items():
            requests[holder] += [
                [number, chunk.key, list(box.offset), list(box.shape)] for chunk, box in pieces
            ]
    count = max(all_gather_json(len(wanted)))
    if count == 0:
        return ()
    asked: list[dict[int, list[tuple[str, Box]]]] = [defaultdict(list) for _ in range(count)]
    for asker, pieces_asked in _exchange_json(requests).items():
        for number, key, offset, shape in pieces_asked:
            asked[number][asker].append((key, Box(tuple(offset), tuple(shape))))
    wanted += [defaultdict(list) for _ in range(count - len(wanted))]
    return tuple(
        tuple(
            _Round(tuple(pieces_of_round.get(peer, ())), tuple(asked_of_round.get(peer, ())))
            for peer in range(ranks)
        )
        for pieces_of_round, asked_of_round in zip(wanted, asked, strict=True)
    )


def _gather_chunks(
    shares: _Shares, tensors: Mapping[str, Sequence[LiveTensor]]
) -> dict[tuple[str, Box], Bytes]:
    """Return the chunks that this rank writes but holds only in part, by tensor key and box."""
    collected: dict[tuple[str, Box], Bytes] = {}
    for peers in shares.rounds:
        pieces = [
            _box_of(tensors[key], box).reshape(-1) for peer in peers for key, box in peer.asked
        ]
        sent_nbytes = [
            sum(box.size * tensors[key][0].data.element_size() for key, box in peer.asked)
            for peer in peers
        ]
        itemsizes = {
            key: numpy_dtype(tensor.dtype).itemsize for key, tensor in shares.own.tensors.items()
        }
        received_nbytes = [
            sum(box.size * itemsizes[chunk.key] for chunk, box in peer.wanted) for peer in peers
        ]
        sent = torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *pieces]))
        received = torch.empty(sum(received_nbytes), dtype=torch.uint8)
        exchange_bytes(sent, sent_nbytes, received, received_nbytes)
        data, start = received.numpy(), 0
        for chunk, box in (piece for peer in peers for piece in peer.wanted):
            itemsize = itemsizes[chunk.key]
            whole = collected.setdefault(
                (chunk.key, chunk.box), np.empty((*chunk.box.shape, itemsize), np.uint8)
            )
            end = start + box.size * itemsize
            whole[box.within(chunk.box).slices] = data[start:end].reshape(*box.shape, itemsize)
            start = end
    return collected


def _box_of(tensors: Sequence[LiveTensor], box: Box) -> Bytes:
    """Return the bytes of a box of a tensor of which this rank holds these boxes."""
    return box_of(next(tensor for tensor in tensors if box.intersect(tensor.box) == box), box)


def _gather_documents(
    own: Mapping[str, Json], digests: Sequence[Mapping[str, str]]
) -> dict[str, Json]:
    """Return all ranks' documents, merged, on rank 0; nothing on the others.

    Args:
        own: this rank's documents.
        digests: the digests of all ranks' documents, by name.
    """
    first: dict[tuple[str, str], int] = {}
    for holder, digests_of_rank in enumerate(digests):
        for name, digest in digests_of_rank.items():
            first.setdefault((name, digest), holder)
    is_first = {
        name: content
        for name, content in own.items()
        if first[name, digests[rank()][name]] == rank()
    }
    received = _exchange_json({0: is_first})
    return merged_documents(received[holder] for holder in sorted(received))


def _exchange_json(messages: Mapping[int, Json]) -> dict[int, Json]:
    """Send each rank its message, if there is one; return the messages to this rank, by sender."""
    encoded = [
        json.dumps(messages[peer]).encode() if peer in messages else b""
        for peer in range(world_size())
    ]
    received = exchange(encoded)
    return {peer: json.loads(data) for peer, data in enumerate(received) if data}


def _digest(content: Json) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
