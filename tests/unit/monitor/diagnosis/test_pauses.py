"""Tests which pauses are learnt."""

import numpy as np
import pytest

from keepstep.monitor.diagnosis.pauses import PauseKind, kind_of_pause, learn_pauses
from keepstep.monitor.diagnosis.tables import RANK
from keepstep.monitor.records import Phase


def rows(*moved_s: float, read_at_s: float = 100.0, phase: int = -1) -> np.ndarray:
    table = np.zeros(len(moved_s), RANK)
    table["rank"], table["moved_s"] = np.arange(len(moved_s)), moved_s
    table["read_at_s"], table["phase"], table["alive"] = read_at_s, phase, True
    return table


def test_pause_is_learnt_once_the_rank_has_gone_on() -> None:
    before = rows(90.0)
    assert learn_pauses({}, before, (), rows(90.0, read_at_s=101.0)) == {}
    assert learn_pauses({}, before, (), rows(100.5, read_at_s=101.0)) == {PauseKind.STEP: 10.0}


def test_longest_pause_of_each_kind_is_kept() -> None:
    before, after = rows(90.0, 95.0), rows(101.0, 101.0, read_at_s=102.0)
    past = {PauseKind.STEP: 7.0, PauseKind.DATA: 30.0}
    assert learn_pauses(past, before, (), after) == {PauseKind.STEP: 10.0, PauseKind.DATA: 30.0}
    assert learn_pauses({PauseKind.STEP: 70.0}, before, (), after) == {PauseKind.STEP: 70.0}


def test_waiting_for_others_is_no_pause() -> None:
    before, after = rows(40.0, 95.0), rows(101.0, 101.0, read_at_s=102.0)
    assert learn_pauses({}, before, {0}, after) == {PauseKind.STEP: 5.0}


@pytest.mark.parametrize(
    ("phase", "marks_steps", "in_step", "kind"),
    [
        (-1, False, False, PauseKind.STEP),
        (-1, True, True, PauseKind.STEP),
        (-1, True, False, PauseKind.BETWEEN_STEPS),
        (Phase.FORWARD, True, True, PauseKind.STEP),
        (Phase.CHECKPOINT, True, False, PauseKind.CHECKPOINT),
        (Phase.DATA_WAIT, True, False, PauseKind.DATA),
        (Phase.EVALUATION, False, False, PauseKind.EVALUATION),
    ],
)
def test_kinds_of_pauses(phase: int, marks_steps: bool, in_step: bool, kind: PauseKind) -> None:
    before = rows(90.0, phase=phase)
    before["marks_steps"], before["in_step"] = marks_steps, in_step
    assert kind_of_pause(before[0], is_in_step=in_step) is kind
    assert learn_pauses({}, before, (), rows(101.0)) == {kind: 10.0}
