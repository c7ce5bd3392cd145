"""Claims about plans that snapshot servers make together: what they are, cost, and failures."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.errors import CheckpointError, LayoutMismatch, SnapshotUnavailable
from keepstep.checkpoint.format.layout.boxes import Box, Entry, ShardIndex
from keepstep.checkpoint.format.stored.chunking import Chunk, plan_chunks
from keepstep.checkpoint.format.stored.shared_plan import (
    TensorPlan,
    WriterPlan,
    entries_by_planner,
    merged_tensor_plan,
    merged_writer_plan,
    plan_share,
    planner_count,
)
from keepstep.checkpoint.snapshot.server import plan_exchange, plan_outbox
from keepstep.checkpoint.snapshot.server.plan_exchange import NodePlan
from tests.adaptive_timeouts import patient
from tests.examples import examples
from tests.unit.checkpoint.snapshot.server.plan_nodes import Nodes, index_of
from tests.unit.checkpoint.test_any_layout import (
    ITEMSIZES,
    Layout,
    layouts,
    small_sizes,
    tensors,
)

__all__ = ["small_sizes"]


def entry(key: str, shape: tuple[int, ...], box: Box, dtype: str = "float32") -> Entry:
    return Entry(
        key=key,
        dtype=dtype,
        global_shape=shape,
        box=box,
        byte_offset=0,
        nbytes=box.size * ITEMSIZES[dtype],
    )


def rows(key: str, rank: int, ranks: int, per_rank: int = 2) -> Entry:
    """Return a rank's rows of a tensor that all ranks share."""
    shape = (ranks * per_rank, 4)
    return entry(key, shape, Box((rank * per_rank, 0), (per_rank, 4)))


def indexes_of(layout: Layout) -> list[ShardIndex]:
    return [
        index_of([entry(tensor.key, tensor.shape, box, tensor.dtype) for tensor, box in shards])
        for shards in layout
    ]


def planned_as_saves_do(
    indexes: Sequence[ShardIndex],
) -> tuple[dict[int, WriterPlan], TensorPlan]:
    """Return what `checkpoint.save` has each rank write and publish in the same layout."""
    planners = planner_count(len(indexes))
    held = [entries_by_planner(index.entries, planners) for index in indexes]
    shares = [plan_share([own[number] for own in held], number) for number in range(planners)]
    plans = {
        rank: merged_writer_plan(plans[rank] for plans, _ in shares if rank in plans)
        for rank in range(len(indexes))
    }
    return plans, merged_tensor_plan(own for _, own in shares)


