"""Claims about published verdicts and requested actions: their size, generation and effect."""

import io
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from keepstep.elastic.cli.status import render, summary
from keepstep.elastic.monitor_bridge.verdicts import (
    enforceable_kind,
    enforcement_operations,
    needs_publishing,
    published_verdicts,
)
from keepstep.elastic.rendezvous.actions import Close
from keepstep.elastic.rendezvous.decide import decide
from keepstep.elastic.rendezvous.decision import LeaderState
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.records import (
    Closing,
    Eviction,
    Failure,
    Generation,
    History,
    Leadership,
    Limits,
    Member,
    NodePhase,
    NodeRecord,
    PublishedVerdicts,
    Recovery,
    RestartRequest,
)
from keepstep.elastic.rendezvous.view import JoinedNode, Keys, View, apply
from keepstep.elastic.store.contract import Change, KeyValue, Put
from keepstep.monitor.diagnosis.policy import ActionKind, EnforcementAction
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict
from tests.unit.elastic.node_records import record_of

KEYS = Keys("job")
HANG = Verdict(
    subject=Subject("rank", (2,), "b"),
    syndrome=Syndrome.NON_COMMUNICATION_HANG,
    since_s=90.0,
    evidence=("rank 2 never arrived",),
    confidence=0.95,
    cost_s_per_step=math.inf,
    advice=Advice.RESTART_WORKER,
)
RESTART = EnforcementAction(ActionKind.RESTART_WORKER, HANG.subject, HANG, "", ranks=(2,))
REPLACE = EnforcementAction(
    ActionKind.REPLACE_NODE, HANG.subject, HANG, "", nodes=("b",), fallback_ranks=(2,)
)
SLOW = replace(
    HANG,
    syndrome=Syndrome.NON_COMMUNICATION_SLOW,
    cost_s_per_step=0.25,
    subject=Subject("rank", (1,), "a"),
)


def view_of(number: int = 3, **changes: Any) -> View:
    """Return the view of a job in a generation, with nodes a and b of two ranks each."""
    members = tuple(
        Member(name, "h", 2, 2 * place, "h:1", "tcp:h:2") for place, name in enumerate("ab")
    )
    nodes = {name: JoinedNode(running(name, number), place) for place, name in enumerate("ab", 1)}
    view = View(
        nodes=nodes,
        generation=Generation(number, members, "h", 5, "start"),
        revisions={"generation": 8},
    )
    return replace(view, **changes)


def running(node: str, generation: int) -> NodeRecord:
    return record_of(node, warm=True, generation=generation, phase=NodePhase.RUNNING)


def with_keys(view: View, *puts: Put) -> View:
    """Return the view after these writes, as a watch delivers them."""
    return apply(
        KEYS, view, [Change(put.key, KeyValue(put.key, put.value, 9, 9), 9) for put in puts]
    )


def published(*verdicts: Verdict, generation: int = 3, wall_s: float = 1000.0) -> PublishedVerdicts:
    return published_verdicts(verdicts, generation, 100.0, wall_s)


def test_published_verdicts_keep_evidence_cost_and_wall_time() -> None:
    put = Put(KEYS.single("verdicts"), published(SLOW, HANG).encode())
    worst, other = with_keys(view_of(), put).current_verdicts
    assert (worst.subject, worst.ranks, worst.node) == ("rank 2 on b", (2,), "b")
    assert (worst.syndrome, worst.cost_s_per_step, worst.since_s) == (
        Syndrome.NON_COMMUNICATION_HANG,
        None,
        990.0,
    )
    assert worst.evidence == HANG.evidence
    assert other.cost_s_per_step == 0.25


@pytest.mark.parametrize("generation", [2, 4])
def test_verdicts_of_another_generation_are_ignored(generation: int) -> None:
    put = Put(KEYS.single("verdicts"), published(HANG, generation=generation).encode())
    view = with_keys(view_of(), put)
    assert view.current_verdicts == ()
    assert summary(view, 1000.0)["verdicts"] == []


def test_published_verdicts_are_bounded_and_the_costliest_come_first() -> None:
    many = [
        replace(
            SLOW,
            subject=Subject("rank", tuple(range(place, 10_000))),
            evidence=("x" * 10_000,) * 100,
        )
        for place in range(1000)
    ]
    bounded = published(*many, HANG)
    assert bounded.verdicts[0].syndrome == Syndrome.NON_COMMUNICATION_HANG
    assert len(bounded.verdicts) + bounded.omitted == 1001
    # etcd rejects enforcement_operations above 1.5 MiB, and every agent receives this key.
    assert len(bounded.encode()) < 2**16


def test_unchanged_verdicts_are_published_again_only_at_an_interval() -> None:
    assert needs_publishing(None, published(HANG))
    assert needs_publishing(None, published())
    assert not needs_publishing(published(HANG), published(generation=4))
    assert not needs_publishing(
        published(HANG), published(replace(HANG, evidence=("a second later",)), wall_s=1001.0)
    )
    assert needs_publishing(published(HANG), published(HANG, wall_s=1006.0))
    assert needs_publishing(published(HANG), published(HANG, SLOW))
    assert needs_publishing(published(HANG), published())
    assert not needs_publishing(published(), published(wall_s=2000.0))


def test_status_shows_subject_syndrome_cost_and_evidence() -> None:
    view = with_keys(view_of(), Put(KEYS.single("verdicts"), published(HANG, SLOW).encode()))
    console = Console(file=io.StringIO(), record=True, width=120)
    console.print(render("job", view, 1000.0))
    shown = console.export_text()
    assert (
        "rank 2 on b: non-communication hang, for 10 s; the job stands still; confidence 95%"
        in shown
    )
    assert "rank 2 never arrived" in shown
    assert "rank 1 on a: non-communication slow, for 10 s; costs 0.25 s per step" in shown
    assert summary(view, 1000.0)["verdicts"][0]["evidence"] == ("rank 2 never arrived",)


