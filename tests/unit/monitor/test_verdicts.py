import json
import math

from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict


def test_a_verdict_survives_json_with_its_infinite_cost() -> None:
    verdict = Verdict(
        Subject("link", (3, 1), "a"),
        Syndrome.COMMUNICATION_HANG,
        12.5,
        ("nothing moved for 4 s",),
        0.9,
        math.inf,
        Advice.ALERT,
    )
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict


def test_a_subject_names_itself_for_people() -> None:
    assert str(Subject("link", (3, 1))) == "link 3 -> 1"
    assert str(Subject("node", (2, 3), "b")) == "node b (ranks 2, 3)"
    assert str(Subject("rank", (2,), "b")) == "rank 2 on b"
