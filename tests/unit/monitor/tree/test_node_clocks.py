"""What the root takes the nodes' clocks to be, and the form in which it tells them."""

import math

import pytest

from keepstep.monitor.errors import ProtocolViolation
from keepstep.monitor.telemetry.clocks import DRIFT
from keepstep.monitor.tree.node_clocks import (
    RESTARTED_S,
    NodeClock,
    NodeClocks,
    decode_clocks,
    encode_clocks,
    pause_s,
)

BEHIND_S = {"a": 100.4, "b": -2000.0}
HERE = NodeClock(0.0, 0.0)
ROUGH = {"root": HERE, "a": NodeClock(100.4, math.inf), "b": NodeClock(-2000.0, math.inf)}


def clocks(told: dict[str, NodeClock] | None = None, at_s: float = 50.0) -> NodeClocks:
    known = NodeClocks("root")
    for node, delay_s in BEHIND_S.items():
        known.record_delay(node, delay_s)
    if told is not None:
        known.update(told, at_s)
    return known


def test_until_clocks_are_measured_how_late_news_come_is_all_that_is_known() -> None:
    assert NodeClocks("root").resolve("root", {}, 50.0) == {}
    known = clocks()
    assert known.resolve("root", {}, 50.0) == ROUGH
    # Prompter news tell better, later ones no worse.
    known.record_delay("a", 100.1)
    known.record_delay("a", 103.0)
    assert known.resolve("root", {}, 50.0)["a"] == NodeClock(100.1, math.inf)


def test_measurements_that_find_nothing_do_not_undo_earlier_ones() -> None:
    told = {"root": HERE, "a": NodeClock(100.0, 0.001), "b": NodeClock(-2000.5, 0.002)}
    assert clocks(told).resolve("root", {"root": HERE}, 50.0) == told
    measured = {"root": HERE, "b": NodeClock(-2000.2, 0.0005)}
    assert clocks(told).resolve("root", measured, 50.0) == {**told, "b": NodeClock(-2000.2, 0.0005)}


def test_what_was_measured_is_less_sure_with_time() -> None:
    aged = clocks(
        {"root": HERE, "a": NodeClock(100.0, 0.001), "b": NodeClock(-2000.5, 0.002)}
    ).resolve("root", {}, 60.0)
    assert aged["a"] == NodeClock(100.0, pytest.approx(0.001 + 10 * DRIFT))


def test_clock_of_a_machine_that_was_started_anew_is_forgotten() -> None:
    told = {"a": NodeClock(100.0 + RESTARTED_S + 1, 0.001), "b": NodeClock(-2000.5, 0.002)}
    assert clocks(told).resolve("root", {}, 50.0)["a"] == ROUGH["a"]
    known = clocks()
    known.record_delay("a", 4000.0)
    assert known.resolve("root", {}, 50.0)["a"] == NodeClock(4000.0, math.inf)


def test_where_the_root_runs_no_ranks_its_clock_is_the_jobs_all_the_same() -> None:
    measured = {"a": HERE, "b": NodeClock(-2100.25, 0.001)}
    known = clocks()
    first = known.resolve("a", measured, 50.0)
    assert first == {"root": HERE, "a": NodeClock(100.4, 0.0), "b": NodeClock(-1999.85, 0.001)}
    # Prompter news do not move what was measured against each other.
    known.update(first, 50.0)
    known.record_delay("a", 100.1)
    assert known.resolve("a", measured, 50.0) == first


def test_what_was_measured_against_a_node_that_has_left_meanwhile_is_nothing() -> None:
    known = clocks()
    known.keep_only({"b"})
    assert known.resolve("a", {"a": HERE, "b": NodeClock(-2100.25, 0.001)}, 50.0) == {
        "root": HERE,
        "b": ROUGH["b"],
    }


def test_nodes_that_are_gone_are_forgotten() -> None:
    known = clocks()
    known.keep_only({"b"})
    assert set(known.resolve("root", {}, 50.0)) == {"root", "b"}


def test_clocks_are_measured_less_often_where_that_takes_long_and_sooner_where_some_are_not_known() -> (
    None
):
    assert pause_s(10.0, 0.02, is_complete=True) == 10.0
    assert pause_s(10.0, 0.02, is_complete=False) == 2.0
    assert pause_s(10.0, 0.3, is_complete=False) == pytest.approx(30.0)
    assert pause_s(10.0, 5.0, is_complete=True) == 60.0


def test_clocks_survive_being_told() -> None:
    told = {"a": NodeClock(1.5, 0.25), "b": NodeClock(-3.0, math.inf)}
    assert decode_clocks(encode_clocks(told)) == told


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"a": [1]}',
        b'{"a": [null, 1]}',
        b'{"a": [1, -1]}',
        b'{"a": [1, NaN]}',
        b'{"a": [1, "x"]}',
    ],
)
def test_what_is_no_clock_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode_clocks(data)
