"""Patterns of names: what matches, and names made of what matched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.convert.rules.name_patterns import NamePattern, PatternError

PATTERN = NamePattern("model.layers.{layer:int}.{half:attn|mlp.up}.w{which}.{rest...}")


def test_match_gives_the_placeholders() -> None:
    assert PATTERN.match("model.layers.12.mlp.up.w1.a.b") == {
        "layer": "12", "half": "mlp.up", "which": "1", "rest": "a.b",
    }  # fmt: skip
    assert PATTERN.numbers == {"layer"}


@pytest.mark.parametrize(
    "name",
    ["model.layers.07.attn.w1.a", "model.layers.x.attn.w1.a", "model.layers.1.mlp.w1.a",
     "model.layers.1.attn.w.a", "model.layers.1.attn.w1.", "modelxlayers.1.attn.w1.a",
     "a.model.layers.1.attn.w1.a"],
)  # fmt: skip
def test_other_names_do_not_match(name: str) -> None:
    assert PATTERN.match(name) is None


@given(
    st.integers(0, 500),
    st.sampled_from(["attn", "mlp.up"]),
    st.from_regex(r"[a-z0-9_]{1,4}", fullmatch=True),
    st.from_regex(r"[a-z.]{1,9}", fullmatch=True),
)
def test_name_made_of_values_matches_with_these_values(
    layer: int, half: str, which: str, rest: str
) -> None:
    values = {"layer": str(layer), "half": half, "which": which, "rest": rest}
    assert PATTERN.match(PATTERN.name(values)) == values


def test_literal_text_is_no_regular_expression() -> None:
    assert NamePattern("a.b+").match("axbb") is None
    assert NamePattern("a.b+").match("a.b+") == {}


def test_pattern_of_everything_is_told_from_others() -> None:
    assert NamePattern("{rest...}").takes_the_rest
    assert not NamePattern("model.{rest...}").takes_the_rest
    assert not NamePattern("{name}").takes_the_rest


def test_kinds_need_to_be_written_once() -> None:
    assert NamePattern("a.{n:int}.{x:b|c}").kinds_for("{x}-{n}-{y}") == "{x:b|c}-{n:int}-{y}"


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "not empty"), ("a.{b", "a placeholder is"), ("a.{}", "a placeholder is"),
     ("{b}.{b}", "twice"), ("{b:float*}", "neither int nor texts"), ("{b:}", "neither int"),
     ("{b:a||c}", "neither int")],
)  # fmt: skip
def test_what_is_no_pattern_is_refused(text: str, why: str) -> None:
    with pytest.raises(PatternError, match=why):
        NamePattern(text)
