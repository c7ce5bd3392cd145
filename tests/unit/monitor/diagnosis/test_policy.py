"""Tests what the policy does about verdicts, and what it never does."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.monitor.diagnosis.policy import (
    ActionKind,
    EnforcementPolicy,
    EnforcementState,
    Mode,
    decide,
    max_replacements,
    record_fallback,
    revert_action,
    within_budget,
)
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict

NODES = {rank: f"n{rank // 2}" for rank in range(80)}
POLICY = EnforcementPolicy(mode=Mode.REPLACE)


def verdict(
    rank: int = 3,
    syndrome: Syndrome = Syndrome.NON_COMMUNICATION_SLOW,
    cost_s: float = 0.1,
    advice: Advice = Advice.REPLACE_NODE,
    confidence: float = 0.9,
) -> Verdict:
    return Verdict(
        subject=Subject("rank", (rank,), NODES[rank]),
        syndrome=syndrome,
        since_s=0.0,
        evidence=("evidence",),
        confidence=confidence,
        cost_s_per_step=cost_s,
        advice=advice,
    )


def kinds(
    policy: EnforcementPolicy, readings: list[tuple[float, list[Verdict]]], step_s: float = 1.0
) -> list[tuple[float, ActionKind]]:
    state, actions_done = EnforcementState(), []
    for now_s, verdicts in readings:
        state, actions = decide(policy, state, verdicts, NODES, step_s, now_s)
        actions_done += [(now_s, action.kind) for action in actions]
    return actions_done


def test_slowness_is_acted_upon_when_the_loss_equals_the_cost_of_acting() -> None:
    # 0.1 s of each step of 1 s is lost: a replacement that costs 60 s is due after 600 s.
    done = kinds(POLICY, [(float(now), [verdict()]) for now in range(0, 1000, 10)])
    # An alert is due once 5 s are lost.
    assert done[0] == (50.0, ActionKind.ALERT)
    assert done[1:] == [(600.0, ActionKind.REPLACE_NODE)]


def test_slow_worker_is_restarted_first_and_its_node_replaced_when_that_is_worth_its_cost() -> None:
    slow = verdict(advice=Advice.RESTART_WORKER)
    done = kinds(POLICY, [(float(now), [slow]) for now in range(0, 1000, 10)])
    assert done == [
        (50.0, ActionKind.ALERT),
        (100.0, ActionKind.RESTART_WORKER),
        (600.0, ActionKind.REPLACE_NODE),
    ]


def test_slowdown_that_has_cost_nothing_yet_alerts_nobody() -> None:
    """Neighbours that are busy for a moment gave alerts with `0 s lost so far`."""
    moment = [(float(now), [verdict()] if now < 30 else []) for now in range(200)]
    assert kinds(EnforcementPolicy(mode=Mode.ALERT), moment) == []


def test_time_without_the_verdict_is_not_counted_as_lost() -> None:
    half = [(float(now), [verdict()] if now // 30 % 2 == 0 else []) for now in range(0, 1000, 10)]
    assert all(kind is ActionKind.ALERT for _, kind in kinds(POLICY, half))


def test_hang_is_acted_upon_as_soon_as_it_is_sustained() -> None:
    hang = verdict(
        syndrome=Syndrome.NON_COMMUNICATION_HANG, cost_s=math.inf, advice=Advice.RESTART_WORKER
    )
    done = kinds(POLICY, [(0.0, [hang]), (0.5, [hang]), (1.0, [hang]), (1.5, [hang])])
    assert done == [(1.0, ActionKind.RESTART_WORKER)]


def test_alert_on_a_hang_states_the_loss_since_it_began() -> None:
    hang = verdict(
        syndrome=Syndrome.NON_COMMUNICATION_HANG, cost_s=math.inf, advice=Advice.RESTART_WORKER
    )
    state, _ = decide(POLICY, EnforcementState(), [hang], NODES, 1.0, 69.0)
    _, (action,) = decide(POLICY, state, [hang], NODES, 1.0, 70.0)
    assert action.reason == "70 s lost so far"


def test_node_is_replaced_if_a_restart_did_not_end_its_hang() -> None:
    hang = verdict(
        syndrome=Syndrome.NON_COMMUNICATION_HANG, cost_s=math.inf, advice=Advice.RESTART_WORKER
    )
    done = kinds(POLICY, [(float(now), [hang]) for now in range(200)])
    assert [kind for _, kind in done if kind is not ActionKind.ALERT] == [
        ActionKind.RESTART_WORKER,
        ActionKind.REPLACE_NODE,
    ]
    assert [now_s for now_s, kind in done if kind is ActionKind.REPLACE_NODE] == [
        1.0 + POLICY.replace_cost_s
    ]


@pytest.mark.parametrize(
    ("node", "syndrome", "expected"),
    [
        ("n1", Syndrome.NON_COMMUNICATION_HANG, ActionKind.REPLACE_NODE),
        ("n1", Syndrome.DATA_STALL, ActionKind.RESTART_WORKER),
        ("n9", Syndrome.NON_COMMUNICATION_HANG, ActionKind.RESTART_WORKER),
    ],
)
def test_node_is_replaced_only_if_a_rank_hangs_there_twice_by_the_same_fault(
    node: str, syndrome: Syndrome, expected: ActionKind
) -> None:
    policy = replace(POLICY, sustained_s=0.0)
    state, (first,) = decide(policy, EnforcementState(), [hang_of(3)], NODES, 1.0, 5.0)
    assert first.ranks == (3,)
    state, _ = decide(policy, state, [], NODES, 1.0, 100.0)
    again = replace(hang_of(3), subject=Subject("rank", (3,), node), syndrome=syndrome)
    # With node n9, a new generation has moved the rank there.
    _, (second,) = decide(policy, state, [again], {**NODES, 3: node}, 1.0, 2000.0)
    assert second.kind is expected


@pytest.mark.parametrize("gap_s", [1.0, 300.0])
def test_worker_that_hangs_again_is_restarted_again_where_nothing_more_is_allowed(
    gap_s: float,
) -> None:
    policy = EnforcementPolicy(mode=Mode.RESTART, restarts=3)
    hang = verdict(
        syndrome=Syndrome.NON_COMMUNICATION_HANG, cost_s=math.inf, advice=Advice.RESTART_WORKER
    )
    hung_s = [*range(5), *(5 + gap_s + now for now in range(400))]
    done = kinds(policy, [(float(now), [hang]) for now in hung_s])
    restarts = [now_s for now_s, kind in done if kind is ActionKind.RESTART_WORKER]
    assert len(restarts) == 3
    # Not before the last restart has had the time to work.
    for earlier, later in itertools.pairwise(restarts):
        assert later - earlier >= policy.replace_cost_s


def test_worker_is_not_restarted_again_while_its_job_goes_on() -> None:
    policy = EnforcementPolicy(mode=Mode.RESTART)
    stall = verdict(cost_s=0.0, advice=Advice.RESTART_WORKER)
    done = kinds(policy, [(float(now), [stall]) for now in range(400)])
    assert [kind for _, kind in done].count(ActionKind.RESTART_WORKER) == 1


def test_reverted_action_costs_no_budget_and_is_due_again() -> None:
    hang = verdict(
        syndrome=Syndrome.NON_COMMUNICATION_HANG, cost_s=math.inf, advice=Advice.RESTART_WORKER
    )
    policy = EnforcementPolicy(mode=Mode.RESTART, sustained_s=0.0, restarts=1)
    state, (refused,) = decide(policy, EnforcementState(), [hang], NODES, 1.0, 5.0)
    state = revert_action(state, refused)
    assert state.restarted == ()
    state, (again,) = decide(policy, state, [hang], NODES, 1.0, 6.0)
    assert (again.kind, again.ranks) == (ActionKind.RESTART_WORKER, (3,))
    assert decide(policy, state, [hang], NODES, 1.0, 7.0)[1] == ()


def test_replacement_that_was_not_carried_out_is_due_again() -> None:
    hang = verdict(syndrome=Syndrome.NON_COMMUNICATION_HANG, cost_s=math.inf)
    policy = replace(POLICY, sustained_s=0.0)
    state, (refused,) = decide(policy, EnforcementState(), [hang], NODES, 1.0, 5.0)
    state, (again,) = decide(policy, revert_action(state, refused), [hang], NODES, 1.0, 6.0)
    assert (again.kind, again.nodes) == (ActionKind.REPLACE_NODE, ("n1",))
    assert decide(policy, state, [hang], NODES, 1.0, 7.0)[1] == ()


def hangs_restarted_instead(policy: EnforcementPolicy, advice: Advice) -> list[float]:
    """Return when a lasting hang was restarted in a job that cannot do without its node."""
    hang = verdict(syndrome=Syndrome.NON_COMMUNICATION_HANG, cost_s=math.inf, advice=advice)
    state, restarted_s = EnforcementState(), list[float]()
    for second in range(600):
        state, actions = decide(policy, state, [hang], NODES, 1.0, float(second))
        for action in actions:
            done = action
            if action.kind is ActionKind.REPLACE_NODE and action.fallback_ranks:
                state, done = record_fallback(state, action, NODES)
                assert "instead of replacing n1" in str(done)
            elif action.kind is ActionKind.REPLACE_NODE:
                state = revert_action(state, action)
            if done.kind is ActionKind.RESTART_WORKER:
                assert done.ranks == (3,)
                restarted_s.append(float(second))
    assert state.replaced == ()
    return restarted_s


@pytest.mark.parametrize("advice", [Advice.RESTART_WORKER, Advice.REPLACE_NODE])
def test_hang_is_restarted_each_minute_within_the_budget_if_its_node_cannot_be_replaced(
    advice: Advice,
) -> None:
    restarted_s = hangs_restarted_instead(POLICY, advice)
    assert restarted_s == [1.0 + POLICY.replace_cost_s * turn for turn in range(10)]
    assert hangs_restarted_instead(replace(POLICY, restarts=3), advice) == restarted_s[:3]


def test_restarts_instead_of_replacements_of_one_round_keep_to_the_budget_together() -> None:
    policy = replace(POLICY, restarts=1)
    hangs = [
        verdict(rank, Syndrome.NON_COMMUNICATION_HANG, math.inf, Advice.REPLACE_NODE)
        for rank in (0, 3)
    ]
    state = EnforcementState()
    for second in range(3):
        state, actions = decide(policy, state, hangs, NODES, 1.0, float(second))
        if actions:
            break
    first, second_action = actions
    assert within_budget(policy, state, first).fallback_ranks == first.fallback_ranks != ()
    state, _ = record_fallback(state, first, NODES)
    assert second_action.fallback_ranks
    assert within_budget(policy, state, second_action).fallback_ranks == ()


@pytest.mark.parametrize(("alerted_before", "alerts"), [(False, 1), (True, 0)])
def test_reverted_action_counts_as_no_alert(*, alerted_before: bool, alerts: int) -> None:
    restarting = EnforcementPolicy(mode=Mode.RESTART, sustained_s=0.0)
    alerting = replace(restarting, mode=Mode.ALERT)
    state = EnforcementState()
    if alerted_before:
        state, _ = decide(alerting, state, [hang_of(3)], NODES, 1.0, 4.0)
    state, (refused,) = decide(restarting, state, [hang_of(3)], NODES, 1.0, 5.0)
    assert refused.kind is ActionKind.RESTART_WORKER
    state, done = revert_action(state, refused), []
    for now_s in (6.0, 7.0, 8.0):
        state, actions = decide(alerting, state, [hang_of(3)], NODES, 1.0, now_s)
        done += [action.kind for action in actions]
    assert done == [ActionKind.ALERT] * alerts


def test_of_equal_losses_the_first_subject_by_name_is_acted_upon_first() -> None:
    hangs = [
        verdict(rank, Syndrome.NON_COMMUNICATION_HANG, math.inf, Advice.RESTART_WORKER)
        for rank in (5, 3)
    ]
    policy = EnforcementPolicy(mode=Mode.RESTART, sustained_s=0.0, restarts=1)
    _, actions = decide(policy, EnforcementState(), hangs, NODES, 1.0, 5.0)
    assert [action.ranks for action in actions if action.ranks] == [(3,)]


def test_verdict_that_flickers_within_the_hysteresis_alerts_once() -> None:
    readings = [(float(now), [verdict()] if now % 20 < 10 else []) for now in range(200)]
    assert [kind for _, kind in kinds(replace(POLICY, mode=Mode.ALERT), readings)] == [
        ActionKind.ALERT
    ]


def test_single_appearance_of_a_verdict_causes_no_action() -> None:
    assert kinds(POLICY, [(0.0, [verdict()]), (1.0, []), (2.0, []), (70.0, [verdict()])]) == []


def test_each_mode_is_limited_to_its_actions() -> None:
    hang = verdict(
        syndrome=Syndrome.NON_COMMUNICATION_HANG, cost_s=math.inf, advice=Advice.RESTART_WORKER
    )
    error = verdict(syndrome=Syndrome.DEVICE_ERROR, cost_s=0.0)
    readings = [(float(now), [hang, error]) for now in range(5)]
    done = {
        mode: {kind for _, kind in kinds(EnforcementPolicy(mode=mode), readings)} for mode in Mode
    }
    assert done[Mode.OBSERVE] == set()
    assert done[Mode.ALERT] == {ActionKind.ALERT}
    assert done[Mode.RESTART] == {ActionKind.ALERT, ActionKind.RESTART_WORKER}
    assert done[Mode.REPLACE] == {ActionKind.RESTART_WORKER, ActionKind.REPLACE_NODE}


def test_verdict_of_low_confidence_only_alerts() -> None:
    doubtful = verdict(cost_s=math.inf, confidence=0.5)
    assert {
        kind for _, kind in kinds(POLICY, [(float(now), [doubtful]) for now in range(100)])
    } == {ActionKind.ALERT}


@pytest.mark.parametrize("advice", [Advice.OBSERVE, Advice.ALERT])
def test_people_are_alerted_unless_a_verdict_advises_to_observe(advice: Advice) -> None:
    readings = [(now_s, [verdict(advice=advice)]) for now_s in (0.0, 1.0)]
    expected = [] if advice is Advice.OBSERVE else [(1.0, ActionKind.ALERT)]
    assert kinds(replace(POLICY, alert_cost_s=0.0), readings) == expected


def test_group_link_or_job_is_never_replaced_or_restarted() -> None:
    for kind in ("group", "link", "job"):
        unlocalised = replace(verdict(cost_s=math.inf), subject=Subject(kind, (2, 3)))
        assert {
            kind for _, kind in kinds(POLICY, [(float(now), [unlocalised]) for now in range(100)])
        } == {ActionKind.ALERT}


def test_denied_replacement_becomes_an_alert_with_the_reason() -> None:
    state, reasons = EnforcementState(), []
    bad = [verdict(rank, cost_s=math.inf) for rank in range(0, 10, 2)]
    for now in range(4):
        state, actions = decide(POLICY, state, bad, NODES, 1.0, float(now))
        reasons += [(action.kind, action.reason) for action in actions]
    assert Counter(kind for kind, _ in reasons) == {ActionKind.REPLACE_NODE: 2, ActionKind.ALERT: 3}
    assert all("budget is 2" in reason for kind, reason in reasons if kind is ActionKind.ALERT)


def test_verdict_that_was_gone_for_long_is_forgotten() -> None:
    state, _ = decide(POLICY, EnforcementState(), [verdict()], NODES, 1.0, 0.0)
    state, _ = decide(POLICY, state, [], NODES, 1.0, 60.0)
    assert state.cases
    state, _ = decide(POLICY, state, [], NODES, 1.0, 61.0)
    assert not state.cases


def hang_of(rank: int) -> Verdict:
    return verdict(rank, Syndrome.NON_COMMUNICATION_HANG, math.inf, Advice.RESTART_WORKER)


def test_the_default_budget_is_ten_restarts_an_hour_to_the_second() -> None:
    policy = EnforcementPolicy(mode=Mode.RESTART, sustained_s=0.0)
    hangs = [hang_of(rank) for rank in range(10)]
    state, actions = decide(policy, EnforcementState(), hangs, NODES, 1.0, 5.0)
    assert [action.kind for action in actions] == [ActionKind.RESTART_WORKER] * 10
    state, (denied,) = decide(policy, state, [hang_of(10)], NODES, 1.0, 3604.9)
    assert denied.reason == ("not done: 10 workers were restarted within 3600 s, the budget is 10")
    _, (done,) = decide(policy, state, [hang_of(10)], NODES, 1.0, 3605.0)
    assert (done.kind, done.ranks) == (ActionKind.RESTART_WORKER, (10,))


def test_replacements_are_forgotten_after_the_window_to_the_second() -> None:
    policy = EnforcementPolicy(mode=Mode.REPLACE, sustained_s=0.0, replacements=1, window_s=100.0)
    first, second = verdict(0, cost_s=math.inf), verdict(2, cost_s=math.inf)
    state, (action,) = decide(policy, EnforcementState(), [first], NODES, 1.0, 0.0)
    assert action.nodes == ("n0",)
    state, (denied,) = decide(policy, state, [second], NODES, 1.0, 99.0)
    assert denied.reason == "not done: 1 nodes were replaced within 100 s, the budget is 1"
    _, (action,) = decide(policy, state, [second], NODES, 1.0, 100.0)
    assert action.nodes == ("n1",)


def test_a_node_is_not_replaced_a_second_time_within_the_window_but_another_one_is() -> None:
    policy = replace(POLICY, sustained_s=0.0)
    state, (first,) = decide(
        policy, EnforcementState(), [verdict(4, cost_s=math.inf)], NODES, 1.0, 0.0
    )
    assert first.nodes == ("n2",)
    # The verdict was gone for so long that it is forgotten.
    state, _ = decide(policy, state, [], NODES, 1.0, 100.0)
    state, (denied,) = decide(policy, state, [verdict(5, cost_s=math.inf)], NODES, 1.0, 200.0)
    assert denied.kind is ActionKind.ALERT
    assert "was replaced already" in denied.reason
    for rank, node in ((2, "n1"), (6, "n3")):
        _, actions = decide(policy, state, [verdict(rank, cost_s=math.inf)], NODES, 1.0, 200.0)
        assert [action.nodes for action in actions] == [(node,)]


@pytest.mark.parametrize(("nodes", "allowed"), [(1, 1), (20, 1), (39, 1), (40, 2), (100, 2)])
def test_the_default_share_of_a_fleet_is_a_twentieth_and_one_node_at_least(
    nodes: int, allowed: int
) -> None:
    assert max_replacements(POLICY, {rank: f"n{rank}" for rank in range(nodes)}) == allowed


def test_verdict_of_just_enough_confidence_is_acted_upon() -> None:
    policy = replace(POLICY, sustained_s=0.0)
    just_enough = verdict(cost_s=math.inf, confidence=0.7)
    _, (action,) = decide(policy, EnforcementState(), [just_enough], NODES, 1.0, 0.0)
    assert action.kind is ActionKind.REPLACE_NODE


def test_alert_on_a_verdict_that_still_holds_is_repeated_every_hour() -> None:
    policy = EnforcementPolicy(sustained_s=0.0, alert_cost_s=0.0)
    readings = [(float(now), [verdict()]) for now in range(0, 7201, 30)]
    alert = ActionKind.ALERT
    assert kinds(policy, readings) == [(0.0, alert), (3600.0, alert), (7200.0, alert)]


def test_a_clock_that_goes_back_is_taken_to_stand_still() -> None:
    policy = replace(POLICY, alert_cost_s=0.0)
    state, _ = decide(policy, EnforcementState(), [verdict()], NODES, 1.0, 100.0)
    state, actions = decide(policy, state, [verdict()], NODES, 1.0, 50.0)
    assert (state.now_s, actions) == (100.0, ())
    _, actions = decide(policy, state, [verdict()], NODES, 1.0, 101.0)
    assert [action.kind for action in actions] == [ActionKind.ALERT]


@pytest.mark.parametrize(
    ("cost_s", "step_s", "lost_s"),
    [(0.5, 2.0, 5.0), (3.0, 2.0, 20.0), (0.5, 0.0, 0.0), (-1.0, 2.0, 0.0), (0.5, 0.5, 20.0)],
)
def test_a_job_loses_its_share_of_a_step_and_never_more_than_all_of_it(
    cost_s: float, step_s: float, lost_s: float
) -> None:
    state = EnforcementState()
    for now_s in (0.0, 20.0):
        state, _ = decide(POLICY, state, [verdict(cost_s=cost_s)], NODES, step_s, now_s)
    (case,) = state.cases.values()
    assert case.lost_s == lost_s


def test_rank_whose_node_is_unknown_is_not_replaced() -> None:
    lost = replace(verdict(cost_s=math.inf), subject=Subject("rank", (99,)))
    policy = replace(POLICY, sustained_s=0.0)
    _, (action,) = decide(policy, EnforcementState(), [lost], NODES, 1.0, 0.0)
    assert (action.kind, action.nodes) == (ActionKind.ALERT, ())


STANDSTILL_S = 60.0


@pytest.mark.parametrize(
    ("subject", "ranks"),
    [
        (Subject("rank", (3,), "n1"), (3,)),
        (Subject("group", (2, 5, 7)), (2,)),
        (Subject("link", (4, 1)), (4,)),
        (Subject("job", ()), (0,)),
    ],
)
@pytest.mark.parametrize("advice", [Advice.OBSERVE, Advice.ALERT])
def test_standstill_past_the_limit_is_ended_by_the_restart_of_one_rank_whatever_is_advised(
    subject: Subject, ranks: tuple[int, ...], advice: Advice
) -> None:
    """Ranks in different collectives, and one whose loader hangs, were named and left alone."""
    policy = EnforcementPolicy(Mode.RESTART, standstill_s=STANDSTILL_S)
    stall = replace(
        verdict(syndrome=Syndrome.MISMATCH, cost_s=math.inf, advice=advice, confidence=0.3),
        subject=subject,
    )
    state, restarts = EnforcementState(), list[tuple[float, tuple[int, ...]]]()
    for second in range(200):
        state, actions = decide(policy, state, [stall], NODES, 1.0, float(second))
        restarts += [(float(second), action.ranks) for action in actions if action.ranks]
    # The agents, which take all stacks first, come before.
    first_s = STANDSTILL_S + 30.0
    assert restarts == [(first_s, ranks), (first_s + policy.replace_cost_s, ranks)]


@pytest.mark.parametrize(
    ("mode", "limit_s", "cost_s"),
    [
        (Mode.ALERT, STANDSTILL_S, math.inf),
        (Mode.RESTART, 0.0, math.inf),
        (Mode.RESTART, STANDSTILL_S, 5.0),
    ],
)
def test_limit_of_standstills_restarts_nothing_where_it_does_not_hold(
    mode: Mode, limit_s: float, cost_s: float
) -> None:
    policy = EnforcementPolicy(mode, standstill_s=limit_s)
    stall = verdict(syndrome=Syndrome.DATA_STALL, cost_s=cost_s, advice=Advice.ALERT)
    done = kinds(policy, [(float(now), [stall]) for now in range(300)])
    assert {kind for _, kind in done} == {ActionKind.ALERT}


VERDICTS = st.builds(
    Verdict,
    subject=st.one_of(
        st.integers(0, 79).map(lambda rank: Subject("rank", (rank,), NODES[rank])),
        st.integers(0, 39).map(lambda node: Subject("node", (2 * node, 2 * node + 1), f"n{node}")),
        st.just(Subject("job", ())),
    ),
    syndrome=st.sampled_from(Syndrome),
    since_s=st.just(0.0),
    evidence=st.just(("evidence",)),
    confidence=st.floats(0, 1),
    cost_s_per_step=st.one_of(st.floats(0, 10), st.just(math.inf)),
    advice=st.sampled_from(Advice),
)


@given(
    readings=st.lists(st.tuples(st.floats(0, 900), st.lists(VERDICTS, max_size=12)), max_size=30),
    replacements=st.integers(0, 5),
    restarts=st.integers(0, 5),
    share=st.floats(0, 0.2),
    standstill_s=st.sampled_from([0.0, 60.0]),
)
def test_actions_never_exceed_the_budget(
    readings: list[tuple[float, list[Verdict]]],
    replacements: int,
    restarts: int,
    share: float,
    standstill_s: float,
) -> None:
    policy = EnforcementPolicy(
        mode=Mode.REPLACE,
        sustained_s=0.0,
        replacements=replacements,
        restarts=restarts,
        fleet_share=share,
        standstill_s=standstill_s,
    )
    state, now_s = EnforcementState(), 0.0
    replaced: list[tuple[float, str]] = []
    restarted: list[float] = []
    for after_s, verdicts in readings:
        now_s += after_s
        state, actions = decide(policy, state, verdicts, NODES, 1.0, now_s)
        replaced += [(now_s, node) for action in actions for node in action.nodes]
        restarted += [now_s for action in actions for _ in action.ranks]
        within = [node for at_s, node in replaced if now_s - at_s < policy.window_s]
        assert (
            len(within)
            <= min(replacements, max(1, int(share * 40)))
            == max_replacements(policy, NODES)
        )
        assert len(within) == len(set(within))
        assert sum(now_s - at_s < policy.window_s for at_s in restarted) <= restarts


@given(verdicts=st.lists(VERDICTS, max_size=12))
def test_observing_policy_does_nothing(verdicts: list[Verdict]) -> None:
    assert (
        kinds(EnforcementPolicy(mode=Mode.OBSERVE), [(float(now), verdicts) for now in range(5)])
        == []
    )
