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
from keepstep.checkpoint.stored.chunking import PlannedChunk, check_storable
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


Signature = tuple[tuple[object, ...], ...]
"""Of how many ranks which one it is, and its boxes: key, data type, global shape and box."""


@dataclass(frozen=True, slots=True)
class Round:
    """The pieces that this rank exchanges with one other rank at once, in the order of sending."""

    wanted: tuple[tuple[PlannedChunk, Box], ...]
    asked: tuple[tuple[str, Box], ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SharedPlan:
    """What ranks have planned together; valid while all ranks hold the same boxes.

    Attributes:
        name: that of the attempt for which it was planned.
        signature: this rank's boxes.
        own: the chunks that this rank writes.
        tensors: all tensors on rank 0, which publishes them; none on the others.
        rounds: the exchange of pieces; each round has an entry for every rank.
    """

    name: str
    signature: Signature
    own: WriterPlan
    tensors: TensorPlan
    rounds: tuple[tuple[Round, ...], ...]


class PlanCache:
    """Keeps the plan of the last save, which the next one reuses if no rank's boxes have changed.

    Used by one thread.
    """

    def __init__(self) -> None:
        self._plan: SharedPlan | None = None

    def name_for(self, signature: Signature) -> str | None:
        """Return the name of the plan that fits this rank's boxes, if there is one."""
        plan = self._plan
        return plan.name if plan is not None and plan.signature == signature else None

    def take(self) -> SharedPlan:
        """Return the plan."""
        assert self._plan is not None, "the ranks have agreed that each of them has a plan"
        return self._plan

    def keep(self, plan: SharedPlan | None) -> None:
        """Keep a plan instead of the one before."""
        self._plan = plan


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedSave:
    """A save that all ranks have agreed on.

    Attributes:
        attempt: name of the attempt, the same on all ranks.
        live: this rank's state.
        plan: what this rank writes, and what rank 0 publishes.
        documents: those of this rank's documents that no rank after it has alike; rank 0 merges
            those of all ranks.
        failures: what each rank tells about its last save.
    """

    attempt: str
    live: LiveState
    plan: SharedPlan
    documents: Mapping[str, Json]
    failures: tuple[Json, ...]


def agree_on_save(capture: Callable[[], LiveState], failure: Json, cache: PlanCache) -> AgreedSave:
    """Capture all ranks' states and plan a save of them.

    Args:
        capture: returns this rank's live state.
        failure: what this rank tells the others about its last save.
        cache: has the plan of the last save of the same ranks.

    Raises:
        CheckpointError: a rank could not capture its state, or the ranks' states do not fit
            together; every rank raises.
    """

    def prepare() -> tuple[LiveState, Signature]:
        live = capture()
        return live, signature_of(live.tensors)

    # All ranks take the name that rank 0 gives the attempt.
    (live, signature), gathered = on_all_ranks_gathering(
        prepare,
        lambda prepared: [
            uuid.uuid4().hex,
            cache.name_for(prepared[1]),
            {name: _digest(content) for name, content in prepared[0].documents.items()},
            failure,
        ],
    )
    attempt = str(gathered[0][0])
    known = {name for _, name, _, _ in gathered}
    if len(known) > 1 or None in known:
        cache.keep(None)
        cache.keep(_plan(attempt, [tensor.entry() for tensor in live.tensors], signature))
    return AgreedSave(
        attempt=attempt,
        live=live,
        plan=cache.take(),
        documents=_last_of(live.documents, [digests for _, _, digests, _ in gathered]),
        failures=tuple(failure for *_, failure in gathered),
    )


def signature_of(tensors: Sequence[LiveTensor]) -> Signature:
    """Return the boxes that this rank holds; quick, for it is done at every save.

    A process may become another rank in a new group: the plan is that of a rank.

    Raises:
        LayoutMismatch: a tensor's data type cannot be stored.
    """
    return (
        (world_size(), rank()),
        *((tensor.key, tensor.dtype, tensor.global_shape, tensor.box) for tensor in tensors),
    )


def boxes_reader(plan: SharedPlan, tensors: Sequence[LiveTensor]) -> ReadBox:
    """Return what reads the chunks that this rank writes, after the ranks have exchanged pieces."""
    collected = gather_chunks(plan, tensors)
    held = _by_key(tensors)

    def read_box(key: str, box: Box) -> Bytes:
        return collected[key, box] if (key, box) in collected else _box_of(held[key], box)

    return read_box


def merge_documents(documents: Mapping[str, Json]) -> dict[str, Json]:
    """Return all ranks' documents, merged, on rank 0; nothing on the others.

    Args:
        documents: `AgreedSave.documents`.
    """
    received = _exchange_json({0: documents})
    return merged_documents(received[holder] for holder in sorted(received))


def _plan(name: str, entries: Sequence[Entry], signature: Signature) -> SharedPlan:
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
    # Each planner has seen its own tensors only.
    on_all_ranks(lambda: check_storable(tensors.tensors))
    return SharedPlan(
        name=name, signature=signature, own=own, tensors=tensors, rounds=_agree_on_rounds(own)
    )


def _agree_on_rounds(own: WriterPlan) -> tuple[tuple[Round, ...], ...]:
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
            Round(tuple(pieces_of_round.get(peer, ())), tuple(asked_of_round.get(peer, ())))
            for peer in range(ranks)
        )
        for pieces_of_round, asked_of_round in zip(wanted, asked, strict=True)
    )


def gather_chunks(plan: SharedPlan, tensors: Sequence[LiveTensor]) -> dict[tuple[str, Box], Bytes]:
    """Return the chunks that this rank writes but holds only in part, by tensor key and box."""
    held = _by_key(tensors)
    itemsizes = {
        key: numpy_dtype(tensor.dtype).itemsize for key, tensor in plan.own.tensors.items()
    }
    collected: dict[tuple[str, Box], Bytes] = {}
    for peers in plan.rounds:
        pieces = [_box_of(held[key], box).reshape(-1) for peer in peers for key, box in peer.asked]
        sent_nbytes = [
            sum(box.size * held[key][0].data.element_size() for key, box in peer.asked)
            for peer in peers
        ]
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


def _by_key(tensors: Sequence[LiveTensor]) -> dict[str, list[LiveTensor]]:
    held: dict[str, list[LiveTensor]] = defaultdict(list)
    for tensor in tensors:
        held[tensor.key].append(tensor)
    return held


def _box_of(tensors: Sequence[LiveTensor], box: Box) -> Bytes:
    """Return the bytes of a box of a tensor of which this rank holds these boxes."""
    return box_of(next(tensor for tensor in tensors if box.intersect(tensor.box) == box), box)


def _last_of(own: Mapping[str, Json], digests: Sequence[Mapping[str, str]]) -> dict[str, Json]:
    """Return those of this rank's documents that no rank after it has alike.

    The last rank's count, as where a snapshot server merges all of them.

    Args:
        own: this rank's documents.
        digests: the digests of all ranks' documents, by name.
    """
    last = {
        (name, digest): holder
        for holder, digests_of_rank in enumerate(digests)
        for name, digest in digests_of_rank.items()
    }
    return {
        name: content
        for name, content in own.items()
        if last[name, digests[rank()][name]] == rank()
    }


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
