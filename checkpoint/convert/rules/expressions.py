"""Evaluates sizes as expressions of a model's configuration (`heads * head_dim`). Pure.

A variable has one expression or several: the first whose names are all known counts, so a variable
reads the configuration of Hugging Face or of Megatron, whichever there is. Numbers are whole, and a
division that leaves a rest is an error: it is a number of heads that does not divide.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.integers import round_up

_MAX_LENGTH = 200


class ExpressionError(ValueError):
    """An expression cannot be parsed, or has no value for this configuration."""


class UnknownName(ExpressionError):
    """An expression names something that neither the rules nor the configuration define."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A size: whole numbers, names, `+ - * /`, parentheses and `round_up(size, multiple)`.

    Raises:
        ExpressionError: the text is anything else.
    """

    text: str

    def __post_init__(self) -> None:
        _check(_parsed(self.text), self.text)

    def value(self, variables: Mapping[str, int]) -> int:
        """Return the value, which is 0 or more.

        Raises:
            UnknownName: a name is not among the variables.
            ExpressionError: a division leaves a rest, or the value is negative.
        """
        value = _value(_parsed(self.text), self.text, variables)
        if value < 0:
            raise ExpressionError(f"{self.text!r} is {value}, which is no size")
        return value


def expression(value: Json) -> Expression:
    """Return what a rule file gives as a size: a whole number, or the text of an expression.

    Raises:
        ExpressionError: it is anything else.
    """
    if type(value) is int and value >= 0:
        return Expression(str(value))
    if isinstance(value, str):
        return Expression(value)
    raise ExpressionError(f"a size is a whole number or an expression in quotes, not {value!r}")


@dataclass(frozen=True, slots=True)
class Definition:
    """A variable: file and line, `name:line`, and expressions in the order of preference."""

    place: str
    alternatives: tuple[Expression, ...]


def variables_of(
    definitions: Mapping[str, Definition], config: Mapping[str, Json]
) -> dict[str, int]:
    """Return all variables: the whole numbers of a configuration, and what the definitions give.

    Args:
        definitions: by variable; they may use entries of the configuration and definitions before
            them.
        config: of the checkpoint, as Hugging Face's config.json or Megatron's arguments have it;
            members of a nested object are named `outer.inner`.

    Raises:
        ExpressionError: an expression whose names are all known has no value; the message begins
            with the definition's place. A definition none of whose expressions is known is left
            out: what uses it says so.
    """
    values = _whole_numbers(config, "")
    for name, definition in definitions.items():
        # The definition counts, not an entry of the same name, which it may well read.
        defined = None
        for alternative in definition.alternatives:
            try:
                defined = alternative.value(values)
            except UnknownName:
                continue
            except ExpressionError as error:
                raise ExpressionError(f"{definition.place}: {name}: {error}") from None
            break
        values.pop(name, None)
        if defined is not None:
            values[name] = defined
    return values


def _whole_numbers(config: Mapping[str, Json], prefix: str) -> dict[str, int]:
    values: dict[str, int] = {}
    for name, value in config.items():
        if type(value) is int:
            values[prefix + name] = value
        elif isinstance(value, Mapping):
            values.update(_whole_numbers(value, f"{prefix}{name}."))
    return values


def _parsed(text: str) -> ast.expr:
    if len(text) > _MAX_LENGTH:
        raise ExpressionError(f"{text[:40]!r}... is longer than {_MAX_LENGTH} characters")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExpressionError(f"{text!r} is no expression") from None


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
}


def _check(node: ast.expr, text: str) -> None:
    """Refuse whatever is not part of the language, before there are any values."""
    match node:
        case ast.Constant(value=value) if type(value) is int:
            return
        case ast.Name() | ast.Attribute():
            _name(node, text)
            return
        case ast.BinOp(left=left, op=op, right=right) if isinstance(
            op, (ast.Add, ast.Sub, ast.Mult, ast.Div)
        ):
            _check(left, text)
            _check(right, text)
            return
        case ast.Call(func=ast.Name(id="round_up"), args=[size, multiple], keywords=[]):
            _check(size, text)
            _check(multiple, text)
            return
    raise ExpressionError(
        f"{text!r}: a size is made of whole numbers, names, + - * / ( ) and "
        "round_up(size, multiple)"
    )


def _value(node: ast.expr, text: str, variables: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right):
            values = _value(left, text, variables), _value(right, text, variables)
            if not isinstance(op, ast.Div):
                return _OPERATORS[type(op)](*values)
            if values[1] == 0 or values[0] % values[1]:
                raise ExpressionError(f"{text!r}: {values[0]} is not a multiple of {values[1]}")
            return values[0] // values[1]
        case ast.Call(args=[size, multiple]):
            values = _value(size, text, variables), _value(multiple, text, variables)
            if values[1] < 1:
                raise ExpressionError(f"{text!r}: there are no multiples of {values[1]}")
            return round_up(*values)
        case _:
            name = _name(node, text)
            if name not in variables:
                raise UnknownName(f"{text!r}: {name!r} is not known")
            return variables[name]


def _name(node: ast.expr, text: str) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=owner, attr=name):
            return f"{_name(owner, text)}.{name}"
    raise ExpressionError(f"{text!r} is no expression")
