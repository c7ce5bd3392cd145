"""Claims about the state of a daemon after a restart."""

from pathlib import Path

import pytest

from keepstep.monitor.diagnosis.policy import EnforcementPolicy, EnforcementState, Restart, decide
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict
from keepstep.monitor.watch.state_file import SavedState, load_state, save_state

SPENT = EnforcementState(
    replaced=((90.0, "b"),),
    restarted=(Restart(70.0, 3, "b", Syndrome.DATA_STALL), Restart(95.0, 4, "c")),
    now_s=100.0,
)


def test_spent_budget_keeps_its_age_over_a_reboot(
    tmp_path: Path,
) -> None:
    path = tmp_path / "deep" / "state.json"
    save_state(path, SavedState(policy=SPENT), 100.0, 5000.0)
    # A reboot and 50 s later.
    loaded = load_state(path, 10.0, 5050.0)
    assert loaded.policy.replaced == ((-50.0, "b"),)
    assert loaded.policy.restarted == (
        Restart(-70.0, 3, "b", Syndrome.DATA_STALL),
        Restart(-45.0, 4, "c"),
    )
    assert loaded.log.entries == ()
    assert [file.name for file in path.parent.iterdir()] == ["state.json"]


def test_verdict_that_still_holds_after_a_restart_is_not_alerted_at_once(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    verdict = Verdict(
        Subject("rank", (3,), "b"), Syndrome.DATA_STALL, 90.0, ("waits",), 0.9, 0.1, Advice.ALERT
    )
    policy = EnforcementPolicy(alert_cost_s=0.0)
    state, _ = decide(policy, EnforcementState(), [verdict], {3: "b"}, 1.0, 100.0)
    state, actions = decide(policy, state, [verdict], {3: "b"}, 1.0, 101.0)
    assert len(actions) == 1
    save_state(path, SavedState(policy=state), 101.0, 5001.0)
    # A reboot and half an hour later.
    state = load_state(path, 10.0, 6801.0).policy
    alerted_s = []
    for now_s in range(10, 3600, 10):
        state, actions = decide(policy, state, [verdict], {3: "b"}, 1.0, float(now_s))
        alerted_s += [now_s for _ in actions]
    assert alerted_s == [1810]


def test_wall_clock_that_was_set_back_gives_no_time_in_the_future(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    save_state(path, SavedState(policy=SPENT), 100.0, 5000.0)
    assert load_state(path, 110.0, 4000.0).policy.replaced == ((110.0, "b"),)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"entries": [], "opened": {}, "spent": {"replaced": [[1]]}}',
        '{"entries": [], "opened": [], "spent": {"replaced": [], "restarted": []}, "alerted": []}',
    ],
)
def test_invalid_file_gives_an_empty_state_and_a_warning(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    assert load_state(path, 1.0, 2.0) == SavedState()
    assert "cannot be used" in caplog.text
    assert load_state(tmp_path / "none", 1.0, 2.0) == load_state(None, 1.0, 2.0) == SavedState()
