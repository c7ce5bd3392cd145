"""Plans what each rank writes of a checkpoint, together with all ranks.

Each rank sends its boxes to the planners of their tensors and gets back which chunks it writes
(`keepstep.checkpoint.stored.shared_plan`), so that no rank looks at what all ranks hold. Rank 0,
which publishes, gets the tensors and the documents, and adds where the state comes from; of
documents that several ranks have alike, one rank sends its own. Then the ranks exchange the pieces
of chunks that their writers do not hold; where a plan is followed again and they are small, with
the message in which the ranks agree to follow it.

Every rank must make the same calls in the same order, as for `keepstep.checkpoint.collective`. What
fails on one rank is raised on all of them before the next message: none is left waiting.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import numpy as np
import torch

from keepstep.checkpoint.agreement import (
    exchange,
    on_all_ranks,
    on_all_ranks_exchanging,
    on_all_ranks_gathering,
)
from keepstep.checkpoint.collective import (
    ByteExchange,
    Bytes,
    box_of,
    rank,
    room_beside_message,
    world_size,
)
from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.layout.boxes import Box, Json
from keepstep.checkpoint.layout.documents import (
    PROVENANCE,
    document_digests,
    last_holders,
    merged_documents,
)
from keepstep.checkpoint.layout.dtypes import numpy_dtype
from keepstep.checkpoint.live.provenance import provenance
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor, bytes_of
from keepstep.checkpoint.stored.chunking import (
    Compression,
    PlannedChunk,
    check_compression,
    check_storable,
)
from keepstep.checkpoint.stored.manifest import StoredObject
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
"""Of how many ranks which one it is, how cells are compressed, and the rank's boxes.

