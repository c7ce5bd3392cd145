"""Plans what each rank writes of a checkpoint, together with all ranks.

Each rank sends its boxes to the planners of their tensors and gets back which chunks it writes
(`checkpoint.format.stored.shared_plan`), so that no rank looks at what all ranks hold. Rank 0,
which publishes, gets the tensors and the documents, and adds where the state comes from; of
documents that several ranks have alike, one rank sends its own. Then the ranks exchange the pieces
of chunks that their writers do not hold; small ones go with the message in which the ranks agree on
the exchange, or on following a plan again.

Every rank must make the same calls in the same order, as for `checkpoint.ranks.collective`. What
fails on one rank is raised on all of them before the next message: none is left waiting.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.content_digest import DIGEST, digest_document, sum_of
from keepstep.checkpoint.format.layout.documents import (
    PROVENANCE,
    document_digests,
    last_holders,
    merged_documents,
)
from keepstep.checkpoint.format.stored.chunking import (
    Compression,
    check_compression,
    check_storable,
)
from keepstep.checkpoint.format.stored.manifest import StoredObject
from keepstep.checkpoint.format.stored.piece_rounds import (
    Pieces,
    Round,
    greatest_nbytes,
    requests_of,
    rounds_of,
    wanted_by_round,
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
from keepstep.checkpoint.format.stored.writer import ContentSum, ReadBox
from keepstep.checkpoint.live.provenance import provenance
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor
from keepstep.checkpoint.ranks.agreement import (
    exchange,
    on_all_ranks_exchanging,
)
from keepstep.checkpoint.ranks.collective import (
    Bytes,
    box_of,
    rank,
    room_beside_message,
    world_size,
)
from keepstep.checkpoint.ranks.piece_exchange import PieceExchange

log = logging.getLogger("keepstep")

Signature = tuple[tuple[object, ...], ...]
"""Of how many ranks which one it is, how cells are compressed, and the rank's boxes.

A box has a key, a data type, a global shape and its place in that.
"""


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

    def prepare() -> tuple[LiveState, Signature, _Prepared | None]:
        check_compression(compression)
        live = capture()
        signature = signature_of(live.tensors, compression)
        plan = cache.plan_for(signature)
        begin(live.tensors, plan)
        if rank() == 0:
            live = _with_provenance(live)
        return live, signature, None if plan is None else _prepared(plan, live.tensors)

    # All ranks take the name that rank 0 gives the attempt.
    (live, signature, prepared), gathered, pieces = on_all_ranks_exchanging(
        prepare,
        lambda prepared: [
            uuid.uuid4().hex,
            None if prepared[2] is None else prepared[2].plan.name,
            document_digests(prepared[0].documents),
            failure,
            [step, generation],
        ],
        lambda prepared: () if prepared[2] is None else prepared[2].exchange.sent_beside(),
    )
    _check_steps([stored for *_, stored in gathered])
    attempt = str(gathered[0][0])
    known = {name for _, name, *_ in gathered}
    if prepared is None or len(known) > 1:
        cache.keep(None)
        # The memory of its exchange goes before another one takes as much.
        prepared = None
        plan, exchange = _plan(attempt, live.tensors, signature, compression)
        cache.keep(plan)
    else:
        plan, exchange = prepared.plan, prepared.exchange
        exchange.receive_beside(pieces)
    digests = [digests for _, _, digests, *_ in gathered]
    holders = last_holders(digests)
    return AgreedSave(
        attempt=attempt,
        live=live,
        plan=plan,
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
    write: Callable[[ContentSum], StoredObject], documents: Mapping[str, Json]
) -> Sequence[memoryview]:
    """Write all ranks' parts; return the reports of them on rank 0, in order of ranks.

    Args:
        write: writes this rank's part, and adds up what it has. If it fails on one rank, all raise.
        documents: `AgreedSave.documents`.
    """

    def report() -> dict[int, Json]:
        content = ContentSum()
        return {0: [write(content).to_json(), documents, content.total]}

    reports = _exchange_json(report)
    return [reports[holder] for holder in sorted(reports)]


def merge_reports(reports: Iterable[memoryview]) -> tuple[list[StoredObject], dict[str, Json]]:
    """Return the entries of all parts, and all ranks' documents merged, with the digest."""
    decoded = [_decode(report) for report in reports]
    parts = [StoredObject.from_json(part) for part, *_ in decoded]
    merged = merged_documents(documents for _, documents, _ in decoded)
    total = sum_of(content for *_, content in decoded)
    return parts, {**merged, DIGEST: digest_document(total)}


