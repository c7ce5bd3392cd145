"""Tests verdicts: their JSON, and their text for people."""

import json
import math

from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict


def test_verdict_round_trips_through_json_with_its_infinite_cost() -> None:
    verdict = Verdict(
        subject=Subject("link", (3, 1), "a"),
        syndrome=Syndrome.COMMUNICATION_HANG,
        since_s=12.5,
        evidence=("no progress for 4 s",),
        confidence=0.9,
        cost_s_per_step=math.inf,
        advice=Advice.ALERT,
    )
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict


def test_subject_has_a_readable_text() -> None:
    assert str(Subject("link", (3, 1))) == "link 3 -> 1"
    assert str(Subject("node", (2, 3), "b")) == "node b (ranks 2, 3)"
    assert str(Subject("rank", (2,), "b")) == "rank 2 on b"
