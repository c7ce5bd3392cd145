"""Claims about the offsets of nodes' clocks at the root, and their encoding."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.monitor.errors import ProtocolViolation
from keepstep.monitor.telemetry.clocks import DRIFT, ClockOffset
from keepstep.monitor.tree.node_clocks import (
    RESTARTED_S,
    NodeClocks,
    decode_clocks,
    encode_clocks,
    pause_s,
)

BEHIND_S = {"a": 100.4, "b": -2000.0}
HERE = ClockOffset(0.0, 0.0)
ROUGH = {"root": HERE, "a": ClockOffset(100.4, math.inf), "b": ClockOffset(-2000.0, math.inf)}


def clocks(offsets: dict[str, ClockOffset] | None = None, at_s: float = 50.0) -> NodeClocks:
    known = NodeClocks("root")
    for node, delay_s in BEHIND_S.items():
        known.record_delay(node, delay_s)
    if offsets is not None:
        known.update(offsets, at_s)
    return known


def test_offset_is_the_least_delay_of_reports_until_clocks_are_measured() -> None:
    assert NodeClocks("root").resolve("root", {}, 50.0) == {}
    known = clocks()
    assert known.resolve("root", {}, 50.0) == ROUGH
    # A smaller delay improves the offset, a greater one does not change it.
    known.record_delay("a", 100.1)
    known.record_delay("a", 103.0)
    assert known.resolve("root", {}, 50.0)["a"] == ClockOffset(100.1, math.inf)


def test_measurement_without_result_keeps_the_previous_one() -> None:
    known = {"root": HERE, "a": ClockOffset(100.0, 0.001), "b": ClockOffset(-2000.5, 0.002)}
    assert clocks(known).resolve("root", {"root": HERE}, 50.0) == known
    measured = {"root": HERE, "b": ClockOffset(-2000.2, 0.0005)}
    assert clocks(known).resolve("root", measured, 50.0) == {
        **known,
        "b": ClockOffset(-2000.2, 0.0005),
    }


def test_error_of_a_measurement_grows_with_time() -> None:
    aged = clocks(
        {"root": HERE, "a": ClockOffset(100.0, 0.001), "b": ClockOffset(-2000.5, 0.002)}
    ).resolve("root", {}, 60.0)
    assert aged["a"] == ClockOffset(100.0, pytest.approx(0.001 + 10 * DRIFT))


def test_offset_of_a_rebooted_machine_is_dropped() -> None:
    before = {"a": ClockOffset(100.0 + RESTARTED_S + 1, 0.001), "b": ClockOffset(-2000.5, 0.002)}
    assert clocks(before).resolve("root", {}, 50.0)["a"] == ROUGH["a"]
    known = clocks()
    known.record_delay("a", 4000.0)
    assert known.resolve("root", {}, 50.0)["a"] == ClockOffset(4000.0, math.inf)


def test_clock_of_a_root_without_ranks_is_the_jobs() -> None:
    measured = {"a": HERE, "b": ClockOffset(-2100.25, 0.001)}
    known = clocks()
    first = known.resolve("a", measured, 50.0)
    assert first == {"root": HERE, "a": ClockOffset(100.4, 0.0), "b": ClockOffset(-1999.85, 0.001)}
    # A smaller delay does not change measured offsets.
    known.update(first, 50.0)
    known.record_delay("a", 100.1)
    assert known.resolve("a", measured, 50.0) == first


def test_measurement_with_a_reference_that_has_left_is_ignored() -> None:
    known = clocks()
    known.keep_only({"b"})
    assert known.resolve("a", {"a": HERE, "b": ClockOffset(-2100.25, 0.001)}, 50.0) == {
        "root": HERE,
        "b": ROUGH["b"],
    }


def test_nodes_that_have_left_are_dropped() -> None:
    known = clocks()
    known.keep_only({"b"})
    assert set(known.resolve("root", {}, 50.0)) == {"root", "b"}


def test_pause_is_longer_if_measuring_takes_long_and_shorter_if_incomplete() -> None:
    assert pause_s(10.0, 0.02, is_complete=True) == 10.0
    assert pause_s(10.0, 0.02, is_complete=False) == 2.0
    assert pause_s(10.0, 0.3, is_complete=False) == pytest.approx(30.0)
    assert pause_s(10.0, 5.0, is_complete=True) == 60.0


def test_offsets_survive_encoding() -> None:
    offsets = {"a": ClockOffset(1.5, 0.25), "b": ClockOffset(-3.0, math.inf)}
    assert decode_clocks(encode_clocks(offsets)) == offsets


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
def test_invalid_offsets_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode_clocks(data)


JSON = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.binary(max_size=50) | JSON.map(lambda value: json.dumps(value).encode()))
def test_arbitrary_bytes_are_clock_offsets_or_refused(data: bytes) -> None:
    try:
        decoded = decode_clocks(data)
    except ProtocolViolation:
        return
    assert all(math.isfinite(clock.offset_s) and clock.error_s >= 0 for clock in decoded.values())


@pytest.mark.parametrize(
    "data",
    [b"[" * 100_000, b'{"n": [1' + 400 * b"0" + b", 0]}", b'{"n": [0, "x"]}', b'{"n": [0, -1]}'],
)
def test_numbers_and_depths_beyond_all_bounds_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode_clocks(data)


def test_clock_offsets_survive() -> None:
    offsets = {"a": ClockOffset(-1.5, 0.25), "b": ClockOffset(2.0, math.inf)}
    assert decode_clocks(encode_clocks(offsets)) == offsets
