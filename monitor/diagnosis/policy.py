"""Decides what to do about verdicts: hysteresis, patience that follows cost, and a budget.

These mechanisms weigh the cost of a wrong verdict against that of waiting:

- hysteresis: a verdict must hold for a while before anything is done, and must be gone for a while
  before it is forgotten. One that flickers neither causes an early action nor restarts the wait
  each time;
- ski rental: waiting costs a little every step, acting costs much at once, and the duration of the
  slowdown is not known. Acting when the loss so far equals the action's cost never costs more than
  twice the optimum (Karlin et al., 1988; Greyhound escalates so). A hang loses a second every
  second, so it is acted upon as soon as its verdict is sustained;
- a limit of standstills: whatever a verdict of a hang advises, and however sure it is, a job that
  has stood still for that long is better off restarted: by one rank, for all others follow. The
  agents of `keepstep run` do the same for scripts that tell them of their steps, with all stacks,
  so they come first;
- a budget: a maximum of replacements and restarts per window, and of the share of nodes replaced
  within it, whatever the verdicts. An action that the budget denies becomes an alert. The budget
  recovers with time only.

Pure: (state, verdicts, now) -> (state, actions).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict

_AFTER_AGENTS_S = 30.0
"""Agents that end a standstill themselves take stacks first, for up to 15 s."""
_REFUSED_S = 10.0
"""For how long an action may be refused before people are alerted."""


class Mode(StrEnum):
    """How far a policy may go; each mode includes the ones before."""

    OBSERVE = "observe only"
    ALERT = "alert"
    RESTART = "restart workers"
    REPLACE = "replace nodes"


class ActionKind(StrEnum):
    """The kind of an action."""

    ALERT = "alert"
    RESTART_WORKER = "restart worker"
    REPLACE_NODE = "replace node"


@dataclass(frozen=True, slots=True)
class EnforcementAction:
    """Something to do, once.

    Args:
        kind: what to do.
        subject: to whom.
        verdict: because of which verdict.
        reason: for people: what was lost so far, or why nothing more is done.
        nodes: nodes to replace; empty unless `kind` is REPLACE_NODE.
        ranks: ranks whose workers to restart; empty unless `kind` is RESTART_WORKER.
        fallback_ranks: ranks whose workers to restart if the job cannot do without `nodes`; empty
            unless these hang, and the budget allows their restart.
    """

    kind: ActionKind
    subject: Subject
    verdict: Verdict
    reason: str
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    fallback_ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        evidence = "; ".join(self.verdict.evidence)
        return f"{self.kind}: {self.subject}, {self.verdict.syndrome} ({self.reason}): {evidence}"


@dataclass(frozen=True, slots=True)
class EnforcementPolicy:
    """The rules.

    Args:
        mode: how far to go; observe first, act once the verdicts have proved right.
        sustained_s: how long a verdict must hold before anything is done: two readings of a hang
            already lasting 3 s.
        forgotten_s: how long it must be gone to be forgotten: a slow rank's verdict flickers with
            the window of ten steps.
        alert_again_s: after this long, an alert on a verdict that still holds is repeated: people
            overlook alerts.
        alert_cost_s: a slowdown that has cost the job less is no alert: pages show it.
        restart_cost_s: what a restart of a worker costs the job; keepstep's measured gap is 1 s,
            other launchers take a minute.
        replace_cost_s: what a replacement costs: a spare's start-up, a new generation, state to
            load.
        least_confidence: verdicts below cause alerts only.
        replacements: maximum number of nodes replaced within `window_s`.
        restarts: maximum number of workers restarted within `window_s`.
        fleet_share: maximum share of all nodes replaced within `window_s`; at least one is allowed
            if `replacements` is.
        window_s: the budget's window; an hour, in which a person can look.
        standstill_s: how long the job may stand still, as the user has set it; 0.0: for ever.
    """

    mode: Mode = Mode.ALERT
    sustained_s: float = 1.0
    forgotten_s: float = 60.0
    alert_again_s: float = 3600.0
    alert_cost_s: float = 5.0
    restart_cost_s: float = 10.0
    replace_cost_s: float = 60.0
    least_confidence: float = 0.7
    replacements: int = 2
    restarts: int = 10
    fleet_share: float = 0.05
    window_s: float = 3600.0
    standstill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PolicyCase:
    """One subject's syndrome, as long as it is remembered.

    Args:
        verdict: the newest.
        first_s: when it was first reported.
        last_s: when it was last reported.
        lost_s: seconds the job has lost by it since `first_s`, while it held.
        alerted_s: when people were last alerted or an action was decided; -inf if never.
        acted: what was done, if anything.
        alerted_before_s: `alerted_s` before that action: valid again if it is not carried out.
    """

    verdict: Verdict
    first_s: float
    last_s: float
    lost_s: float = 0.0
    alerted_s: float = -math.inf
    acted: ActionKind | None = None
    alerted_before_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class Restart:
    """A worker that was restarted.

    Args:
        at_s: when.
        rank: its rank then; another worker may have it since.
        node: where it ran.
        syndrome: of the verdict; empty if not known.
    """

    at_s: float
    rank: int
    node: str = ""
    syndrome: str = ""


@dataclass(frozen=True, slots=True)
class EnforcementState:
    """State between calls.

    Args:
        cases: by subject and syndrome.
        replaced: when nodes were replaced, within the window, oldest first.
        restarted: when workers were restarted, within the window, oldest first.
        now_s: of the last call.
    """

    cases: Mapping[tuple[Subject, Syndrome], PolicyCase] = field(default_factory=dict)
    replaced: tuple[tuple[float, str], ...] = ()
    restarted: tuple[Restart, ...] = ()
    now_s: float = -math.inf


def decide(
    policy: EnforcementPolicy,
    state: EnforcementState,
    verdicts: Sequence[Verdict],
    nodes: Mapping[int, str],
    step_s: float,
    now_s: float,
) -> tuple[EnforcementState, tuple[EnforcementAction, ...]]:
    """Return what to do about the verdicts that hold now. Pure: equal inputs give equal outputs.

    Args:
        policy: the rules.
        state: as returned by the last call.
        verdicts: all that hold now.
        nodes: each rank's node: the fleet that the budget is relative to.
        step_s: the job's step time, which turns costs per step into costs per second; 0.0 if not
            known.
        now_s: monotonic; an earlier time than before is taken as the same.
    """
    now_s = max(now_s, state.now_s)
    cases = _update_cases(policy, state, verdicts, step_s, now_s)
    state = EnforcementState(
        cases,
        tuple(entry for entry in state.replaced if now_s - entry[0] < policy.window_s),
        tuple(restart for restart in state.restarted if now_s - restart.at_s < policy.window_s),
        now_s,
    )
    actions: list[EnforcementAction] = []
    if policy.mode is Mode.OBSERVE:
        return state, ()
    # The costliest first: the budget goes to the largest loss. Ties are broken by name, so equal
    # inputs give equal outputs.
    standing = [
        key
        for key, case in cases.items()
        if case.last_s == now_s and now_s - case.first_s >= policy.sustained_s
    ]
    for key in sorted(
        standing, key=lambda case_key: (-cases[case_key].lost_s, str(case_key[0]), case_key[1])
    ):
        state, action = _next_action(policy, state, key, nodes)
        if action:
            actions.append(action)
    return state, tuple(actions)


def _update_cases(
    policy: EnforcementPolicy,
    state: EnforcementState,
    verdicts: Sequence[Verdict],
    step_s: float,
    now_s: float,
) -> dict[tuple[Subject, Syndrome], PolicyCase]:
    """Return the cases updated with current verdicts, without those gone for long."""
    cases = {
        key: case for key, case in state.cases.items() if now_s - case.last_s <= policy.forgotten_s
    }
    for verdict in verdicts:
        key = (verdict.subject, verdict.syndrome)
        case = cases.get(key)
        if case is None:
            cases[key] = PolicyCase(verdict, now_s, now_s)
            continue
        # Time during which the verdict was gone does not count as lost; it counts only between two
        # consecutive calls that both have it.
        held_s = now_s - case.last_s if case.last_s == state.now_s else 0.0
        cases[key] = replace(
            case,
            verdict=verdict,
            last_s=now_s,
            lost_s=case.lost_s + held_s * _loss_rate(verdict, step_s),
        )
    return cases


def _loss_rate(verdict: Verdict, step_s: float) -> float:
    """Return the share of time that the job loses by a verdict, 0 to 1."""
    if math.isinf(verdict.cost_s_per_step):
        return 1.0
    return min(1.0, max(0.0, verdict.cost_s_per_step) / step_s) if step_s > 0 else 0.0


def _next_action(
    policy: EnforcementPolicy,
    state: EnforcementState,
    key: tuple[Subject, Syndrome],
    nodes: Mapping[int, str],
) -> tuple[EnforcementState, EnforcementAction | None]:
    """Return the one action about a case that is due now, if any, and the state after it."""
    case = state.cases[key]
    verdict = case.verdict
    wanted = _wanted(policy, state, verdict, nodes)
    # What keeps a worker from being restarted without end is the time between, and the budget.
    is_new = wanted is ActionKind.RESTART_WORKER or case.acted is not wanted
    if wanted is not None and is_new and _is_due(policy, case, wanted):
        target_nodes, target_ranks = _targets(policy, state, wanted, verdict, nodes)
        refusal = _refusal_reason(policy, state, wanted, target_nodes, target_ranks, nodes)
        if not refusal:
            action = EnforcementAction(
                wanted,
                verdict.subject,
                verdict,
                _describe_loss(state, case),
                target_nodes,
                target_ranks,
                _fallback_ranks(policy, state, wanted, verdict),
            )
            return _charge_budget(state, key, action, nodes), action
        return _alert(policy, state, key, f"not done: {refusal}")
    is_slowdown = 0.0 < verdict.cost_s_per_step < math.inf
    if verdict.advice is Advice.OBSERVE or (is_slowdown and case.lost_s < policy.alert_cost_s):
        return state, None
    return _alert(policy, state, key, _describe_loss(state, case))


def _describe_loss(state: EnforcementState, case: PolicyCase) -> str:
    """Return for people what was lost so far.

    By a hang, that is all the time since it began, whether it was noticed or not.
    """
    lost_s = (
        state.now_s - case.verdict.since_s
        if math.isinf(case.verdict.cost_s_per_step)
        else case.lost_s
    )
    return f"{max(lost_s, case.lost_s):.0f} s lost so far"


def _wanted(
    policy: EnforcementPolicy, state: EnforcementState, verdict: Verdict, nodes: Mapping[int, str]
) -> ActionKind | None:
    """Return the action that a verdict calls for, as far as the policy allows.

    None if people are to be alerted at most. A worker that was restarted on a node and has the same
    kind of fault there again, or still, is on a bad node: this escalates to a replacement, or where
    none is allowed to another restart, but not before the last one has had the time to work.
    """
    if _is_past_limit(policy, state, verdict):
        since_s = max((restart.at_s for restart in state.restarted), default=-math.inf)
        return ActionKind.RESTART_WORKER if state.now_s - since_s >= policy.replace_cost_s else None
    if verdict.confidence < policy.least_confidence or verdict.subject.kind not in ("rank", "node"):
        return None
    if verdict.advice is Advice.REPLACE_NODE and policy.mode is Mode.REPLACE:
        if _was_restarted_instead(policy, state, verdict, nodes):
            return None
        return ActionKind.REPLACE_NODE if _subject_nodes(verdict.subject, nodes) else None
    if verdict.advice is Advice.RESTART_WORKER and policy.mode in (Mode.RESTART, Mode.REPLACE):
        # A generation may move a rank: what happened elsewhere says nothing of this node.
        restarted = [
            restart
            for restart in state.restarted
            if restart.rank in verdict.subject.ranks and restart.node == nodes.get(restart.rank, "")
        ]
        if restarted and state.now_s - restarted[-1].at_s < policy.replace_cost_s:
            return None
        if all(restart.syndrome != verdict.syndrome for restart in restarted):
            return ActionKind.RESTART_WORKER
        if policy.mode is Mode.RESTART:
            # Where the job still goes on, a restart that did not help is not worth another.
            is_standstill = math.isinf(verdict.cost_s_per_step)
            return ActionKind.RESTART_WORKER if is_standstill else None
        return ActionKind.REPLACE_NODE if _subject_nodes(verdict.subject, nodes) else None
    return None


def _is_past_limit(policy: EnforcementPolicy, state: EnforcementState, verdict: Verdict) -> bool:
    """Return whether the job stands still for longer than it may, and workers may be restarted."""
    return (
        policy.mode in (Mode.RESTART, Mode.REPLACE)
        and policy.standstill_s > 0.0
        and math.isinf(verdict.cost_s_per_step)
        and state.now_s - verdict.since_s >= policy.standstill_s + _AFTER_AGENTS_S
    )


def _was_restarted_instead(
    policy: EnforcementPolicy, state: EnforcementState, verdict: Verdict, nodes: Mapping[int, str]
) -> bool:
    """Return whether all ranks of a subject were restarted for its fault, and that may still help.

    This is done where the job cannot do without their node.
    """
    recent = {
        restart.rank
        for restart in state.restarted
        if restart.syndrome == verdict.syndrome
        and restart.node == nodes.get(restart.rank, "")
        and state.now_s - restart.at_s < policy.replace_cost_s
    }
    return bool(verdict.subject.ranks) and recent.issuperset(verdict.subject.ranks)


def _is_due(policy: EnforcementPolicy, case: PolicyCase, wanted: ActionKind) -> bool:
    """Return whether the loss so far equals the cost of acting.

    Hangs and errors of a device or of data do not wait.
    """
    cost_s = case.verdict.cost_s_per_step
    if math.isinf(cost_s) or cost_s <= 0.0:
        return True
    return case.lost_s >= (
        policy.replace_cost_s if wanted is ActionKind.REPLACE_NODE else policy.restart_cost_s
    )


def _subject_nodes(subject: Subject, nodes: Mapping[int, str]) -> tuple[str, ...]:
    """Return the nodes of a subject."""
    if subject.kind == "node":
        return (subject.node,)
    return tuple(sorted({nodes[rank] for rank in subject.ranks if nodes.get(rank)}))


def _targets(
    policy: EnforcementPolicy,
    state: EnforcementState,
    wanted: ActionKind,
    verdict: Verdict,
    nodes: Mapping[int, str],
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the nodes to replace, and the ranks to restart."""
    if wanted is ActionKind.REPLACE_NODE:
        return _subject_nodes(verdict.subject, nodes), ()
    if _is_past_limit(policy, state, verdict):
        return (), (verdict.subject.ranks or tuple(sorted(nodes)))[:1]
    return (), verdict.subject.ranks


