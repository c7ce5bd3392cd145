"""Claims about verdicts at the coordinator: bounded, of the current generation only, and what a policy's actions ask for."""

import io
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from keepstep.elastic.cli.status import render, summary
from keepstep.elastic.monitor_bridge.verdicts import needs_publishing, published_verdicts, requests
from keepstep.elastic.rendezvous.actions import Close
from keepstep.elastic.rendezvous.decide import LeaderState, RendezvousPolicy, decide
from keepstep.elastic.rendezvous.records import (
    Closing,
    Eviction,
    Failure,
    Generation,
    History,
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

KEYS = Keys("job")
HANG = Verdict(
    Subject("rank", (2,), "b"), Syndrome.NON_COMMUNICATION_HANG, 90.0, ("rank 2 never arrived",), 0.95, math.inf,
    Advice.RESTART_WORKER,
)  # fmt: skip
SLOW = replace(
    HANG,
    syndrome=Syndrome.NON_COMMUNICATION_SLOW,
    cost_s_per_step=0.25,
    subject=Subject("rank", (1,), "a"),
)


def view_of(number: int = 3, **changes: Any) -> View:
    members = tuple(
        Member(name, "h", 2, 2 * place, "h:1", "tcp:h:2") for place, name in enumerate("ab")
    )
    nodes = {
        name: JoinedNode(
            NodeRecord(
                name, "h", 2, "h:1", "tcp:h:2", 5, 7, "d", warm=True, generation=number, phase=NodePhase.RUNNING
            ),
            place,
        )
        for place, name in enumerate("ab", 1)
    }  # fmt: skip
    view = View(
        nodes=nodes, generation=Generation(number, members, "h", 5, "start"), generation_revision=8
    )
    return replace(view, **changes)


def with_keys(view: View, *puts: Put) -> View:
    """Return the view after these writes, as a watch would tell of them."""
    return apply(
        KEYS, view, [Change(put.key, KeyValue(put.key, put.value, 9, 9), 9) for put in puts]
    )


def told(*verdicts: Verdict, generation: int = 3, wall_s: float = 1000.0) -> PublishedVerdicts:
    return published_verdicts(verdicts, generation, 100.0, wall_s)


def test_verdicts_come_back_from_the_coordinator_with_evidence_cost_and_wall_time() -> None:
    put = Put(KEYS.single("verdicts"), told(SLOW, HANG).encode())
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
    put = Put(KEYS.single("verdicts"), told(HANG, generation=generation).encode())
    view = with_keys(view_of(), put)
    assert view.current_verdicts == ()
    assert summary(view, 1000.0)["verdicts"] == []


def test_what_is_kept_is_bounded_whatever_is_told_and_the_costliest_come_first() -> None:
    many = [
        replace(
            SLOW,
            subject=Subject("rank", tuple(range(place, 10_000))),
            evidence=("x" * 10_000,) * 100,
        )
        for place in range(1000)
    ]
    kept = told(*many, HANG)
    assert kept.verdicts[0].syndrome == Syndrome.NON_COMMUNICATION_HANG
    assert len(kept.verdicts) + kept.omitted == 1001
    # etcd refuses requests above 1.5 MiB, and every agent gets this.
    assert len(kept.encode()) < 2**16


def test_evidence_that_grows_older_is_written_only_now_and_then() -> None:
    assert needs_publishing(None, told(HANG))
    assert needs_publishing(None, told())
    assert not needs_publishing(told(HANG), told(generation=4))
    assert not needs_publishing(
        told(HANG), told(replace(HANG, evidence=("a second later",)), wall_s=1001.0)
    )
    assert needs_publishing(told(HANG), told(HANG, wall_s=1006.0))
    assert needs_publishing(told(HANG), told(HANG, SLOW))
    assert needs_publishing(told(HANG), told())
    assert not needs_publishing(told(), told(wall_s=2000.0))


def test_status_shows_who_what_cost_and_evidence() -> None:
    view = with_keys(view_of(), Put(KEYS.single("verdicts"), told(HANG, SLOW).encode()))
    console = Console(file=io.StringIO(), record=True, width=120)
    console.print(render("job", view, 1000.0))
    shown = console.export_text()
    assert (
        "rank 2 on b: non-communication hang, for 10 s; the job stands still; sure to 95%" in shown
    )
    assert "rank 2 never arrived" in shown
    assert "rank 1 on a: non-communication slow, for 10 s; costs 0.25 s a step" in shown
    assert summary(view, 1000.0)["verdicts"][0]["evidence"] == ("rank 2 never arrived",)


def test_status_shows_a_reason_with_brackets_in_it() -> None:
    reason = "rank 0: [/pytorch/gloo/transport/tcp/pair.cc:537] Read error"
    recovery = Recovery(2, reason, 4, 1.0, 2.0, 3.0, 4.0, 5.0, 6, 0, "memory")
    console = Console(file=io.StringIO(), record=True, width=160)
    console.print(render("job", view_of(history=History((recovery,))), 1000.0))
    assert "[/pytorch/gloo/transport" in console.export_text()


def test_a_restart_is_a_request_to_the_node_that_has_the_rank() -> None:
    view = view_of()
    asked = requests(
        KEYS, view, EnforcementAction(ActionKind.RESTART_WORKER, HANG.subject, HANG, "", ranks=(2,))
    )
    view = with_keys(view, *asked)
    assert view.restarts_on("a") == ()
    assert view.restarts_on("b") == (
        RestartRequest(3, 2, "non-communication hang: rank 2 never arrived"),
    )
    taken_away = apply(KEYS, view, [Change(KEYS.restart(2), None, 10)])
    assert taken_away.restarts_on("b") == ()


def test_a_request_of_an_older_generation_restarts_nobody() -> None:
    asked = requests(
        KEYS,
        view_of(2),
        EnforcementAction(ActionKind.RESTART_WORKER, HANG.subject, HANG, "", ranks=(2,)),
    )
    assert with_keys(view_of(3), *asked).restarts_on("b") == ()


def test_a_replacement_is_an_eviction_with_the_verdict_as_reason() -> None:
    ecc = replace(HANG, syndrome=Syndrome.DEVICE_ERROR, cost_s_per_step=0.0)
    asked = requests(
        KEYS,
        view_of(),
        EnforcementAction(ActionKind.REPLACE_NODE, ecc.subject, ecc, "", nodes=("b",)),
    )
    assert asked == (
        Put(
            KEYS.eviction("b"),
            Eviction("device error: rank 2 never arrived", may_return=True).encode(),
        ),
    )


def test_who_hangs_on_a_node_that_is_replaced_is_not_waited_for() -> None:
    view = view_of()
    asked = requests(
        KEYS, view, EnforcementAction(ActionKind.REPLACE_NODE, HANG.subject, HANG, "", nodes=("b",))
    )
    view = with_keys(view, *asked)
    assert list(view.evictions) == ["b"]
    assert [request.rank for request in view.restarts_on("b")] == [2]


def test_a_stranger_is_neither_restarted_nor_evicted() -> None:
    action = EnforcementAction(
        ActionKind.REPLACE_NODE, HANG.subject, replace(HANG, cost_s_per_step=1.0), "", nodes=("c",)
    )
    assert requests(KEYS, view_of(), action) == ()
    action = EnforcementAction(ActionKind.RESTART_WORKER, HANG.subject, HANG, "", ranks=(9,))
    assert requests(KEYS, view_of(), action) == ()
    assert requests(KEYS, View(), action) == ()


def test_a_request_ends_the_generation_with_the_verdict_as_reason_not_with_the_broken_collective() -> (
    None
):
    asked = requests(
        KEYS,
        view_of(),
        EnforcementAction(ActionKind.RESTART_WORKER, HANG.subject, HANG, "", ranks=(2,)),
    )
    view = with_keys(view_of(), *asked)
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


def test_a_node_that_is_replaced_for_a_hang_is_said_to_be_evicted_and_nobody_waits_for_the_step_to_end() -> (
    None
):
    asked = requests(
        KEYS,
        view_of(),
        EnforcementAction(ActionKind.REPLACE_NODE, HANG.subject, HANG, "", nodes=("b",)),
    )
    action = decide(
        RendezvousPolicy(1, 2), with_keys(view_of(), *asked), LeaderState(), 0.0, 1000.0
    ).action
    assert action == Close(
        Closing(3, "evicted b: non-communication hang: rank 2 never arrived", True, 1000.0)
    )
