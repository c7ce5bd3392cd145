"""Connects a daemon to the job's runtime: reads its status, publishes verdicts, enforces policy.

The runtime is the job's coordinator, through the protocols of `keepstep.monitor.contracts`. It may
be unreachable, or end with the job; meanwhile people are alerted, and nothing else is done. It only
receives verdicts and actions of the generation that it reports itself.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import TypeVar

from keepstep.monitor.contracts import JobStatus
from keepstep.monitor.daemon.settings import DaemonComponents
from keepstep.monitor.daemon.threads import BlockingThread
from keepstep.monitor.diagnosis.policy import (
    ActionKind,
    EnforcementAction,
    EnforcementPolicy,
    EnforcementState,
    Mode,
    alert_refused,
    decide,
    record_fallback,
    revert_action,
    within_budget,
)
from keepstep.monitor.diagnosis.subjects import begun_since, with_job_nodes
from keepstep.monitor.errors import RuntimeUnreachable
from keepstep.monitor.verdicts import Verdict
from keepstep.monitor.watch.diagnosis_rounds import DiagnosisRound
from keepstep.monitor.watch.job_events import JobEvent, status_events
from keepstep.monitor.watch.verdict_notes import NoteKind

_LOG = logging.getLogger("keepstep.monitor")
_Result = TypeVar("_Result")
_KEPT_EVENTS = 200
_ENFORCING_MODES = (Mode.RESTART, Mode.REPLACE)


class _RuntimeState(Enum):
    """State of the job's runtime, as far as it is known."""

    ABSENT = auto()
    """There is no such job."""
    UNREACHABLE = auto()
    PRESENT = auto()