def _fallback_ranks(
    policy: EnforcementPolicy, state: EnforcementState, wanted: ActionKind, verdict: Verdict
) -> tuple[int, ...]:
    """Return the ranks to restart if the job cannot do without the nodes to replace."""
    ranks = verdict.subject.ranks
    if wanted is not ActionKind.REPLACE_NODE or not math.isinf(verdict.cost_s_per_step):
        return ()
    is_denied = _refusal_reason(policy, state, ActionKind.RESTART_WORKER, (), ranks, {})
    return () if is_denied else ranks


def within_budget(
    policy: EnforcementPolicy, state: EnforcementState, action: EnforcementAction
) -> EnforcementAction:
    """Return an action without a restart instead that the budget does not allow any more."""
    restart, ranks = ActionKind.RESTART_WORKER, action.fallback_ranks
    if not ranks or not _refusal_reason(policy, state, restart, (), ranks, {}):
        return action
    return replace(action, fallback_ranks=())


def _refusal_reason(
    policy: EnforcementPolicy,
    state: EnforcementState,
    wanted: ActionKind,
    target_nodes: Collection[str],
    ranks: Collection[int],
    nodes: Mapping[int, str],
) -> str:
    """Return why the budget denies an action; empty if it does not."""
    if wanted is ActionKind.RESTART_WORKER:
        if len(state.restarted) + len(ranks) > policy.restarts:
            return (
                f"{len(state.restarted)} workers were restarted within {policy.window_s:.0f} s, "
                f"the budget is {policy.restarts}"
            )
        return ""
    if any(node == replaced for _, replaced in state.replaced for node in target_nodes):
        return "the node was replaced already, and a new one of its name has the same fault"
    allowed = max_replacements(policy, nodes)
    if len(state.replaced) + len(target_nodes) > allowed:
        return (
            f"{len(state.replaced)} nodes were replaced within {policy.window_s:.0f} s, "
            f"the budget is {allowed}"
        )
    return ""


