"""Tests which verdicts a daemon passes on to the job's runtime."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from keepstep.monitor.contracts import JobStatus
from keepstep.monitor.daemon.runtime_link import RuntimeLink
from keepstep.monitor.daemon.settings import DaemonComponents
from keepstep.monitor.daemon.threads import BlockingThread
from keepstep.monitor.diagnosis.policy import (
    ActionKind,
    EnforcementAction,
    EnforcementPolicy,
    EnforcementState,
    Mode,
)
from keepstep.monitor.verdicts import Verdict
from keepstep.monitor.watch.component_faults import ComponentFaults
from keepstep.monitor.watch.diagnosis_rounds import DiagnosisRound
from keepstep.monitor.watch.verdict_log import VerdictChanges
from keepstep.monitor.watch.verdict_notes import NoteKind, VerdictNote
from tests.integration.monitor.parts import Enforcer, FixedJobStatus, Probe, Publisher
from tests.integration.monitor.sample import verdict

NODES = dict.fromkeys(range(8), "node-a")


@dataclass(frozen=True)
class Round:
    """The verdicts that hold in a round, by the job's clock `now_s` and the wall clock."""

    now_s: float
    wall_s: float
    verdicts: tuple[Verdict, ...] = ()
    began_at_s: float = 10_000.0
    notes: tuple[VerdictNote, ...] = ()