@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_servers_plan_what_a_save_of_the_same_layout_plans(data: st.DataObject) -> None:
    indexes = indexes_of(data.draw(layouts(data.draw(tensors))))
    # Which rank a shard is of need not be its position.
    ranks = data.draw(st.permutations([3 * position + 1 for position in range(len(indexes))]))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ranks)), max_size=4)) | {0, len(ranks)})
    held = [ranks[begin:end] for begin, end in itertools.pairwise(cuts)]
    nodes = Nodes(held, {3 * position + 1: index for position, index in enumerate(indexes)})
    plans, published = planned_as_saves_do(indexes)
    for planned in nodes.plan("a"):
        for rank, chunks in zip(planned.own, planned.chunks.chunks, strict=True):
            assert chunks == plans[rank // 3].chunks
            assert plans[rank // 3].tensors.items() <= planned.chunks.tensors.items()
        assert planned.ranks == tuple(sorted(ranks))
    content = nodes.content("a")
    assert content.tensors == published.tensors
    part_of = {rank // 3: part for part, own in enumerate(held) for rank in own}
    assert content.chunk_parts == {
        key: [part_of[writer] for writer in writers] for key, writers in published.writers.items()
    }
    if planner_count(len(indexes)) == 1:
        assert {rank: plan.chunks for rank, plan in plans.items()} == dict(
            enumerate(plan_chunks(indexes).chunks)
        )


RANKS = 20
"""Three planners: ranks 0, 8 and 16, on the first, the second and the last of four nodes."""

NODES = [range(start, start + 5) for start in range(0, RANKS, 5)]

Outcome = NodePlan | Exception


def shared_indexes(more: Mapping[int, Sequence[Entry]] = {}) -> dict[int, ShardIndex]:
    """Return indexes of tensors that all ranks share, of a replicated one, and of more."""
    whole = entry("model/all", (6,), Box((0,), (6,)))
    return {
        rank: index_of(
            [*(rows(f"model/t{n}", rank, RANKS) for n in range(30)), whole, *more.get(rank, ())],
            {"notes": 1, f"rank/{rank}/note": rank},
        )
        for rank in range(RANKS)
    }


def check_planned(planned: Sequence[NodePlan], indexes: Mapping[int, ShardIndex]) -> None:
    """Check that all ranks write what they write in a save."""
    plans, _ = planned_as_saves_do([indexes[rank] for rank in range(RANKS)])
    written = {
        rank: chunks
        for node in planned
        for rank, chunks in zip(node.own, node.chunks.chunks, strict=True)
    }
    assert written == {rank: plan.chunks for rank, plan in plans.items()}


def test_nothing_is_planned_again_while_no_ranks_boxes_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = Nodes(NODES, shared_indexes())
    first = nodes.plan("a")

    def fail(*_: object) -> None:
        raise AssertionError("it is planned again")

    monkeypatch.setattr(plan_exchange, "plan_share", fail)
    nodes.take(NODES, shared_indexes())
    assert nodes.plan("b") == first
    assert nodes.content("b").documents["notes"] == 1


def test_a_change_of_one_ranks_boxes_is_planned() -> None:
    nodes = Nodes(NODES, shared_indexes())
    nodes.plan("a")
    changed = shared_indexes({13: [entry("model/more", (3,), Box((0,), (3,)))]})
    nodes.take(NODES, changed)
    check_planned(nodes.plan("b"), changed)
    assert "model/more" in nodes.content("b").tensors


@pytest.mark.parametrize("are_replicas", [False, True])
def test_nodes_whose_ranks_have_changed_places_do_not_follow_their_old_plans(
    are_replicas: bool,
) -> None:
    """All ranks' boxes are the same as before."""
    whole = [entry(f"model/w{number}", (6,), Box((0,), (6,))) for number in range(30)]
    replicas = {rank: index_of(whole) for rank in range(RANKS)}
    indexes = replicas if are_replicas else shared_indexes()
    nodes = Nodes(NODES, indexes)
    first = nodes.plan("a")
    nodes.take([NODES[n] for n in (1, 0, 2, 3)], indexes)
    assert nodes.plan("b") == [first[n] for n in (1, 0, 2, 3)]
    chunk_parts = nodes.content("b").chunk_parts
    for part, own in enumerate(nodes.ranks):
        written = {chunk.key for rank in own for chunk in chunks_of(first, rank)}
        assert written == {key for key, parts in chunk_parts.items() if part in parts}


def chunks_of(planned: Sequence[NodePlan], rank: int) -> Sequence[Chunk]:
    node = next(node for node in planned if rank in node.own)
    return node.chunks.chunks[node.own.index(rank)]


def test_what_a_server_receives_does_not_grow_with_the_nodes() -> None:
    def most_received(nodes: int) -> int:
        ranks = 8 * nodes
        held = [range(8 * node, 8 * node + 8) for node in range(nodes)]
        keys = [f"model/layers.{number}.weight" for number in range(160)]
        indexes = {rank: index_of([rows(k, rank, ranks) for k in keys]) for rank in range(ranks)}
        cluster = Nodes(held, indexes)
        cluster.plan("a")
        return max(traffic.nbytes for traffic in cluster.traffic)

    # Of two nodes each receives half of what it plans with from the other, of eight seven eighths.
    assert most_received(8) < 2.5 * most_received(2)


def test_of_documents_that_are_alike_one_is_read_and_of_others_the_last_counts() -> None:
    indexes = shared_indexes()
    for rank, value in ((0, 3), (7, 2), (19, 1)):
        documents = {"notes": value, "model/tied": {str(rank): rank}}
        indexes[rank] = index_of(indexes[rank].entries, documents)
    nodes = Nodes(NODES, indexes)
    nodes.plan("a")
    noted = {f"rank/{rank}/note": rank for rank in range(RANKS) if rank not in (0, 7, 19)}
    assert nodes.content("a").documents == {
        "notes": 1,
        "model/tied": {"0": 0, "7": 7, "19": 19},
        **noted,
    }


def test_a_document_that_all_ranks_have_is_sent_once() -> None:
    groups = [{"lr": 0.1, "parameters": [f"parameter {number}" for number in range(10_000)]}]
    documents = {"optim/groups": groups}
    whole = [entry("model/all", (6,), Box((0,), (6,)))]
    nodes = Nodes(NODES, {rank: index_of(whole, documents) for rank in range(RANKS)})
    nodes.plan("a")
    assert nodes.content("a").documents == documents
    assert nodes.published.nbytes < 1.1 * len(json.dumps(documents))


class Planning:
    """A node that plans on a thread of its own."""

    def __init__(self, nodes: Nodes, node: int) -> None:
        self.stop = threading.Event()
        self._outcome: list[Outcome] = []
        self._thread = threading.Thread(target=self._run, args=(nodes, node))
        self._thread.start()

    def _run(self, nodes: Nodes, node: int) -> None:
        try:
            self._outcome.append(nodes.plan_one(node, "a", self.stop))
        except CheckpointError as error:
            self._outcome.append(error)

    @property
    def outcome(self) -> Outcome:
        self._thread.join(patient(60))
        return self._outcome[0]


def test_a_share_that_cannot_be_planned_fails_all_nodes() -> None:
    part = entry("model/part", (9,), Box((0,), (4,)))
    nodes = Nodes(NODES, shared_indexes({7: [part]}))
    errors = [planning.outcome for planning in [Planning(nodes, node) for node in range(4)]]
    own = [error for error in errors if isinstance(error, LayoutMismatch)]
    assert len(own) == 1
    assert "model/part" in str(own[0])
    told = "its share was not planned: LayoutMismatch: model/part"
    assert [told in str(error) for error in errors if error is not own[0]] == [True] * 3


def test_a_holder_that_is_gone_fails_the_others_by_name() -> None:
    nodes = Nodes(NODES, shared_indexes())
    nodes.lost.add(3)
    for planning in [Planning(nodes, node) for node in range(3)]:
        assert isinstance(planning.outcome, SnapshotUnavailable)
        assert "node 3 is gone" in str(planning.outcome)


def test_a_holder_that_is_gone_ends_the_wait_for_others() -> None:
    nodes = Nodes(NODES, shared_indexes())
    nodes.lost.add(3)
    # It plans no share; the planners before the one that is gone never begin.
    assert "node 3 is gone" in str(Planning(nodes, 2).outcome)


def wait_until_pending(nodes: Nodes, node: int) -> None:
    deadline_s = time.monotonic() + patient(60)
    while not nodes.traffic[node].pending:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.fixture
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_outbox, "_PENDING_POLL_S", 0.01)


@pytest.mark.usefixtures("short_polls")
def test_an_attempt_that_is_given_up_does_not_wait_for_planners() -> None:
    nodes = Nodes(NODES, shared_indexes())
    waiting = Planning(nodes, 0)
    wait_until_pending(nodes, 0)
    waiting.stop.set()
    assert "given up" in str(waiting.outcome)


@pytest.mark.usefixtures("short_polls")
def test_a_planner_that_begins_late_is_waited_for() -> None:
    indexes = shared_indexes()
    nodes = Nodes(NODES, indexes)
    early = Planning(nodes, 2)
    wait_until_pending(nodes, 2)
    planned = [Planning(nodes, node) for node in (0, 1, 3)]
    outcomes = [planning.outcome for planning in (*planned, early)]
    check_planned([plan for plan in outcomes if isinstance(plan, NodePlan)], indexes)


@pytest.mark.usefixtures("short_polls")
def test_a_planner_that_never_begins_is_waited_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_exchange, "_SERVER_LIMIT_S", 0.05)
    nodes = Nodes(NODES, shared_indexes())
    with pytest.raises(SnapshotUnavailable, match=r"server at . did not plan its share within"):
        nodes.plan_one(0, "a")


@pytest.mark.usefixtures("short_polls")
def test_a_node_that_has_begun_the_next_attempt_refuses_the_one_before() -> None:
    nodes = Nodes(NODES, shared_indexes())
    waiting = Planning(nodes, 0)
    wait_until_pending(nodes, 0)
    nodes.outboxes[1].begin("a")
    nodes.outboxes[1].begin("b")
    assert "attempt a to store a snapshot is over here" in str(waiting.outcome)


def test_names_that_lie_in_each_other_are_refused_though_no_planner_has_both() -> None:
    outer = "model/w"
    inner = next(
        k for k in (f"{outer}/{n}" for n in range(99)) if planner_of(k) != planner_of(outer)
    )
    entries = {0: entry(outer, (3,), Box((0,), (3,))), 19: entry(inner, (3,), Box((0,), (3,)))}
    nodes = Nodes(
        NODES, {rank: index_of([entries[rank]] if rank in entries else []) for rank in range(RANKS)}
    )
    nodes.plan("a")
    with pytest.raises(LayoutMismatch, match=f"'model/w' is a tensor, so '{inner}' cannot lie"):
        nodes.content("a")


def planner_of(key: str) -> int:
    split = entries_by_planner([entry(key, (), Box((), ()))], planner_count(RANKS))
    return next(number for number, own in enumerate(split) if own)