def max_replacements(policy: EnforcementPolicy, nodes: Mapping[int, str]) -> int:
    """Return how many nodes of a fleet may be replaced within the window."""
    fleet = len(set(nodes.values()))
    return min(policy.replacements, max(1, math.floor(policy.fleet_share * fleet)))


def _charge_budget(
    state: EnforcementState,
    key: tuple[Subject, Syndrome],
    action: EnforcementAction,
    nodes: Mapping[int, str],
) -> EnforcementState:
    """Return the state with an action recorded as done."""
    restarts = (
        Restart(state.now_s, rank, nodes.get(rank, ""), action.verdict.syndrome)
        for rank in action.ranks
    )
    case = state.cases[key]
    acted_case = replace(
        case, acted=action.kind, alerted_s=state.now_s, alerted_before_s=case.alerted_s
    )
    return replace(
        state,
        cases={**state.cases, key: acted_case},
        replaced=(*state.replaced, *((state.now_s, node) for node in action.nodes)),
        restarted=(*state.restarted, *restarts),
    )


def revert_action(state: EnforcementState, action: EnforcementAction) -> EnforcementState:
    """Return the state without an action of the last `decide` that was not carried out.

    It costs no budget, is due again, and alerted nobody.
    """
    key = (action.subject, action.verdict.syndrome)
    cases = dict(state.cases)
    if key in cases:
        cases[key] = replace(cases[key], acted=None, alerted_s=cases[key].alerted_before_s)
    return replace(
        state,
        cases=cases,
        replaced=tuple(
            entry
            for entry in state.replaced
            if entry not in {(state.now_s, node) for node in action.nodes}
        ),
        restarted=tuple(
            restart
            for restart in state.restarted
            if not (restart.at_s == state.now_s and restart.rank in action.ranks)
        ),
    )