A box has a key, a data type, a global shape and its place in that.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a piece goes that this rank gets: into this part of the array of a chunk's elements."""

    chunk: tuple[str, Box]
    slices: tuple[slice, ...]
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The pieces that this rank exchanges with all others at once, in the order of ranks.

    Attributes:
        sent: for each piece, which of the rank's tensors it is of, and which part of that.
        sent_nbytes: what each rank gets.
        places: where the pieces go that this rank gets.
        received_nbytes: what each rank sends.
        chunks: the chunks that get their first piece now, and the shape of their bytes.
    """

    sent: tuple[tuple[int, tuple[slice, ...]], ...]
    sent_nbytes: tuple[int, ...]
    places: tuple[Place, ...]
    received_nbytes: tuple[int, ...]
    chunks: tuple[tuple[tuple[str, Box], tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SharedPlan:
    """What ranks have planned together; valid while all ranks hold the same boxes.

    Attributes:
        name: that of the attempt for which it was planned.
        signature: this rank's boxes, and how cells are compressed.
        own: the chunks that this rank writes.
        tensors: all tensors on rank 0, which publishes them; none on the others.
        rounds: the exchange of pieces; all ranks have as many.
        goes_beside: there is one round, and what each rank sends in it goes beside a message.
    """

    name: str
    signature: Signature
    own: WriterPlan
    tensors: TensorPlan
    rounds: tuple[Round, ...]
    goes_beside: bool


class PlanCache:
    """Keeps the plan of the last save, which the next one reuses if no rank's boxes have changed.

    Used by one thread.
    """

    def __init__(self) -> None:
        self._plan: SharedPlan | None = None

    def plan_for(self, signature: Signature) -> SharedPlan | None:
        """Return the plan that fits this rank's boxes, if there is one."""
        plan = self._plan
        return plan if plan is not None and plan.signature == signature else None

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
        exchange: gets the pieces of chunks that this rank holds only in part.
        documents: those of this rank's documents that no rank after it has alike; rank 0 merges
            those of all ranks.
        failures: what each rank tells about its last save.
    """

    attempt: str
    live: LiveState
    plan: SharedPlan
    exchange: PieceExchange
    documents: Mapping[str, Json]
    failures: tuple[Json, ...]


def agree_on_save(
    capture: Callable[[], LiveState],
    failure: Json,
    cache: PlanCache,
    compression: Compression | None = None,
    *,
    step: int = 0,
    generation: int = 0,
    begin: Callable[[Sequence[LiveTensor], SharedPlan | None], None] = lambda *_: None,
) -> AgreedSave:
    """Capture all ranks' states and plan a save of them.

    Args:
        capture: returns this rank's live state.
        failure: what this rank tells the others about its last save.
        cache: has the plan of the last save of the same ranks.
        compression: as for `plan_chunks`.
        step: the step to save, which all ranks must have alike.
        generation: its generation, in the same way.
        begin: called as soon as the tensors are captured, with the plan of the last save if it
            fits them; whether all ranks follow it is not known yet.

    Raises:
        CheckpointError: a rank could not capture its state, or the ranks' states, steps or
            generations do not fit together; every rank raises.
    """

    def prepare() -> tuple[LiveState, Signature, PieceExchange | None]:
        check_compression(compression)
        live = capture()
        signature = signature_of(live.tensors, compression)
        plan = cache.plan_for(signature)
        begin(live.tensors, plan)
        if rank() == 0:
            live = _with_provenance(live)
        return live, signature, None if plan is None else _prepared_exchange(plan, live.tensors)

    # All ranks take the name that rank 0 gives the attempt.
    (live, signature, exchange), gathered, pieces = on_all_ranks_exchanging(
        prepare,
        lambda prepared: [
            uuid.uuid4().hex,
            None if prepared[2] is None else prepared[2].plan.name,
            document_digests(prepared[0].documents),
            failure,
            [step, generation],
        ],
        lambda prepared: () if prepared[2] is None else prepared[2].sent_beside(),
    )
    _check_steps([stored for *_, stored in gathered])
    attempt = str(gathered[0][0])
    known = {name for _, name, *_ in gathered}
    if exchange is None or len(known) > 1:
        cache.keep(None)
        plan = _plan(attempt, live.tensors, signature, compression)
        cache.keep(plan)
        exchange = PieceExchange(plan, live.tensors)
    else:
        exchange.receive_beside(pieces)
    digests = [digests for _, _, digests, *_ in gathered]
    holders = last_holders(digests)
    return AgreedSave(
        attempt=attempt,
        live=live,
        plan=exchange.plan,
        exchange=exchange,
        documents={
            name: content
            for name, content in live.documents.items()
            if holders[name, digests[rank()][name]] == rank()
        },
        failures=tuple(failure for *_, failure, _ in gathered),
    )


def _check_steps(stored: Sequence[Json]) -> None:
    """Check that all ranks save the same step and generation."""
    first = stored[0]
    for number, own in enumerate(stored):
        if own != first:
            raise CheckpointError(
                f"rank {number} saves step {own[0]} of generation {own[1]}, and rank 0 step "
                f"{first[0]} of generation {first[1]}; all ranks save one step together"
            )


def _with_provenance(live: LiveState) -> LiveState:
    owners = (tensor.owner for tensor in live.tensors if tensor.owner is not None)
    content = provenance(owners, world_size=world_size(), now=datetime.now(UTC))
    return LiveState(live.tensors, {**live.documents, PROVENANCE: content})


def signature_of(
    tensors: Sequence[LiveTensor], compression: Compression | None = None
) -> Signature:
    """Return what this rank's plan depends on; quick, for it is done at every save.

    A process may become another rank in a new group: the plan is that of a rank.

    Raises:
        LayoutMismatch: a tensor's data type cannot be stored.
    """
    return (
        (world_size(), rank(), compression),
        *((tensor.key, tensor.dtype, tensor.global_shape, tensor.box) for tensor in tensors),
    )


def boxes_reader(agreed: AgreedSave) -> ReadBox:
    """Return what reads the chunks that this rank writes, after the ranks have exchanged pieces.

    Raises as `PieceExchange.run` does.
    """
    collected = agreed.exchange.run()
    held = _by_key(agreed.live.tensors)

    def read_box(key: str, box: Box) -> Bytes:
        return collected[key, box] if (key, box) in collected else _box_of(held[key], box)

    return read_box


def report_parts(
    write: Callable[[], StoredObject], documents: Mapping[str, Json]
) -> Sequence[memoryview]:
    """Write all ranks' parts; return the reports of them on rank 0, in order of ranks.

    Args:
        write: writes this rank's part. If it fails on one rank, all raise.
        documents: `AgreedSave.documents`.
    """
    reports = _exchange_json(lambda: {0: [write().to_json(), documents]})
    return [reports[holder] for holder in sorted(reports)]


def merge_reports(reports: Iterable[memoryview]) -> tuple[list[StoredObject], dict[str, Json]]:
    """Return the entries of all parts, and all ranks' documents merged."""
    decoded = [_decode(report) for report in reports]
    parts = [StoredObject.from_json(part) for part, _ in decoded]
    return parts, merged_documents(documents for _, documents in decoded)


