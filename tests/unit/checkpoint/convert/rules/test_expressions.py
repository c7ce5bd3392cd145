"""Sizes as expressions: what they may say, and which definition counts."""

from __future__ import annotations

import pytest

from keepstep.checkpoint.convert.rules.expressions import (
    Definition,
    Expression,
    ExpressionError,
    UnknownName,
    expression,
    variables_of,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3 * heads + 1", 13),
        ("(hidden - 4) / heads", 5),
        ("round_up(hidden, 10)", 30),
        ("text.hidden", 7),
        ("7", 7),
    ],
)
def test_value(text: str, value: int) -> None:
    assert Expression(text).value({"heads": 4, "hidden": 24, "text.hidden": 7}) == value


def test_division_with_a_rest_and_negative_sizes_have_no_value() -> None:
    with pytest.raises(ExpressionError, match="'hidden / heads': 24 is not a multiple of 5"):
        Expression("hidden / heads").value({"heads": 5, "hidden": 24})
    with pytest.raises(ExpressionError, match="24 is not a multiple of 0"):
        Expression("hidden / heads").value({"heads": 0, "hidden": 24})
    with pytest.raises(ExpressionError, match="no multiples of 0"):
        Expression("round_up(1, heads)").value({"heads": 0})
    with pytest.raises(ExpressionError, match="'heads - 5' is -1"):
        Expression("heads - 5").value({"heads": 4})
    with pytest.raises(UnknownName, match="'head' is not known"):
        Expression("head").value({"heads": 4})


@pytest.mark.parametrize(
    "text",
    ["", "heads **", "heads ** 2", "__import__('os')", "open('x')", "heads.real()", "1.5", "True",
     "'a'", "[1]", "heads if 1 else 2", "round_up(heads)", "round_up(1, multiple=2)", "-1",
     "lambda: 1", "x" * 201, "(" * 100 + "1" + ")" * 100],
)  # fmt: skip
def test_anything_else_is_no_expression(text: str) -> None:
    with pytest.raises(ExpressionError):
        Expression(text)


def test_a_size_is_a_number_or_a_text() -> None:
    assert expression(2) == Expression("2")
    for wrong in (True, -1, 1.5, None, ["heads"]):
        with pytest.raises(ExpressionError, match="a size is a whole number"):
            expression(wrong)


def define(*texts: str) -> Definition:
    return Definition("rules.toml:2", tuple(Expression(text) for text in texts))


def test_first_definition_whose_names_are_known_counts() -> None:
    definitions = {
        "groups": define("num_key_value_heads", "num_query_groups", "heads"),
        "width": define("groups * size.head"),
    }
    hugging_face = {"num_key_value_heads": 2, "heads": 8, "size": {"head": 16}, "name": "x"}
    assert variables_of(definitions, hugging_face) == {
        "num_key_value_heads": 2, "heads": 8, "size.head": 16, "groups": 2, "width": 32,
    }  # fmt: skip
    # What is null or true counts as absent.
    absent = {"num_key_value_heads": None, "num_query_groups": True, "heads": 8}
    assert variables_of(definitions, absent) == {"heads": 8, "groups": 8}


def test_definition_counts_rather_than_an_entry_of_its_name() -> None:
    assert variables_of({"a": define("b")}, {"a": 1}) == {}
    assert variables_of({"a": define("a", "b")}, {"a": 1, "b": 2})["a"] == 1


def test_definition_without_a_value_is_named_with_its_line() -> None:
    with pytest.raises(ExpressionError, match=r"^rules\.toml:2: head_dim: 'hidden / heads': 9 is"):
        variables_of({"head_dim": define("hidden / heads")}, {"hidden": 9, "heads": 2})
