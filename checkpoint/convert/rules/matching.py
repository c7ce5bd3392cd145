"""Finds which rule takes which tensor. Pure.

Every name is for exactly one rule. A rule for `{name...}` alone takes the names that no other rule
takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from keepstep.checkpoint.convert.rules.expressions import ExpressionError
from keepstep.checkpoint.convert.rules.name_patterns import NamePattern
from keepstep.checkpoint.convert.rules.rule import Rule, RuleSet
from keepstep.checkpoint.errors import RulesInvalid

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Matched:
    """A name that a rule takes: the part that it is, and the texts of the placeholders."""

    name: str
    part: int
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MatchReport:
    """Lists which rule takes which name.

    Attributes:
        taken: by rule, in the order of the rules, the names that it alone takes.
        unmatched: names that no rule takes.
        doubly: names that several rules take, and these.
    """

    taken: tuple[tuple[Rule, tuple[Matched, ...]], ...]
    unmatched: tuple[str, ...]
    doubly: tuple[tuple[str, tuple[Rule, ...]], ...]

    @property
    def is_complete(self) -> bool:
        """Whether each name is for exactly one rule."""
        return not self.unmatched and not self.doubly

    def lines(self) -> list[str]:
        """Return the report as lines of text: problems first, then each rule and its tensors."""
        lines = [f"no rule matches {name}" for name in self.unmatched]
        for name, rules in self.doubly:
            lines.append(f"several rules match {name}:")
            lines += [f"  {rule.label}" for rule in rules]
        for rule, matched in self.taken:
            count = f"{len(matched)} tensor{'' if len(matched) == 1 else 's'}"
            lines.append(f"{rule.label}: {count if matched else 'nothing'}")
            lines += [f"  {found.name}" for found in matched]
        return lines

    def refuse_if_incomplete(self, name: str) -> None:
        """Refuse to go on where a name is not for exactly one rule.

        Raises:
            RulesInvalid: there is such a name; the message has the first few.
        """
        if self.unmatched:
            raise RulesInvalid(
                f"{name}: no rule matches {_listed(self.unmatched)}; add rules for them, or a rule "
                'with drop = "why" that leaves them out'
            )
        if self.doubly:
            tensor, rules = self.doubly[0]
            more = f" (and {len(self.doubly) - 1} more)" if len(self.doubly) > 1 else ""
            raise RulesInvalid(
                f"{name}: several rules match {tensor}{more}: "
                f"{', '.join(rule.label for rule in rules)}; make their patterns narrower"
            )


def match_names(rules: RuleSet, names: Iterable[str], variables: Mapping[str, int]) -> MatchReport:
    """Return which rule takes which name.

    Args:
        rules: they are read from source to target.
        names: of the source's tensors, without the checkpoint's `model/` or slots.
        variables: as `RuleSet.variables` returns them.

    Raises:
        RulesInvalid: a bound of a rule's range has no value.
    """
    bounds = [_bounds(rule, variables) for rule in rules.rules]
    taken: dict[int, list[Matched]] = defaultdict(list)
    unmatched: list[str] = []
    doubly: list[tuple[str, tuple[Rule, ...]]] = []
    for name in sorted(names):
        found = [
            (place, matched)
            for place, rule in enumerate(rules.rules)
            if (matched := _match(rule, bounds[place], name)) is not None
        ]
        if len(found) > 1:
            found = [
                (place, matched)
                for place, matched in found
                if not rules.rules[place].source.patterns[0].takes_the_rest
            ]
        if not found:
            unmatched.append(name)
        elif len(found) > 1:
            doubly.append((name, tuple(rules.rules[place] for place, _ in found)))
        else:
            taken[found[0][0]].append(found[0][1])
    return MatchReport(
        tuple((rule, tuple(taken[place])) for place, rule in enumerate(rules.rules)),
        tuple(unmatched),
        tuple(doubly),
    )


def _bounds(rule: Rule, variables: Mapping[str, int]) -> dict[str, tuple[int, int | None]]:
    try:
        return {
            placeholder: (first.value(variables), None if end is None else end.value(variables))
            for placeholder, first, end in rule.ranges
        }
    except ExpressionError as error:
        raise RulesInvalid(
            f"{rule.label}: range: {error}; define it in [config], or pass the checkpoint's own"
        ) from None


def _match(rule: Rule, bounds: Mapping[str, tuple[int, int | None]], name: str) -> Matched | None:
    patterns: list[tuple[int, NamePattern]] = [
        *enumerate(rule.source.patterns),
        *((0, pattern) for pattern in rule.source.also),
    ]
    for part, pattern in patterns:
        values = pattern.match(name)
        if values is not None and all(
            first <= int(values[placeholder]) and (end is None or int(values[placeholder]) < end)
            for placeholder, (first, end) in bounds.items()
            if placeholder in values
        ):
            return Matched(name, part, values)
    return None


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