def _plan(
    name: str, held: Sequence[LiveTensor], signature: Signature, compression: Compression | None
) -> SharedPlan:
    """Plan together what each rank writes, and which pieces it gets from which rank."""
    ranks = world_size()
    planners = planner_count(ranks)

    def boxes_for_planners() -> dict[int, Json]:
        split = entries_by_planner([tensor.entry() for tensor in held], planners)
        return {planner_rank(number): part for number, part in enumerate(split)}

    boxes = _exchange_json(boxes_for_planners)

    def plan_own_share() -> dict[int, Json]:
        number, is_planner = divmod(rank(), planner_rank(1))
        if is_planner != 0:
            return {}
        held_boxes = [_decode(boxes[holder]) for holder in range(ranks)]
        plans, tensors = plan_share(held_boxes, number, compression)
        answers = {writer: [plan.to_json(), None] for writer, plan in plans.items()}
        answers[0] = [answers.get(0, [None])[0], tensors.to_json()]
        return answers

    answers = _exchange_json(plan_own_share)

    def merge() -> tuple[WriterPlan, TensorPlan, _Pieces]:
        shares = [_decode(answer) for answer in answers.values()]
        own = merged_writer_plan(
            WriterPlan.from_json(plan) for plan, _ in shares if plan is not None
        )
        tensors = merged_tensor_plan(
            TensorPlan.from_json(tensors) for _, tensors in shares if tensors is not None
        )
        # Each planner has seen its own tensors only.
        check_storable(tensors.tensors)
        return own, tensors, _wanted_by_round(own)

    (own, tensors, wanted), wants = on_all_ranks_gathering(
        merge, lambda merged: [len(merged[2]), _greatest_nbytes(merged[2], merged[0])]
    )
    count = max(count for count, _ in wants)
    rounds = _agree_on_rounds(wanted, count, own, held)
    return SharedPlan(
        name=name,
        signature=signature,
        own=own,
        tensors=tensors,
        rounds=rounds,
        goes_beside=count == 1 and max(nbytes for _, nbytes in wants) <= room_beside_message(),
    )


_Pieces = Sequence[Mapping[int, Sequence[tuple[PlannedChunk, Box]]]]
"""For each round, the pieces that a rank wants, by the rank that holds them."""


def _agree_on_rounds(
    wanted: _Pieces, count: int, own: WriterPlan, held: Sequence[LiveTensor]
) -> tuple[Round, ...]:
    """Ask all ranks for the pieces that this one lacks; return the rounds of the exchange.

    All ranks have the same number of rounds, `count`.
    """
    if count == 0:
        return ()
    requests = _exchange_json(lambda: _requests_of(wanted))
    return on_all_ranks(lambda: _rounds(wanted, requests, count, own, held))


def _wanted_by_round(own: WriterPlan) -> _Pieces:
    wanted: list[dict[int, list[tuple[PlannedChunk, Box]]]] = []
    nbytes = _ROUND_NBYTES
    for holder, pieces in sorted(pieces_by_holder(own).items()):
        for chunk, box in pieces:
            if nbytes >= _ROUND_NBYTES:
                wanted.append(defaultdict(list))
                nbytes = 0
            wanted[-1][holder].append((chunk, box))
            nbytes += box.size * _itemsize(own, chunk.key)
    return wanted


def _greatest_nbytes(wanted: _Pieces, own: WriterPlan) -> int:
    """Return the most that one rank gets from one other in a round."""
    return max(
        (
            sum(box.size * _itemsize(own, chunk.key) for chunk, box in pieces)
            for pieces_of_round in wanted
            for pieces in pieces_of_round.values()
        ),
        default=0,
    )


def _requests_of(wanted: _Pieces) -> dict[int, Json]:
    """Return the messages that ask holders for pieces, each with the number of its round."""
    requests: dict[int, Json] = defaultdict(list)
    for number, pieces_of_round in enumerate(wanted):
        for holder, pieces in pieces_of_round.items():
            requests[holder] += [
                [number, chunk.key, list(box.offset), list(box.shape)] for chunk, box in pieces
            ]
    return requests