def test_status_shows_a_reason_that_contains_brackets() -> None:
    reason = "rank 0: [/pytorch/gloo/transport/tcp/pair.cc:537] Read error"
    recovery = Recovery(2, reason, 4, 1.0, 2.0, 3.0, 4.0, 5.0, 6, 0, "memory")
    console = Console(file=io.StringIO(), record=True, width=160)
    console.print(render("job", view_of(history=History((recovery,))), 1000.0))
    assert "[/pytorch/gloo/transport" in console.export_text()


def test_restart_is_requested_from_the_node_of_the_rank() -> None:
    view = view_of()
    operations = enforcement_operations(KEYS, view, RESTART)
    view = with_keys(view, *operations)
    assert view.restarts_on("a") == ()
    assert view.restarts_on("b") == (
        RestartRequest(3, 2, "non-communication hang: rank 2 never arrived", is_standstill=True),
    )
    after_deletion = apply(KEYS, view, [Change(KEYS.restart(2), None, 10)])
    assert after_deletion.restarts_on("b") == ()


def test_request_of_an_older_generation_restarts_no_rank() -> None:
    operations = enforcement_operations(
        KEYS,
        view_of(2),
        RESTART,
    )
    assert with_keys(view_of(3), *operations).restarts_on("b") == ()


def test_replacement_is_an_eviction_with_the_verdict_as_reason() -> None:
    ecc = replace(HANG, syndrome=Syndrome.DEVICE_ERROR, cost_s_per_step=0.0)
    operations = enforcement_operations(
        KEYS,
        view_of(),
        EnforcementAction(ActionKind.REPLACE_NODE, ecc.subject, ecc, "", nodes=("b",)),
    )
    assert operations == (
        Put(
            KEYS.eviction("b"),
            Eviction("device error: rank 2 never arrived", may_return=True).encode(),
        ),
    )


def test_hanging_rank_on_a_replaced_node_is_restarted_at_once() -> None:
    view = view_of()
    operations = enforcement_operations(KEYS, view, REPLACE)
    view = with_keys(view, *operations)
    assert list(view.evictions) == ["b"]
    assert [request.rank for request in view.restarts_on("b")] == [2]


def test_unknown_ranks_and_nodes_are_neither_restarted_nor_evicted() -> None:
    action = EnforcementAction(
        ActionKind.REPLACE_NODE, HANG.subject, replace(HANG, cost_s_per_step=1.0), "", nodes=("c",)
    )
    assert enforcement_operations(KEYS, view_of(), action) == ()
    action = EnforcementAction(ActionKind.RESTART_WORKER, HANG.subject, HANG, "", ranks=(9,))
    assert enforcement_operations(KEYS, view_of(), action) == ()
    assert enforcement_operations(KEYS, View(), action) == ()


def test_request_closes_the_generation_for_the_verdict_not_for_the_failed_collective() -> None:
    operations = enforcement_operations(
        KEYS,
        view_of(),
        RESTART,
    )
    view = with_keys(view_of(), *operations)
    broken = replace(
        view.nodes["a"].record, failure=Failure("peer", "rank 0: connection closed", 5.0)
    )
    view = replace(view, nodes={**view.nodes, "a": replace(view.nodes["a"], record=broken)})
    action = decide(RendezvousPolicy(2, 2), view, LeaderState(), 0.0, 1000.0).action
    assert action == Close(
        Closing(
            3,
            "rank 2 on b is restarted: non-communication hang: rank 2 never arrived",
            True,
            1000.0,
        )
    )


def test_eviction_for_a_hang_closes_the_generation_at_once_with_the_eviction_as_reason() -> None:
    operations = enforcement_operations(
        KEYS,
        view_of(),
        REPLACE,
    )
    action = decide(
        RendezvousPolicy(1, 2), with_keys(view_of(), *operations), LeaderState(), 0.0, 1000.0
    ).action
    assert action == Close(
        Closing(3, "evicted b: non-communication hang: rank 2 never arrived", True, 1000.0)
    )


@pytest.mark.parametrize(
    ("limits", "spares"),
    [(Limits(2, 2, 1, 8, 600.0), False), (Limits(2, 2, 1, 8, 600.0), True),
     (Limits(1, 2, 1, 8, 600.0), False)],
    ids=["all are needed", "a spare is here", "fewer will do"],
)  # fmt: skip
def test_node_that_the_job_cannot_do_without_is_restarted_instead(
    limits: Limits, spares: bool
) -> None:
    """Its eviction ended the job, with what was in memory."""
    view = view_of(leadership=Leadership("a", "h:1", 7, limits))
    if spares:
        spare = JoinedNode(running("c", 0), 3)
        view = replace(view, nodes={**view.nodes, "c": spare})
    keys = [put.key for put in enforcement_operations(KEYS, view, REPLACE)]
    can_be_replaced = spares or limits.min_nodes == 1
    assert (KEYS.eviction("b") in keys) == can_be_replaced
    assert KEYS.restart(2) in keys
    assert enforceable_kind(view, REPLACE) is (
        ActionKind.REPLACE_NODE if can_be_replaced else ActionKind.RESTART_WORKER
    )
    # The budget of restarts is spent: a node may still be replaced.
    unaffordable = replace(REPLACE, fallback_ranks=())
    assert bool(enforcement_operations(KEYS, view, unaffordable)) == can_be_replaced
    slow = replace(unaffordable, verdict=replace(HANG, cost_s_per_step=0.3))
    assert bool(enforcement_operations(KEYS, view, slow)) == can_be_replaced