def _plan(
    name: str, held: Sequence[LiveTensor], signature: Signature, compression: Compression | None
) -> tuple[SharedPlan, PieceExchange]:
    """Plan together what each rank writes, and which pieces it gets from which rank.

    Returns:
        The plan, and its exchange of pieces. It is done if they are small, and every rank had
        memory for them.
    """
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
    merged: list[tuple[WriterPlan, TensorPlan, Pieces]] = []

    def ask_for_pieces() -> dict[int, Json]:
        own, tensors, wanted = _merged([_decode(answer) for answer in answers.values()])
        merged.append((own, tensors, wanted))
        requests = requests_of(wanted)
        greatest = greatest_nbytes(wanted, own)
        return {peer: [len(wanted), greatest, requests.get(peer, [])] for peer in range(ranks)}

    asked = _exchange_json(ask_for_pieces)
    ((own, tensors, wanted),) = merged

    def plan_of(rounds: tuple[Round, ...], *, goes_beside: bool) -> SharedPlan:
        return SharedPlan(
            name=name,
            signature=signature,
            own=own,
            tensors=tensors,
            rounds=rounds,
            goes_beside=goes_beside,
        )

    if all(message == _NO_PIECES for message in asked.values()):
        # Each rank has told the same to all.
        plan = plan_of((), goes_beside=False)
        return plan, _exchange_of(plan, held)

    def plan_rounds() -> tuple[SharedPlan, _Prepared | None]:
        counts, nbytes, requests = zip(
            *(_decode(asked[peer]) for peer in range(ranks)), strict=True
        )
        entries = [tensor.entry() for tensor in held]
        plan = plan_of(
            rounds_of(wanted, dict(enumerate(requests)), max(counts), own, entries, ranks),
            goes_beside=max(counts) == 1 and max(nbytes) <= room_beside_message(),
        )
        return plan, _prepared(plan, held)

    (plan, prepared), are_prepared, pieces = on_all_ranks_exchanging(
        plan_rounds,
        lambda planned: planned[1] is not None,
        lambda planned: () if planned[1] is None else planned[1].exchange.sent_beside(),
    )
    if prepared is None or not all(are_prepared):
        return plan, _exchange_of(plan, held)
    prepared.exchange.receive_beside(pieces)
    return plan, prepared.exchange


_NO_PIECES = b"[0, 0, []]"
"""What a rank that lacks no pieces tells each rank."""


def _merged(shares: Sequence[Json]) -> tuple[WriterPlan, TensorPlan, Pieces]:
    """Return the answers of all planners as one: what this rank writes, all tensors, its pieces."""
    own = merged_writer_plan(WriterPlan.from_json(plan) for plan, _ in shares if plan is not None)
    tensors = merged_tensor_plan(
        TensorPlan.from_json(tensors) for _, tensors in shares if tensors is not None
    )
    # Each planner has seen its own tensors only.
    check_storable(tensors.tensors)
    return own, tensors, wanted_by_round(own)


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """A plan and its exchange, whose first round needs no agreement any more."""

    plan: SharedPlan
    exchange: PieceExchange


def _prepared(plan: SharedPlan, tensors: Sequence[LiveTensor]) -> _Prepared | None:
    """Prepare the exchange of a plan; None if that fails, mostly for want of memory.

    Then ranks that would follow a plan make a new one. If that of the new one fails too, `run`
    tries once more, and tells all ranks why.
    """
    exchange = _exchange_of(plan, tensors)
    try:
        exchange.prepare()
    except CheckpointError as error:
        log.warning("%s; it is tried again", error)
        return None
    return _Prepared(plan, exchange)


def _exchange_of(plan: SharedPlan, tensors: Sequence[LiveTensor]) -> PieceExchange:
    return PieceExchange(plan.rounds, tensors, goes_beside=plan.goes_beside)


def _by_key(tensors: Sequence[LiveTensor]) -> dict[str, list[LiveTensor]]:
    held: dict[str, list[LiveTensor]] = defaultdict(list)
    for tensor in tensors:
        held[tensor.key].append(tensor)
    return held


def _box_of(tensors: Sequence[LiveTensor], box: Box) -> Bytes:
    """Return the bytes of a box of a tensor of which this rank holds these boxes."""
    return box_of(next(tensor for tensor in tensors if box.is_within(tensor.box)), box)


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