def record_fallback(
    state: EnforcementState, action: EnforcementAction, nodes: Mapping[int, str]
) -> tuple[EnforcementState, EnforcementAction]:
    """Return what was done instead of a replacement of the last `decide`, and the state after it.

    The job could not do without the nodes: none counts as replaced, and the restarts are charged.

    Args:
        state: as returned by `decide`.
        action: the replacement; has `fallback_ranks`.
        nodes: each rank's node.
    """
    restart = EnforcementAction(
        ActionKind.RESTART_WORKER,
        action.subject,
        action.verdict,
        f"{action.reason}; restarted instead of replacing {', '.join(action.nodes)}, "
        "which the job cannot do without",
        ranks=action.fallback_ranks,
    )
    key = (action.subject, action.verdict.syndrome)
    return _charge_budget(revert_action(state, action), key, restart, nodes), restart


def alert_refused(
    policy: EnforcementPolicy, state: EnforcementState, action: EnforcementAction
) -> tuple[EnforcementState, EnforcementAction | None]:
    """Return an alert about an action that `revert_action` has reverted, if it is due.

    A job that changes takes none for a moment.
    """
    key = (action.subject, action.verdict.syndrome)
    case = state.cases.get(key)
    if case is None or state.now_s - case.first_s < policy.sustained_s + _REFUSED_S:
        return state, None
    return _alert(policy, state, key, f"not done: the job does not take it ({action.kind})")


def _alert(
    policy: EnforcementPolicy, state: EnforcementState, key: tuple[Subject, Syndrome], reason: str
) -> tuple[EnforcementState, EnforcementAction | None]:
    """Return an alert about a case, unless people were alerted recently."""
    case = state.cases[key]
    if state.now_s - case.alerted_s < policy.alert_again_s:
        return state, None
    cases = {**state.cases, key: replace(case, alerted_s=state.now_s)}
    action = EnforcementAction(ActionKind.ALERT, case.verdict.subject, case.verdict, reason)
    return replace(state, cases=cases), action
