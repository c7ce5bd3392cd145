"""Rule files: what they say, and errors that name the line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.convert.rules.rule import Sharding
from keepstep.checkpoint.convert.rules.rule_file import parse_rules
from keepstep.checkpoint.errors import RulesInvalid
from tests.examples import examples

GOOD = """\
# Two rules.
[config]
heads = ["num_heads", 4]

[[rule]]
match = "layers.qkv.{leaf:weight|bias}"
rename = [
    "h.{layer:int}.q.{leaf}",
    "h.{layer:int}.k.{leaf}",
]
stacked = { axis = 0, placeholder = "layer" }
parts = { q = "heads * 2", k = 4 }
interleave = "heads"
shard = 0

[[rule]]
match = "norm"
average = true
"""


def parsed_error(text: str) -> str:
    with pytest.raises(RulesInvalid) as raised:
        parse_rules(text, "my.toml")
    return str(raised.value)


def test_rules_know_their_lines() -> None:
    rules = parse_rules(GOOD, "my.toml")["rule"]
    assert [rule.place for rule in rules.rules] == ["my.toml:5", "my.toml:16"]
    assert rules.definitions["heads"].place == "my.toml:3"
    fused, norm = rules.rules
    assert [part.name for part in fused.parts] == ["q", "k"]
    assert (fused.source.sharding, fused.source.shard_dim) == (Sharding.SHARD, 0)
    assert fused.source.stacks
    assert not fused.target.stacks
    assert norm.source.sharding is Sharding.AVERAGE
    assert norm.target.patterns == norm.source.patterns


def test_inverted_twice_is_the_same() -> None:
    rules = parse_rules(GOOD, "my.toml")["rule"]
    assert rules.inverted != rules
    assert rules.inverted.inverted == rules


def edited(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("shard = 0", "shrad = 0", "my.toml:14: shrad: 'shrad' is unknown; did you mean 'shard'?"),
        ("shard = 0", "sharding = []", "did you mean 'shard'?"),
        ("average = true", 'average = "no"', "my.toml:18: average: true, not 'no'"),
        ("average = true", "shard = -1", "my.toml:18: shard: a dimension is a number from 0"),
        ("average = true", "average = true\nshard = 0", "my.toml:18: average: the rule says alr"),
        ('match = "norm"', 'rename = "norm"', "my.toml:16: match: a rule has the names"),
        ('match = "norm"', "match = 3", "my.toml:17: match: a name or a list of names, not 3"),
        ('match = "norm"', 'match = "{norm"', "my.toml:17: match: '{norm': a placeholder is"),
        ('match = "norm"', 'match = "norm"\ndim = 1', "my.toml:18: dim: `parts` says of which"),
        ("[config]", "[confg]", "my.toml:2: 'confg' is unknown; did you mean 'config'?"),
        ('"num_heads", 4', '"num_heads", 4.5', "my.toml:3: heads: a size is a whole number"),
        ('"num_heads", 4', '"num heads"', "my.toml:3: heads: 'num heads' is no expression"),
        ('"heads * 2"', '"heads ** 2"', "my.toml:12: parts: 'heads ** 2': a size is made of"),
        ("parts = {", "pads = {", "my.toml:12: pads: 'pads' is unknown; did you mean 'pad'?"),
        (", k = 4 }", " }", "my.toml:12: parts: two parts or more"),
        (", k = 4 }", ", k = 4, v = 4 }", "my.toml:12: parts: there are 2 names"),
        ('"h.{layer:int}.k', '"h.{leaf}.{leyer:int}.k', "my.toml:7: rename:"),
        ('"h.{layer:int}.k', '"h.{leyer:int}.k', "my.toml:7: rename: the names of all parts"),
        ("stacked = {", "# stacked = {", "my.toml:7: rename: {layer} is not in `match`"),
        ('"layer" }', '"leaf" }', "my.toml:11: stacked: {leaf:int} is to stand in one of"),
        ('placeholder = "layer"', 'place = "layer"', "did you mean 'placeholder'?"),
        ('axis = 0, placeholder', "placeholder", "my.toml:11: stacked: 'axis' is missing"),
        ("average = true", "transpose = [1, 1]", "my.toml:18: transpose: each dimension once"),
        ("average = true", 'transpose = [0.0]', "my.toml:18: transpose: each dimension once"),
        ("average = true", 'pad = { to = "heads" }', "my.toml:18: pad: 'size' is missing"),
        ("average = true", "drop = true", "my.toml:18: drop: say in quotes why"),
        ("average = true", 'average = true\ndrop = "x"', "my.toml:18: average: tensors that are"),
        ("average = true", "range = { layer = [0] }", "my.toml:18: range: {layer:int} is to"),
        ("average = true", 'also = "{x}"', "my.toml:18: also: other names of a tensor"),
        ("average = true", "reorder = { shape = [1], order = [0] }", "my.toml:18: reorder: `sha"),
        ("average = true", "one_way = 1", "my.toml:18: one_way: true, not 1"),
        ("average = true", 'reorder = { parts = ["q"], shape = [1, 1], order = [0, 1] }',
         "my.toml:18: reorder: the rule has no `parts`"),
        ("shard = 0", "reorder = { shape = [2, 2], order = [1, 0] }",
         "my.toml:14: reorder: `parts` says which are permuted, of q, k"),
        ("shard = 0", 'reorder = { parts = ["v"], shape = [2, 2], order = [1, 0] }',
         "my.toml:14: reorder: `parts` says which are permuted, of q, k"),
        ("average = true", "rename_interleave = 2\nparts = { a = 1, b = 1 }\nrename = ['a', 'b']",
         "my.toml:18: rename_interleave: only where"),
    ],
)  # fmt: skip
def test_error_names_line_and_key(old: str, new: str, message: str) -> None:
    assert message in parsed_error(edited(old, new))


def test_text_that_is_no_toml_is_refused_with_its_line() -> None:
    assert "my.toml: " in parsed_error(edited("[config]", "[config"))
    assert "line 2" in parsed_error(edited("[config]", "[config"))


def test_rules_that_are_no_tables_of_their_own_are_refused() -> None:
    """Their lines could not be told."""
    assert "my.toml:1: write each rule" in parsed_error('rule = [{ match = "a" }]')
    assert "my.toml:1: write each rule" in parsed_error('[rule]\nmatch = "a"')


def test_file_without_rules_is_refused() -> None:
    assert "there is no rule; a rule is a table [[rule]]" in parsed_error("[config]\na = 1")


def test_key_that_is_missing_is_not_looked_for_in_the_next_table() -> None:
    text = '[[rule]]\nrename = "a"\n[[rule]]\nmatch = "a"'
    assert parsed_error(text) == "my.toml:1: match: a rule has the names that it matches"


KEYS = (
    "match", "rename", "also", "parts", "dim", "interleave", "rename_interleave", "stacked",
    "experts", "transpose", "reorder", "pad", "range", "drop", "replicated", "shard", "fragments",
    "average", "one_way", "config",
)  # fmt: skip
MEMBERS = ("parts", "axis", "placeholder", "dim", "shape", "order", "size", "to", "n", "q", "k")
PLAIN = st.one_of(
    st.integers(-1, 3),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "a", "b.{n:int}", "{n}", "{n:int}", "n", "heads * 2", "1 / 0", "{", "0"]),
)
VALUES = st.one_of(
    PLAIN,
    st.lists(PLAIN, max_size=3),
    st.dictionaries(st.sampled_from(MEMBERS), st.one_of(PLAIN, st.lists(PLAIN, max_size=3))),
)


def toml_of(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {toml_of(item)}' for name, item in value.items())} }}"
    return json.dumps(value)


@settings(max_examples=examples(500))
@given(
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6),
    st.sampled_from(["a", "b.{n:int}", 3]),
)
def test_any_table_is_a_rule_or_refused_with_its_line(table: dict[str, Any], match: Any) -> None:
    content = {"match": match, **table}
    text = "[[rule]]\n" + "".join(f"{key} = {toml_of(item)}\n" for key, item in content.items())
    message = ""
    try:
        rules = parse_rules(text, "my.toml")["rule"]
    except RulesInvalid as error:
        message = str(error)
    assert message.startswith("my.toml:") or all(
        rule.inverted.inverted == rule for rule in rules.rules
    )