def _rounds(
    wanted: _Pieces,
    requests: Mapping[int, memoryview],
    count: int,
    own: WriterPlan,
    held: Sequence[LiveTensor],
) -> tuple[Round, ...]:
    asked: list[dict[int, list[tuple[str, Box]]]] = [defaultdict(list) for _ in range(count)]
    for asker, data in requests.items():
        for number, key, offset, shape in _decode(data):
            asked[number][asker].append((key, Box(tuple(offset), tuple(shape))))
    positions: dict[str, list[int]] = defaultdict(list)
    for position, tensor in enumerate(held):
        positions[tensor.key].append(position)
    has_memory: set[tuple[str, Box]] = set()
    rounds = []
    for number in range(count):
        sent, sent_nbytes = [], []
        places: list[Place] = []
        received_nbytes: list[int] = []
        for peer in range(world_size()):
            nbytes = 0
            for key, box in asked[number].get(peer, ()):
                position = next(i for i in positions[key] if _has(held[i], box))
                tensor = held[position]
                sent.append((position, box.slices_in(tensor.box)))
                nbytes += box.size * tensor.data.element_size()
            sent_nbytes.append(nbytes)
            pieces = wanted[number].get(peer, ()) if number < len(wanted) else ()
            from_peer = [_place(chunk, box, own) for chunk, box in pieces]
            received_nbytes.append(sum(place.nbytes for place in from_peer))
            places += from_peer
        fresh = {place.chunk: None for place in places if place.chunk not in has_memory}
        has_memory.update(fresh)
        rounds.append(
            Round(
                sent=tuple(sent),
                sent_nbytes=tuple(sent_nbytes),
                places=tuple(places),
                received_nbytes=tuple(received_nbytes),
                chunks=tuple(((key, box), (*box.shape, _itemsize(own, key))) for key, box in fresh),
            )
        )
    return tuple(rounds)


def _place(chunk: PlannedChunk, box: Box, own: WriterPlan) -> Place:
    itemsize = _itemsize(own, chunk.key)
    return Place(
        chunk=(chunk.key, chunk.box),
        slices=box.slices_in(chunk.box),
        shape=(*box.shape, itemsize),
        nbytes=box.size * itemsize,
    )


def _itemsize(own: WriterPlan, key: str) -> int:
    return numpy_dtype(own.tensors[key].dtype).itemsize


def _has(tensor: LiveTensor, box: Box) -> bool:
    return box.intersect(tensor.box) == box


@dataclass(frozen=True, slots=True, eq=False)
class _RoundBuffers:
    """What a rank sends in a round, and where it receives."""

    sent: torch.Tensor
    received: torch.Tensor


