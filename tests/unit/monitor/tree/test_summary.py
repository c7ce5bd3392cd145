"""Claims about decoding summaries: what another daemon sends is a summary, or refused."""

import json
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.monitor.diagnosis.metrics import NodeMetrics
from keepstep.monitor.diagnosis.tables import EMPTY, RANK, Digest
from keepstep.monitor.errors import ProtocolViolation
from keepstep.monitor.node.node_series import metrics_to_json
from keepstep.monitor.records import RECORD, Communicator, Ending, Kind
from keepstep.monitor.telemetry.record_history import RankState
from keepstep.monitor.tree.summary import NodeFacts, Summary, decode, encode

STATE = RankState(
    rank=3,
    node="n0",
    pid=7,
    incarnation="x",
    is_alive=True,
    ending=Ending.NONE,
    read_at_s=10.0,
    progress_at_s=9.0,
)


def records(count: int) -> np.ndarray:
    rows = np.zeros(count, RECORD)
    rows["stamp"], rows["kind"] = 2 * np.arange(count) + 2, Kind.OPERATION
    return rows


def summary(digest: Digest = EMPTY) -> Summary:
    metrics = metrics_to_json(NodeMetrics("n0", 10.0))
    return Summary(
        incarnation="child",
        number=5,
        present=(3,),
        ranks=((STATE, records(2)),),
        communicators=(Communicator(7, "world", (3, 4)),),
        nodes=(NodeFacts("n0", metrics, 1000.0, 10.0, 0.5),),
        digests=(digest,),
        missing={"http://x": "silent"},
    )


def changed(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Return an encoded summary whose header was changed."""
    data = encode(summary())
    magic, length = struct.unpack_from(">4sI", data)
    header = json.loads(data[8 : 8 + length])
    change(header)
    body = json.dumps(header).encode()
    return struct.pack(">4sI", magic, len(body)) + body + data[8 + length :]


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change that puts the last argument at the path of the others."""

    def change(header: dict[str, Any]) -> None:
        place: Any = header
        for key in path[:-2]:
            place = place[key]
        place[path[-2]] = path[-1]

    return change


def test_summary_survives_and_unknown_fields_are_ignored() -> None:
    def add(header: dict[str, Any]) -> None:
        header["new"] = header["ranks"][0]["new"] = header["nodes"][0]["metrics"]["new"] = [1]

    assert decode(encode(summary())).nodes == summary().nodes
    assert decode(changed(add)).ranks[0][0] == STATE


@pytest.mark.parametrize(
    "change",
    [
        put("nodes", 0, "monotonic_s", float("inf")),
        put("nodes", 0, "wall_s", float("nan")),
        put("nodes", 0, "wall_s", 1e300),
        put("nodes", 0, "metrics", "load", "high"),
        put("nodes", 0, "metrics", {"gpus": [7]}),
        put("nodes", 0, "metrics", "gpus", None),
        put("nodes", 0, "node", 7),
        put("ranks", 0, "rank", -1),
        put("ranks", 0, "rank", 2**40),
        put("ranks", 0, "read_at_s", float("-inf")),
        put("ranks", 0, "ending", 99),
        put("ranks", 0, "count", 2**61),
        put("ranks", 0, "count", -1),
        put("ranks", 0, "count", 1.5),
        put("present", [[]]),
        put("number", "5"),
        put("number", 2**80),
        put("missing", [1]),
        put("missing", {"x": {}}),
        put("communicators", [[1, "x"]]),
        put("communicators", [[-1, "x", [0]]]),
        put("communicators", [[1, "x", ["0"]]]),
        put("digests", [[1]]),
        put("digests", [[2**61] * 9]),
        put("version", 99),
        lambda header: header.clear(),
    ],
)
def test_header_that_no_monitor_writes_is_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(ProtocolViolation):
        decode(changed(change))


def test_deep_nesting_is_refused_whatever_field_it_is_in() -> None:
    for field in ("new", "missing", "nodes"):
        body = b'{"version":1,"' + field.encode() + b'":' + b"[" * 200_000
        with pytest.raises(ProtocolViolation):
            decode(struct.pack(">4sI", b"KSM3", len(body)) + body)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rank", -1), ("ending", 77), ("phase", 99), ("read_at_s", np.nan), ("offset_s", np.nan)],
)
def test_digest_that_no_monitor_makes_is_refused(field: str, value: float) -> None:
    rows = np.zeros(1, RANK)
    rows["ending"] = Ending.NONE
    sound = Digest(**{**_tables(), "ranks": rows})
    assert decode(encode(summary(sound))).digests[0].ranks.tobytes() == rows.tobytes()
    rows[field] = value
    with pytest.raises(ProtocolViolation, match=field):
        decode(encode(summary(Digest(**{**_tables(), "ranks": rows}))))


def _tables() -> dict[str, np.ndarray]:
    return {name: getattr(EMPTY, name) for name in EMPTY.__dataclass_fields__}


def test_records_without_a_meaning_are_left_out() -> None:
    data = bytearray(encode(summary()))
    place = data.index(records(2).tobytes())
    data[place + 8] = 200  # The kind of the first.
    (_, kept), *_ = decode(bytes(data)).ranks
    assert kept["stamp"].tolist() == [4]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
PLACES = [
    ("incarnation",), ("number",), ("present",), ("ranks",), ("ranks", 0), ("communicators",),
    ("communicators", 0), ("nodes",), ("nodes", 0), ("nodes", 0, "metrics"),
    ("nodes", 0, "metrics", "gpus"), ("digests",), ("digests", 0), ("missing",),
    ("ranks", 0, "node"), ("ranks", 0, "count"), ("ranks", 0, "generation"),
]  # fmt: skip


@given(st.sampled_from(PLACES), JSON)
def test_any_value_in_any_place_is_a_summary_or_refused(place: tuple[Any, ...], value: Any) -> None:
    try:
        decode(changed(put(*place, value)))
    except ProtocolViolation:
        pass


@given(st.binary(max_size=300), st.booleans(), st.integers(0, 2**32 - 1))
def test_arbitrary_bytes_are_refused_in_bounded_memory(
    noise: bytes, has_head: bool, length: int
) -> None:
    data = struct.pack(">4sI", b"KSM3", length) + noise if has_head else noise
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolViolation):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
