"""What the root takes the nodes' clocks to be, and the form in which it tells them."""

import math

import pytest

from monitor.daemon.clocks import RESTARTED_S, Clock, agreed, decode_clocks, encode_clocks
from monitor.errors import ProtocolViolation

BEHIND_S = {"a": 100.4, "b": -2000.0}
ROUGH = {"root": Clock(0.0, 0.0), "a": Clock(100.4, math.inf), "b": Clock(-2000.0, math.inf)}


def test_until_clocks_are_measured_how_late_news_come_is_all_that_is_known() -> None:
    assert agreed("root", "root", {}, {}, BEHIND_S) == ROUGH


def test_measurements_that_find_nothing_do_not_undo_earlier_ones() -> None:
    known = {"root": Clock(0.0, 0.0), "a": Clock(100.0, 0.001), "b": Clock(-2000.5, 0.002)}
    assert agreed("root", "root", {"root": Clock(0.0, 0.0)}, known, BEHIND_S) == known
    measured = {"root": Clock(0.0, 0.0), "b": Clock(-2000.2, 0.0005)}
    assert agreed("root", "root", measured, known, BEHIND_S) == {**known, "b": Clock(-2000.2, 0.0005)}


def test_clock_of_a_machine_that_was_started_anew_is_forgotten() -> None:
    known = {"a": Clock(100.0 + RESTARTED_S + 1, 0.001), "b": Clock(-2000.5, 0.002)}
    assert agreed("root", "root", {}, known, BEHIND_S)["a"] == ROUGH["a"]


def test_where_the_root_runs_no_ranks_its_clock_is_the_jobs_all_the_same() -> None:
    measured = {"a": Clock(0.0, 0.0), "b": Clock(-2100.25, 0.001)}
    first = agreed("root", "a", measured, {}, BEHIND_S)
    assert first == {"root": Clock(0.0, 0.0), "a": Clock(100.4, 0.0), "b": Clock(-1999.85, 0.001)}
    # Prompter news do not move what was measured against each other.
    assert agreed("root", "a", measured, first, {"a": 100.1, "b": -2000.3}) == first


def test_clocks_survive_being_told() -> None:
    clocks = {"a": Clock(1.5, 0.25), "b": Clock(-3.0, math.inf)}
    assert decode_clocks(encode_clocks(clocks)) == clocks


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"a": [1]}', b'{"a": [null, 1]}', b'{"a": [1, -1]}', b'{"a": [1, NaN]}', b'{"a": [1, "x"]}']
)
def test_what_is_no_clock_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode_clocks(data)