class PieceExchange:
    """Gets the chunks that this rank writes but holds only in part, from the ranks that hold them.

    Memory for a round is taken before ranks depend on each other. For the first round `prepare`
    takes it; all ranks must have called it, or none.

    Args:
        plan: the ranks' plan.
        tensors: what this rank holds.
    """

    def __init__(self, plan: SharedPlan, tensors: Sequence[LiveTensor]) -> None:
        self.plan = plan
        self._held = tensors
        self._collected: dict[tuple[str, Box], Bytes] = {}
        self._bytes = ByteExchange()
        self._first: _RoundBuffers | None = None
        self._beside: torch.Tensor | None = None
        self.is_done = False
        """Whether nothing is left to be exchanged."""

    def prepare(self) -> None:
        """Take memory for the first round, and copy what this rank sends in it.

        Raises:
            CheckpointError: PyTorch has no memory for it.
            MemoryError: there is none.
        """
        if self.plan.goes_beside:
            self._take_chunks(self.plan.rounds[0])
            self._beside = self._sent(self.plan.rounds[0])
        elif self.plan.rounds:
            self._first = self._prepared(self.plan.rounds[0])

    def sent_beside(self) -> Sequence[memoryview]:
        """Return what goes to each rank beside a message, after `prepare`; nothing without room."""
        if not self.plan.goes_beside:
            return ()
        assert self._beside is not None, "it was prepared"
        data = self._beside.numpy().data
        sizes = self.plan.rounds[0].sent_nbytes
        ends = itertools.accumulate(sizes)
        return [data[end - nbytes : end] for end, nbytes in zip(ends, sizes, strict=True)]

    def receive_beside(self, contents: Sequence[memoryview]) -> None:
        """Take what each rank has sent to this one beside a message, if all follow one plan."""
        if self.plan.goes_beside:
            current = self.plan.rounds[0]
            places = iter(current.places)
            for content, nbytes in zip(contents, current.received_nbytes, strict=True):
                self._put(places, np.frombuffer(content, np.uint8, nbytes))
        self._beside = None
        self.is_done = not self.plan.rounds or self.plan.goes_beside

    def run(self) -> dict[tuple[str, Box], Bytes]:
        """Exchange the pieces, unless it is done; return the chunks, by tensor key and box.

        Raises:
            Exception: what failed on this rank, such as lack of memory.
            CheckpointError: another rank failed.
        """
        for current in () if self.is_done else self.plan.rounds:
            buffers, self._first = self._first, None
            if buffers is None:
                buffers = on_all_ranks(partial(self._prepared, current))
            self._bytes.run(
                buffers.sent, current.sent_nbytes, buffers.received, current.received_nbytes
            )
            # From here to the next round nothing takes memory that may be lacking.
            self._put(iter(current.places), buffers.received.numpy())
        return self._collected

    def _put(self, places: Iterator[Place], data: Bytes) -> None:
        """Put pieces into their chunks, as long as there are any."""
        start = 0
        while start < data.nbytes:
            place = next(places)
            end = start + place.nbytes
            self._collected[place.chunk][place.slices] = data[start:end].reshape(place.shape)
            start = end

    def _prepared(self, current: Round) -> _RoundBuffers:
        """Take all memory that a round needs, and fill in what this rank sends.

        Raises:
            CheckpointError: PyTorch has no memory for it.
        """
        self._take_chunks(current)
        sent = self._sent(current)
        try:
            received = torch.empty(sum(current.received_nbytes), dtype=torch.uint8)
            self._bytes.reserve(sent_nbytes=sent.numel(), received_nbytes=received.numel())
        except RuntimeError as error:
            raise _no_memory(error) from error
        return _RoundBuffers(sent, received)

    def _take_chunks(self, current: Round) -> None:
        for place, shape in current.chunks:
            self._collected[place] = np.empty(shape, np.uint8)

    def _sent(self, current: Round) -> torch.Tensor:
        """Return what this rank sends in a round.

        Raises:
            CheckpointError: PyTorch has no memory for it.
        """
        pieces = [bytes_of(self._held[position].data[part]) for position, part in current.sent]
        try:
            return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
        except RuntimeError as error:
            raise _no_memory(error) from error


def _no_memory(error: RuntimeError) -> CheckpointError:
    # For memory of the CPU PyTorch has no error of its own.
    return CheckpointError(f"no memory to exchange pieces with other ranks: {error}")


def _prepared_exchange(plan: SharedPlan, tensors: Sequence[LiveTensor]) -> PieceExchange | None:
    """Return an exchange whose first round needs no agreement any more; None without memory."""
    exchange = PieceExchange(plan, tensors)
    try:
        exchange.prepare()
    except (CheckpointError, MemoryError, torch.OutOfMemoryError):
        # All ranks plan anew then, and agree on why the exchange fails, if it does again.
        return None
    return exchange


def _by_key(tensors: Sequence[LiveTensor]) -> dict[str, list[LiveTensor]]:
    held: dict[str, list[LiveTensor]] = defaultdict(list)
    for tensor in tensors:
        held[tensor.key].append(tensor)
    return held


def _box_of(tensors: Sequence[LiveTensor], box: Box) -> Bytes:
    """Return the bytes of a box of a tensor of which this rank holds these boxes."""
    return box_of(next(tensor for tensor in tensors if _has(tensor, box)), box)


def _decode(message: memoryview) -> Json:
    return json.loads(bytes(message))


def _exchange_json(messages: Callable[[], Mapping[int, Json]]) -> dict[int, memoryview]:
    """Send each rank its message, if there is one; return the messages to this rank, by sender.

    Args:
        messages: returns this rank's messages. If it fails on one rank, all raise.

    Returns:
        The messages as JSON, not decoded.
    """

    def encoded() -> list[bytes]:
        by_rank = messages()
        return [
            json.dumps(by_rank[peer]).encode() if peer in by_rank else b""
            for peer in range(world_size())
        ]

    return {peer: data for peer, data in enumerate(exchange(encoded)) if data}
