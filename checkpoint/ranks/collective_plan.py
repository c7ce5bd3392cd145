"""Plans what each rank writes of a checkpoint, together with all ranks.

Each rank sends its boxes to the planners of their tensors and gets back which chunks it writes
(`checkpoint.format.stored.shared_plan`), so that no rank looks at what all ranks hold. Rank 0,
which publishes, gets the tensors and the documents, and adds where the state comes from; a document
that is equal on several ranks is sent by one of them. Then the ranks exchange the pieces of chunks
that their writers do not hold (`exchange_pieces`).
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from msgspec.msgpack import decode, encode

from keepstep.checkpoint.format.layout.boxes import Box, Entry, Json
from keepstep.checkpoint.format.layout.documents import (
    PROVENANCE,
    document_digests,
    last_holders,
)
from keepstep.checkpoint.format.stored.chunking import (
    Compression,
    check_compression,
    check_storable,
)
from keepstep.checkpoint.format.stored.object_names import StoredStep
from keepstep.checkpoint.format.stored.piece_rounds import (
    Pieces,
    Request,
    Round,
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
from keepstep.checkpoint.format.stored.writer import ReadBox
from keepstep.checkpoint.live.fills import Bytes
from keepstep.checkpoint.live.provenance import provenance
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor, bytes_of
from keepstep.checkpoint.ranks.agreement import check_same
from keepstep.checkpoint.ranks.control_group import ControlGroup
from keepstep.checkpoint.ranks.piece_exchange import exchange_pieces

Signature = tuple[tuple[object, ...], ...]
"""World size, rank, compression of cells, and this rank's boxes.

