"""Claims about numbers that JSON lacks: they are stored as JSON, and come back."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.format.stored.stored_json import (
    encode,
    encode_strict,
    from_strict_json,
    to_strict_json,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["NaN", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["__float__", "loss"]), inner, max_size=2)
    ),
    max_leaves=8,
)


def refuse(word: str) -> Any:
    raise AssertionError(f"{word} is not JSON")


def same(first: Any, second: Any) -> bool:
    """Return whether two values are equal, where NaN equals NaN."""
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    return type(first) is type(second) and first == second


@given(values)
def test_every_value_comes_back_from_strict_json(value: Any) -> None:
    stored = json.loads(encode(to_strict_json(value)), parse_constant=refuse)
    assert same(from_strict_json(stored), value)
    assert encode_strict(value) == encode(to_strict_json(value))