class RuntimeLink:
    """The link of one daemon to its job's runtime.

    Args:
        job: the job's name.
        components: the daemon's.
        policy_state: of an earlier daemon.
        blocking: calls the runtime.
        record_action: called with each action and its outcome.
        wall_s: wall clock.
    """

    def __init__(
        self,
        job: str,
        components: DaemonComponents,
        policy_state: EnforcementState,
        blocking: BlockingThread,
        record_action: Callable[[EnforcementAction, str], None],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.job_status: JobStatus | None = None
        """The last status of the job; None if there is no such job, or its runtime failed."""
        self.policy_state = policy_state
        self.events: deque[JobEvent] = deque(maxlen=_KEPT_EVENTS)
        """The newest events of the job since the daemon started, oldest first."""
        self._job = job
        self._components = components
        self._blocking = blocking
        self._record_action = record_action
        self._wall_s = wall_s
        self._state: _RuntimeState | None = None
        # Of the last reported generation: they remain valid while the runtime is unreachable.
        self._node_of_rank: tuple[int, Mapping[int, str]] = (0, {})
        # Of the last reported job: when it began, by the wall clock and by the job's clock.
        self._began: tuple[float, float] = (0.0, math.inf)
        # None at first: verdicts that an earlier daemon published may no longer hold.
        self._published: tuple[int, tuple[Verdict, ...]] | None = None
        self._acknowledged: tuple[Verdict, ...] = ()
        self._seen: JobStatus | None = None

    async def refresh_status(self) -> None:
        """Read the job's status from the runtime, if there is one."""
        source = self._components.job_status_source
        if source is None:
            return
        # In a tuple, because None means that the call failed.
        result = await self._call("job_status", lambda: (source.job_status(),))
        self.job_status = result[0] if result is not None else None
        if result is None:
            return
        self._note_events(result[0])
        if self.job_status is not None:
            generation = self.job_status.generation
            self._log_state(
                _RuntimeState.PRESENT,
                logging.INFO,
                f"its coordinator reports generation {generation}",
            )
            return
        self._node_of_rank = (0, {})
        if self._state is not None:
            self._log_state(
                _RuntimeState.ABSENT,
                logging.INFO,
                "it has ended, and its coordinator with it; waiting for the next",
            )
        elif self._is_enforcing():
            self._log_state(
                _RuntimeState.ABSENT,
                logging.WARNING,
                "no coordinator of it was found here yet, so until there is one, people are "
                "alerted and nothing else is done; --store names a coordinator elsewhere",
            )

    async def handle(self, diagnosis_round: DiagnosisRound) -> bool:
        """Publish the verdicts that hold, and carry out what the policy decides.

        Nothing is done about a muted verdict, and nobody is alerted of an acknowledged one.

        Returns whether the policy decided on any action.
        """
        # When ranks are assigned again, the runtime must not act on the old ones. People are
        # alerted all the same: the job may hang while its coordinator is unreachable, or while the
        # daemon is connected to the coordinator of another job.
        is_current = self._components.job_status_source is None or (
            self.job_status is not None and self.job_status.generation == diagnosis_round.generation
        )
        if is_current:
            shown, _ = self._translate(diagnosis_round.with_remarks(), is_current=is_current)
            await self._publish(shown, diagnosis_round)
        acknowledged = diagnosis_round.noted(NoteKind.ACKNOWLEDGED)
        self._acknowledged, _ = self._translate(acknowledged, is_current=is_current)
        verdicts, nodes = self._translate(diagnosis_round.without_muted(), is_current=is_current)
        policy = self._components.policy
        if policy is None:
            return False
        if not is_current and policy.mode in _ENFORCING_MODES:
            policy = replace(policy, mode=Mode.ALERT)
        elif self.job_status is not None:
            policy = replace(policy, standstill_s=self.job_status.standstill_s)
        return await self._enforce(policy, verdicts, nodes, diagnosis_round)

    async def close(self) -> None:
        """Close the connections to the runtime."""
        components = self._components
        for part in (components.publisher, components.enforcer, components.job_status_source):
            if part is not None:
                await self._call("end", part.close)

    def _translate(
        self, diagnosis_round: DiagnosisRound, *, is_current: bool
    ) -> tuple[tuple[Verdict, ...], Mapping[int, str]]:
        """Return the verdicts of this job with the runtime's names of nodes, and those nodes."""
        verdicts, nodes = diagnosis_round.current, diagnosis_round.nodes
        status = self.job_status
        if status is not None and is_current:
            self._node_of_rank = status.generation, status.places()
            began_s = self._job_began_s(status.began_at_s, diagnosis_round.now_s)
            verdicts = begun_since(began_s, verdicts)
        generation, node_of_rank = self._node_of_rank
        if node_of_rank and generation == diagnosis_round.generation:
            return with_job_nodes(verdicts, node_of_rank), node_of_rank
        return verdicts, nodes

    def _job_began_s(self, began_at_s: float, now_s: float) -> float:
        """Return when the job began by the job's clock, given the wall clock of then.

        Wall clocks are set back at times. The earliest of the results for a job holds: by a later
        one, a fault would seem to be of an earlier run, and nothing would ever be done about it.
        """
        began_s = began_at_s - self._wall_s() + now_s
        known_at_s, known_s = self._began
        if known_at_s == began_at_s:
            began_s = min(began_s, known_s)
        self._began = began_at_s, began_s
        return began_s

    async def _publish(
        self, verdicts: tuple[Verdict, ...], diagnosis_round: DiagnosisRound
    ) -> None:
        """Publish the verdicts, unless they are those published last."""
        publisher = self._components.publisher
        generation, now_s = diagnosis_round.generation, diagnosis_round.now_s
        publication = (generation if verdicts else 0, verdicts)
        if publisher is None or publication == self._published:
            return
        if await self._call("publisher", lambda: publisher.publish(verdicts, generation, now_s)):
            self._published = publication

    async def _enforce(
        self,
        policy: EnforcementPolicy,
        verdicts: Sequence[Verdict],
        nodes: Mapping[int, str],
        diagnosis_round: DiagnosisRound,
    ) -> bool:
        self.policy_state, actions = decide(
            policy,
            self.policy_state,
            verdicts,
            nodes,
            diagnosis_round.step_s,
            diagnosis_round.now_s,
        )
        for action in actions:
            await self._act(action, nodes, diagnosis_round.generation)
        return bool(actions)

    async def _act(
        self, action: EnforcementAction, nodes: Mapping[int, str], generation: int
    ) -> None:
        outcome = "alerted"
        enforcer = self._components.enforcer
        if action.kind is not ActionKind.ALERT:
            assert self._components.policy is not None, "actions are the policy's"
            # Other actions of the same round may have used up the budget.
            action = within_budget(self._components.policy, self.policy_state, action)
            done = (
                await self._call("enforcer", lambda: enforcer.enforce(action, generation))
                if enforcer is not None
                else None
            )
            if done is None:
                # The job is changing, or its coordinator is unreachable. If the verdict still holds
                # afterwards, the action is tried again.
                self.policy_state = revert_action(self.policy_state, action)
                self._alert_refused(action)
                return
            outcome = "requested"
            if done is not action.kind:
                self.policy_state, action = record_fallback(self.policy_state, action, nodes)
        self._report(action, outcome)

    def _report(self, action: EnforcementAction, outcome: str) -> None:
        """Log and record what was done; an alert only if nobody has acknowledged its verdict."""
        if action.kind is ActionKind.ALERT and action.verdict in self._acknowledged:
            return
        _LOG.warning("%s; %s", action, outcome)
        what = f"{action.kind}: {action.subject}, {action.verdict.syndrome}"
        self.events.append(JobEvent(self._wall_s(), what, outcome))
        self._record_action(action, outcome)

    def _alert_refused(self, action: EnforcementAction) -> None:
        assert self._components.policy is not None, "actions are the policy's"
        self.policy_state, alert = alert_refused(self._components.policy, self.policy_state, action)
        if alert is not None:
            self._report(alert, "alerted")

    def _note_events(self, status: JobStatus | None) -> None:
        if status is None:
            return
        if self._seen is not None and self._seen.began_at_s != status.began_at_s:
            self._seen = None
            self.events.clear()
        self.events.extend(status_events(self._seen, status, self._wall_s()))
        self._seen = status

    def _is_enforcing(self) -> bool:
        policy = self._components.policy
        return policy is not None and policy.mode in _ENFORCING_MODES

    async def _call(self, component: str, call: Callable[[], _Result]) -> _Result | None:
        """Return a call's result; None if it failed or the runtime is unreachable."""
        try:
            return await self._blocking.call(component, call)
        except RuntimeUnreachable as error:
            self._log_state(
                _RuntimeState.UNREACHABLE,
                logging.WARNING,
                f"{error}; until it answers, people are alerted and nothing else is done",
            )
            return None

    def _log_state(self, state: _RuntimeState, level: int, text: str) -> None:
        """Log the state of the runtime if it has changed."""
        if state is not self._state:
            self._state = state
            _LOG.log(level, "job %s: %s", self._job, text)