A box has a key, a data type, a global shape and its place in that.
"""

_Share = tuple[WriterPlan | None, TensorPlan | None]
"""A planner's answer to a rank: what it writes, and for rank 0 also the tensors."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SharedPlan:
    """A plan that ranks have made together; valid while all ranks hold the same boxes.

    Attributes:
        name: that of the attempt for which it was planned.
        signature: this rank's boxes, and how cells are compressed.
        own: the chunks that this rank writes.
        tensors: all tensors on rank 0, which publishes them; none on the others.
        rounds: the exchange of pieces; all ranks have as many.
    """

    name: str
    signature: Signature
    own: WriterPlan
    tensors: TensorPlan
    rounds: tuple[Round, ...]


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
        stored: the checkpoint's step and generation.
        attempt: name of the attempt, the same on all ranks.
        live: this rank's state.
        plan: what this rank writes, and what rank 0 publishes.
        documents: this rank's documents, except those that are equal on a higher rank; rank 0
            merges those of all ranks.
        failures: what each rank tells about its last save.
    """

    stored: StoredStep
    attempt: str
    live: LiveState
    plan: SharedPlan
    documents: Mapping[str, Json]
    failures: tuple[Json, ...]


def agree_on_save(
    capture: Callable[[], LiveState],
    failure: Json,
    cache: PlanCache,
    group: ControlGroup,
    compression: Compression | None = None,
    *,
    step: int = 0,
    generation: int = 0,
    block: bool = True,
    begin: Callable[[Sequence[LiveTensor], SharedPlan | None], None] = lambda *_: None,
) -> AgreedSave:
    """Capture all ranks' states and plan a save of them.

    Args:
        capture: returns this rank's live state.
        failure: what this rank tells the others about its last save.
        cache: has the plan of the last save of the same ranks.
        group: the ranks.
        compression: as for `plan_chunks`.
        step: the step to save, which must be the same on all ranks.
        generation: its generation, in the same way.
        block: whether this is a save that blocks, in the same way.
        begin: called as soon as the tensors are captured, with the plan of the last save if it
            fits them; whether all ranks follow it is not known yet.

    Raises:
        CheckpointError: a rank could not capture its state, or the ranks' states or arguments do
            not fit together; every rank raises.
    """

    def prepare() -> tuple[LiveState, Signature, SharedPlan | None, StoredStep]:
        check_compression(compression)
        stored = StoredStep.of(step, generation)
        live = capture()
        signature = signature_of(live.tensors, group, compression)
        plan = cache.plan_for(signature)
        begin(live.tensors, plan)
        if group.rank == 0:
            live = _with_provenance(live, group.size)
        return live, signature, plan, stored

    # All ranks take the name that rank 0 gives the attempt.
    (live, signature, plan, stored), gathered = group.run_and_share(
        prepare,
        lambda prepared: [
            uuid.uuid4().hex,
            None if prepared[2] is None else prepared[2].name,
            document_digests(prepared[0].documents),
            failure,
            {"step": prepared[3].step, "generation": prepared[3].generation, "block": block},
        ],
    )
    check_same([given for *_, given in gathered], group, "save one step together")
    attempt = str(gathered[0][0])
    known = {name for _, name, *_ in gathered}
    if plan is None or len(known) > 1:
        cache.keep(None)
        plan = _plan(attempt, live.tensors, signature, compression, group)
        cache.keep(plan)
    digests = [digests for _, _, digests, *_ in gathered]
    holders = last_holders(digests)
    return AgreedSave(
        stored=stored,
        attempt=attempt,
        live=live,
        plan=plan,
        documents={
            name: content
            for name, content in live.documents.items()
            if holders[name, digests[group.rank][name]] == group.rank
        },
        failures=tuple(failure for *_, failure, _ in gathered),
    )


def _with_provenance(live: LiveState, world_size: int) -> LiveState:
    owners = (tensor.owner for tensor in live.tensors if tensor.owner is not None)
    content = provenance(owners, world_size=world_size, now=datetime.now(UTC))
    return LiveState(live.tensors, {**live.documents, PROVENANCE: content})


def signature_of(
    tensors: Sequence[LiveTensor], group: ControlGroup, compression: Compression | None = None
) -> Signature:
    """Return what this rank's plan depends on; quick, for it is done at every save.

    A process may become another rank in a new group: the plan is that of a rank.

    Raises:
        LayoutMismatch: a tensor's data type cannot be stored.
    """
    return (
        (group.size, group.rank, compression),
        *((tensor.key, tensor.dtype, tensor.global_shape, tensor.box) for tensor in tensors),
    )


def boxes_reader(agreed: AgreedSave, group: ControlGroup) -> ReadBox:
    """Return what reads the chunks that this rank writes, after the ranks have exchanged pieces.

    Raises as `exchange_pieces` does.
    """
    collected = exchange_pieces(agreed.plan.rounds, agreed.live.tensors, group)
    held = _by_key(agreed.live.tensors)

    def read_box(key: str, box: Box) -> Bytes:
        return collected[key, box] if (key, box) in collected else _box_of(held[key], box)

    return read_box


def _plan(
    name: str,
    held: Sequence[LiveTensor],
    signature: Signature,
    compression: Compression | None,
    group: ControlGroup,
) -> SharedPlan:
    """Plan together what each rank writes, and which pieces it gets from which rank."""
    planners = planner_count(group.size)

    def boxes_for_planners() -> dict[int, list[Entry]]:
        split = entries_by_planner([tensor.entry() for tensor in held], planners)
        return {planner_rank(number): part for number, part in enumerate(split)}

    boxes = _exchange(boxes_for_planners, group)

    def plan_own_share() -> dict[int, _Share]:
        number, is_planner = divmod(group.rank, planner_rank(1))
        if is_planner != 0:
            return {}
        held_boxes = [decode(boxes[holder], type=list[Entry]) for holder in range(group.size)]
        plans, tensors = plan_share(held_boxes, number, compression)
        answers: dict[int, _Share] = {writer: (plan, None) for writer, plan in plans.items()}
        answers[0] = plans.get(0), tensors
        return answers

    answers = _exchange(plan_own_share, group)
    merged: list[tuple[WriterPlan, TensorPlan, Pieces]] = []

    def ask_for_pieces() -> dict[int, tuple[int, list[Request]]]:
        own, tensors, wanted = _merged([decode(answer, type=_Share) for answer in answers.values()])
        merged.append((own, tensors, wanted))
        requests = requests_of(wanted)
        return {peer: (len(wanted), requests.get(peer, [])) for peer in range(group.size)}

    asked = _exchange(ask_for_pieces, group)
    ((own, tensors, wanted),) = merged

    def plan_rounds() -> SharedPlan:
        messages = [
            decode(asked[peer], type=tuple[int, list[Request]]) for peer in range(group.size)
        ]
        counts, requests = zip(*messages, strict=True)
        entries = [tensor.entry() for tensor in held]
        return SharedPlan(
            name=name,
            signature=signature,
            own=own,
            tensors=tensors,
            rounds=rounds_of(
                wanted, dict(enumerate(requests)), max(counts), own, entries, group.size
            ),
        )

    return group.run_on_all_ranks(plan_rounds)


def _merged(shares: Sequence[_Share]) -> tuple[WriterPlan, TensorPlan, Pieces]:
    """Return the answers of all planners as one: what this rank writes, all tensors, its pieces."""
    own = merged_writer_plan(plan for plan, _ in shares if plan is not None)
    tensors = merged_tensor_plan(tensors for _, tensors in shares if tensors is not None)
    # Each planner has seen its own tensors only.
    check_storable(tensors.tensors)
    return own, tensors, wanted_by_round(own)


def _by_key(tensors: Sequence[LiveTensor]) -> dict[str, list[LiveTensor]]:
    held: dict[str, list[LiveTensor]] = defaultdict(list)
    for tensor in tensors:
        held[tensor.key].append(tensor)
    return held


def _box_of(tensors: Sequence[LiveTensor], box: Box) -> Bytes:
    """Return the bytes of a box of a tensor of which this rank holds these boxes.

    The array has the box's shape plus a last axis of an element's bytes.
    """
    tensor = next(tensor for tensor in tensors if box.is_within(tensor.box))
    part = tensor.data[box.slices_in(tensor.box)]
    return bytes_of(part).numpy().reshape(*box.shape, part.element_size())


def _exchange(
    messages: Callable[[], Mapping[int, object]], group: ControlGroup
) -> dict[int, memoryview]:
    """Send each rank its message, if there is one; return the messages to this rank, by sender.

    Args:
        messages: returns this rank's messages. If it fails on one rank, all raise.
        group: the ranks.

    Returns:
        The messages in MessagePack, not decoded.
    """
    received = group.all_to_all(
        lambda: {peer: encode(message) for peer, message in messages().items()}
    )
    return {peer: data for peer, data in enumerate(received) if data}
