"""Claims about reading the coordinator: its keys are a view, or an error that says what to do."""

import enum
import tracemalloc
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous import records
from keepstep.elastic.rendezvous.records import (
    Eviction,
    NodeRecord,
    Record,
    RestartRequest,
    decode_secret,
)
from keepstep.elastic.rendezvous.view import Keys, View, apply, from_listing
from keepstep.elastic.store.contract import Change, KeyValue, Listing
from tests.examples import examples

RECORDS = [
    kind
    for kind in vars(records).values()
    if isinstance(kind, type) and issubclass(kind, Record) and kind is not Record
]
KEYS = Keys("run7")
NAMES = [
    "generation", "closing", "snapshot", "persist", "checkpoint", "store_failure", "history",
    "result", "verdicts", "secret", "last_join", "nodes/a", "nodes/", "evictions/a", "restarts/3",
    "members/a", "placements/3", "placements/x",
    "restarts/x", "restarts/", "restarts/-1", "restarts/" + 5000 * "9", "nodes", "", "unknown/x",
]  # fmt: skip

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FIELDS = sorted({name for kind in RECORDS for name in kind.__dataclass_fields__})
OBJECTS = st.dictionaries(st.sampled_from(FIELDS), JSON)
VALUES = (
    st.binary(max_size=100)
    | JSON.map(lambda value: msgspec.json.encode(value))
    | OBJECTS.map(lambda value: msgspec.json.encode(value))
)


@settings(max_examples=examples(300))
@given(data=VALUES)
def test_arbitrary_bytes_are_a_record_of_any_kind_or_a_usage_error(data: bytes) -> None:
    for kind in RECORDS:
        try:
            decoded = kind.decode(data)
        except UsageError:
            continue
        assert kind.decode(decoded.encode()) == decoded, kind


def simplest(hint: Any) -> Any:
    """Return the JSON of a simplest value of a type: of records, the fields that they require."""
    origin = typing.get_origin(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        required = [f.name for f in fields(hint) if f.default is f.default_factory is MISSING]
        return {name: simplest(hints[name]) for name in required}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next(iter(hint)).value
    if origin is types.UnionType:
        return simplest(typing.get_args(hint)[0])
    if origin is tuple:
        return [simplest(typing.get_args(hint)[0])]
    return {} if origin is Mapping else hint()


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_fields_that_a_newer_version_has_added_are_ignored(kind: type[Record]) -> None:
    known = kind.from_json(simplest(kind))
    newer = {**known.to_json(), "of_a_newer_version": {"nested": [1]}}
    assert kind.from_json(newer) == known
    assert kind.decode(msgspec.json.encode(newer)) == known


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_deep_nesting_is_a_usage_error_and_takes_little_memory(kind: type[Record]) -> None:
    for data in (b"[" * 100_000, b'{"new":' + b"[" * 100_000, b'{"a":' * 100_000):
        tracemalloc.start()
        try:
            with pytest.raises(UsageError):
                kind.decode(data)
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()


@given(st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=3))
def test_arbitrary_keys_are_a_view_or_a_usage_error(items: list[tuple[str, bytes]]) -> None:
    found = [KeyValue(f"{KEYS.prefix}{name}", value, 1, 1) for name, value in items]
    attempts: list[Any] = [
        lambda: from_listing(KEYS, Listing(1, tuple(found))),
        lambda: apply(
            KEYS, from_listing(KEYS, Listing(0, ())), [Change(item.key, item, 1) for item in found]
        ),
    ]
    for attempt in attempts:
        try:
            attempt()
        except UsageError:
            pass


def test_restart_of_what_is_no_rank_is_left_out() -> None:
    request = RestartRequest(generation=1, rank=3, reason="hangs").encode()
    for name, is_rank in (("3", True), ("x", False), ("-1", False), ("9" * 5000, False)):
        listing = Listing(1, (KeyValue(KEYS.single(f"restarts/{name}"), request, 1, 1),))
        view = from_listing(KEYS, listing)
        assert set(view.restarts) == ({3} if is_rank else set())
        assert set(view.unreadable) == (set() if is_rank else {f"restarts/{name}"})


@pytest.mark.parametrize("section", ["nodes", "evictions", "restarts"])
def test_what_one_writer_wrote_unreadably_is_left_out_until_it_is_readable(section: str) -> None:
    """A node of another version does not end the agents of all others."""
    node = NodeRecord(
        node="1", host="h", nproc=1, agent="h:1", server="h:2", store_port=3, lease=1, digest=""
    )
    readable = {
        "nodes": node.encode(),
        "evictions": Eviction(reason="slow", may_return=False).encode(),
        "restarts": RestartRequest(generation=1, rank=1, reason="hangs").encode(),
    }[section]
    name = f"{section}/1"

    def change(value: bytes | None) -> Change:
        key = KEYS.single(name)
        return Change(key, KeyValue(key, value, 1, 1) if value is not None else None, 1)

    view = apply(KEYS, View(), [change(readable)])
    assert len(getattr(view, section)) == 1
    view = apply(KEYS, view, [change(b'{"reason": 3, "generation": "x"}')])
    assert not getattr(view, section)
    assert "run one version of keepstep" in view.unreadable[name]
    for value in (readable, None):
        assert not apply(KEYS, view, [change(value)]).unreadable


def test_unreadable_document_of_the_whole_job_is_a_usage_error() -> None:
    key = KEYS.single("generation")
    with pytest.raises(UsageError, match="run one version of keepstep"):
        apply(KEYS, View(), [Change(key, KeyValue(key, b"[]", 1, 1), 1)])


@pytest.mark.parametrize("secret", [b"", b"no hexadecimal", b"\xff", b"ab"])
def test_secret_of_another_form_is_a_usage_error(secret: bytes) -> None:
    with pytest.raises(UsageError, match="run one version of keepstep"):
        decode_secret(secret)
    assert decode_secret(64 * b"a") == 32 * b"\xaa"
