"""Claims about values of optimizers as JSON."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.encoded_values import (
    Decoder,
    encode_value,
    noted_slots,
    slots_within,
)

KEYS = st.integers() | st.booleans() | st.text(max_size=4) | st.sampled_from(["$slot", "$tuple"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
    | st.binary(max_size=4) | st.sets(st.integers(), max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS | st.tuples(st.integers()), inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=4))
    ),
    max_leaves=12,
)  # fmt: skip


def nothing_else(name: str, value: object) -> Json:
    return None


def shown(value: Any) -> Any:
    """Return a value with its types, which equality alone does not compare."""
    if isinstance(value, Mapping):
        return type(value), [(shown(key), shown(item)) for key, item in value.items()]
    if isinstance(value, deque):
        return deque, value.maxlen, [shown(item) for item in value]
    if isinstance(value, list | tuple):
        return type(value), [shown(item) for item in value]
    return type(value), value


@given(VALUES)
def test_values_come_back_with_their_types_by_way_of_json(value: Any) -> None:
    encoded = json.loads(json.dumps(encode_value("it", value, nothing_else)))
    decoder = Decoder(lambda kind, content: pytest.fail(f"{kind} was not encoded"))
    assert shown(decoder.decode(encoded)) == shown(value)


def test_others_are_encoded_and_decoded_by_the_caller() -> None:
    def number(name: str, value: object) -> Json:
        return {"$slot": {"name": name}} if isinstance(value, complex) else None

    encoded = encode_value("it", {"a": [1j, (2j, 3)]}, number)
    names = ["it['a'][0]", "it['a'][1][0]"]
    assert [noted["name"] for noted in slots_within(encoded)] == names
    assert list(noted_slots({"x": encoded})) == names
    decoded = Decoder(lambda kind, content: (kind, content["name"])).decode(encoded)
    assert decoded == {"a": [("$slot", names[0]), (("$slot", names[1]), 3)]}


def test_what_cannot_be_stored_is_named() -> None:
    with pytest.raises(
        LayoutMismatch, match=r"it\['a'\]\[1\]: a value of type object cannot be stored"
    ):
        encode_value("it", {"a": [1, object()]}, nothing_else)
    value: list[Any] = []
    value.append(value)
    with pytest.raises(LayoutMismatch, match="contains itself"):
        encode_value("it", value, nothing_else)
