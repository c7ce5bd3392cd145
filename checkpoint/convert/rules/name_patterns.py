"""Matches tensor names by patterns, and makes names from them. Pure.

`model.layers.{layer:int}.mlp.{kind:gate|up}_proj.weight` matches the names of all layers. A
placeholder is one of

- `{name}`: text without a dot,
- `{name:int}`: a number without leading zeros,
- `{name:one|two}`: one of these texts,
- `{name...}`: any text, dots included.

These suffice for the names of models; regular expressions would not turn around: a rule is applied
in both directions, so each side of it matches names and makes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)(\.\.\.|:[^{}]*)?\}")
_NAMES = re.compile(r"[A-Za-z0-9_.-]+(?:\|[A-Za-z0-9_.-]+)*")


class PatternError(ValueError):
    """A text is no pattern."""


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A pattern of names.

    Raises:
        PatternError: the text has a brace that belongs to no placeholder, a kind of placeholder
            that does not exist, or one placeholder twice.
    """

    text: str
    placeholders: frozenset[str] = field(init=False, compare=False, repr=False)
    numbers: frozenset[str] = field(init=False, compare=False, repr=False)
    _expression: re.Pattern[str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.text:
            raise PatternError("a pattern of names is not empty")
        expression, position = "", 0
        placeholders: set[str] = set()
        numbers: set[str] = set()
        for found in _PLACEHOLDER.finditer(self.text):
            name, kind = found[1], found[2]
            if name in placeholders:
                raise PatternError(f"{self.text!r}: placeholder {{{name}}} stands there twice")
            placeholders.add(name)
            if kind == ":int":
                numbers.add(name)
            expression += self._literal(self.text[position : found.start()])
            expression += f"(?P<{name}>{self._of_kind(kind)})"
            position = found.end()
        expression += self._literal(self.text[position:])
        object.__setattr__(self, "placeholders", frozenset(placeholders))
        object.__setattr__(self, "numbers", frozenset(numbers))
        object.__setattr__(self, "_expression", re.compile(expression))

    def kinds_for(self, text: str) -> str:
        """Return another pattern's text, in which placeholders without a kind have this one's."""
        kinds = {found[1]: found[0] for found in _PLACEHOLDER.finditer(self.text)}
        return _PLACEHOLDER.sub(
            lambda found: kinds.get(found[1], found[0]) if found[2] is None else found[0], text
        )

    @property
    def takes_the_rest(self) -> bool:
        """Whether this is `{name...}` alone, which matches every name."""
        found = _PLACEHOLDER.fullmatch(self.text)
        return found is not None and found[2] == "..."

    def match(self, name: str) -> dict[str, str] | None:
        """Return the texts of the placeholders if a name matches, else None."""
        found = self._expression.fullmatch(name)
        return None if found is None else found.groupdict()

    def name(self, values: Mapping[str, str]) -> str:
        """Return the name with these texts of the placeholders."""
        return _PLACEHOLDER.sub(lambda found: values[found[1]], self.text)

    def _literal(self, text: str) -> str:
        if "{" in text or "}" in text:
            raise PatternError(
                f"{self.text!r}: a placeholder is {{name}}, {{name:int}}, {{name:one|two}} or "
                "{name...}"
            )
        return re.escape(text)

    def _of_kind(self, kind: str | None) -> str:
        if kind is None:
            return r"[^./]+"
        if kind == "...":
            return r".+"
        if kind == ":int":
            return r"0|[1-9][0-9]*"
        if not _NAMES.fullmatch(kind[1:]):
            raise PatternError(f"{self.text!r}: {kind[1:]!r} is neither int nor texts like a|b")
        return "|".join(re.escape(text) for text in kind[1:].split("|"))