def outcome(rounds: Sequence[Round]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the ranks of the verdicts that were published last, and of the enforced actions."""
    current = rounds[0]

    class Status(FixedJobStatus):
        def job_status(self) -> JobStatus:
            return replace(super().job_status(), began_at_s=current.began_at_s)

    publisher, enforcer, faults = Publisher(), Enforcer(), ComponentFaults()
    components = DaemonComponents(
        probe=Probe(),
        publisher=publisher,
        job_status_source=Status(generation=1),
        policy=EnforcementPolicy(Mode.RESTART, sustained_s=1.0),
        enforcer=enforcer,
    )
    blocking = BlockingThread(faults)
    link = RuntimeLink(
        "run7",
        components,
        EnforcementState(),
        blocking,
        lambda _action, _outcome: None,
        wall_s=lambda: current.wall_s,
    )

    async def handle() -> None:
        nonlocal current
        for current in rounds:
            await link.refresh_status()
            await link.handle(
                DiagnosisRound(
                    current.verdicts,
                    current.now_s,
                    VerdictChanges(),
                    1,
                    NODES,
                    notes=current.notes,
                )
            )

    try:
        asyncio.run(handle())
    finally:
        blocking.shutdown()
    assert faults.counts == {}
    published = [verdict.subject.ranks for verdict in publisher.published[-1]]
    return published, [action.ranks for action, _ in enforcer.requested]


def test_hang_is_enforced_though_the_wall_clock_went_back_after_the_job_began() -> None:
    hang = (verdict(3, since_s=290.0),)
    rounds = [
        Round(200.0, 10_100.0),
        Round(300.0, 9_600.0, hang),
        Round(302.0, 9_602.0, hang),
    ]
    assert outcome(rounds) == ([(3,)], [(3,)])


def note(kind: NoteKind) -> VerdictNote:
    hang = verdict(3)
    return VerdictNote(
        kind, 1, hang.subject, hang.syndrome, "ann", "ticket 12", 9_500.0,
        99_000.0 if kind is NoteKind.MUTED else None,
    )  # fmt: skip


def test_muted_hang_is_published_and_not_enforced_until_the_mute_has_ended() -> None:
    hang = (verdict(3, since_s=290.0),)
    muted = (note(NoteKind.MUTED),)
    rounds = [
        Round(200.0, 10_100.0),
        *(Round(300.0 + at, 10_200.0 + at, hang, notes=muted) for at in range(10)),
    ]
    assert outcome(rounds) == ([(3,)], [])
    ended = [Round(310.0, 10_210.0, hang), Round(312.0, 10_212.0, hang)]
    assert outcome([*rounds, *ended]) == ([(3,)], [(3,)])


def test_acknowledged_hang_is_enforced_all_the_same() -> None:
    hang = (verdict(3, since_s=290.0),)
    known = (note(NoteKind.ACKNOWLEDGED),)
    rounds = [
        Round(200.0, 10_100.0),
        *(Round(300.0 + at, 10_200.0 + at, hang, notes=known) for at in range(3)),
    ]
    assert outcome(rounds) == ([(3,)], [(3,)])


@pytest.mark.parametrize(("kind", "alerts"), [(None, 1), *((kind, 0) for kind in NoteKind)])
def test_nobody_is_alerted_of_a_verdict_that_people_have_noted(
    kind: NoteKind | None, alerts: int
) -> None:
    recorded: list[str] = []
    publisher, faults = Publisher(), ComponentFaults()
    components = DaemonComponents(
        probe=Probe(), publisher=publisher, policy=EnforcementPolicy(Mode.ALERT, sustained_s=1.0)
    )
    blocking = BlockingThread(faults)
    link = RuntimeLink(
        "run7", components, EnforcementState(), blocking,
        lambda action, outcome: recorded.append(outcome),
    )  # fmt: skip
    hang = (verdict(3, since_s=290.0),)
    notes = () if kind is None else (note(kind),)

    async def handle() -> None:
        for now_s in (300.0, 302.0):
            await link.handle(DiagnosisRound(hang, now_s, VerdictChanges(), 1, NODES, notes=notes))

    try:
        asyncio.run(handle())
    finally:
        blocking.shutdown()
    assert recorded == ["alerted"] * alerts
    (shown,) = publisher.published[-1]
    assert [f"{kind} by ann" in line for line in shown.evidence] == [False, False, True][
        : 2 + len(notes)
    ]


def test_hang_of_before_the_job_is_not_enforced_though_the_wall_clock_went_back() -> None:
    hang = (verdict(3, since_s=90.0),)
    rounds = [
        Round(200.0, 10_100.0),
        Round(300.0, 9_600.0, hang),
        Round(302.0, 9_602.0, hang),
    ]
    assert outcome(rounds) == ([], [])


def test_hang_of_the_job_before_is_not_enforced_on_the_next() -> None:
    hang = (verdict(3, since_s=290.0),)
    rounds = [
        Round(200.0, 10_100.0),
        Round(400.0, 10_300.0, hang, began_at_s=10_250.0),
        Round(402.0, 10_302.0, hang, began_at_s=10_250.0),
    ]
    assert outcome(rounds) == ([], [])


def test_action_that_the_job_never_takes_is_reported_to_people_once_and_still_tried() -> None:
    """A coordinator that took no writes left a job hanging, and nobody heard of it."""

    class Refusing(Enforcer):
        takes = False

        def enforce(self, action: EnforcementAction, generation: int) -> ActionKind | None:
            done = super().enforce(action, generation)
            return done if self.takes else None

    now_s = 300.0
    enforcer, faults = Refusing(), ComponentFaults()
    components = DaemonComponents(
        probe=Probe(),
        publisher=Publisher(),
        job_status_source=FixedJobStatus(generation=1),
        policy=EnforcementPolicy(Mode.RESTART, sustained_s=1.0),
        enforcer=enforcer,
    )
    blocking = BlockingThread(faults)
    recorded: list[tuple[ActionKind, str]] = []
    link = RuntimeLink(
        "run7",
        components,
        EnforcementState(),
        blocking,
        lambda action, outcome: recorded.append((action.kind, outcome)),
        wall_s=lambda: 20_000.0,
    )

    async def handle(seconds: range) -> None:
        for second in seconds:
            await link.refresh_status()
            hang = (verdict(3, since_s=290.0),)
            await link.handle(DiagnosisRound(hang, now_s + second, VerdictChanges(), 1, NODES))

    try:
        asyncio.run(handle(range(8)))
        assert recorded == []
        asyncio.run(handle(range(8, 40)))
        assert recorded == [(ActionKind.ALERT, "alerted")]
        enforcer.takes = True
        asyncio.run(handle(range(40, 42)))
        assert recorded[1:] == [(ActionKind.RESTART_WORKER, "requested")]
    finally:
        blocking.shutdown()


def test_verdicts_that_the_runtime_did_not_take_are_passed_again_though_unchanged() -> None:
    """The last evidence of a verdict that then stayed the same was never shown by the job."""

    class Sparing(Publisher):
        def publish(self, verdicts: Sequence[Verdict], generation: int, now_s: float) -> bool:
            super().publish(verdicts, generation, now_s)
            return now_s >= 302.0

    publisher, faults = Sparing(), ComponentFaults()
    blocking = BlockingThread(faults)
    link = RuntimeLink(
        "run7",
        DaemonComponents(probe=Probe(), publisher=publisher),
        EnforcementState(),
        blocking,
        lambda _action, _outcome: None,
    )

    async def handle() -> None:
        for now_s in (300.0, 301.0, 302.0, 303.0, 304.0):
            await link.handle(DiagnosisRound((verdict(3),), now_s, VerdictChanges(), 1, NODES))

    try:
        asyncio.run(handle())
    finally:
        blocking.shutdown()
    assert faults.counts == {}
    assert publisher.published == [(verdict(3),)] * 3


def test_restart_instead_of_a_replacement_is_recorded_as_such_and_repeated_after_a_minute() -> None:
    """The second hang on a node that the job needs was restarted, and the third one refused."""

    class CannotReplace(Enforcer):
        def enforce(self, action: EnforcementAction, generation: int) -> ActionKind | None:
            super().enforce(action, generation)
            return ActionKind.RESTART_WORKER

    faults = ComponentFaults()
    components = DaemonComponents(
        probe=Probe(),
        publisher=Publisher(),
        job_status_source=FixedJobStatus(generation=1),
        policy=EnforcementPolicy(Mode.REPLACE, sustained_s=1.0),
        enforcer=CannotReplace(),
    )
    blocking = BlockingThread(faults)
    recorded: list[tuple[ActionKind, tuple[int, ...], str]] = []
    link = RuntimeLink(
        "run7",
        components,
        EnforcementState(),
        blocking,
        lambda action, outcome: recorded.append((action.kind, action.ranks, outcome)),
        wall_s=lambda: 20_000.0,
    )

    async def handle() -> None:
        for second in range(180):
            await link.refresh_status()
            hang = (verdict(3, since_s=290.0),)
            await link.handle(DiagnosisRound(hang, 300.0 + second, VerdictChanges(), 1, NODES))

    try:
        asyncio.run(handle())
    finally:
        blocking.shutdown()
    assert recorded == [(ActionKind.RESTART_WORKER, (3,), "requested")] * 3
    assert link.policy_state.replaced == ()
    assert faults.counts == {}
