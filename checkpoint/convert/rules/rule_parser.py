"""Parses the table of one rule; `checkpoint.convert.rules.rule_file` describes its keys. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.checkpoint.convert.rules.expressions import Expression, ExpressionError, expression
from keepstep.checkpoint.convert.rules.name_patterns import NamePattern, PatternError
from keepstep.checkpoint.convert.rules.rule import (
    FusedPart,
    Reorder,
    Resize,
    Rule,
    Sharding,
    Side,
    Stack,
    Transform,
    Transpose,
)
from keepstep.checkpoint.convert.rules.tables import Table, unknown
from keepstep.checkpoint.format.layout.boxes import Json

_KEYS = (
    "match", "rename", "also", "parts", "dim", "interleave", "rename_interleave", "stacked",
    "experts", "transpose", "reorder", "pad", "range", "drop", "replicated", "shard", "average",
    "one_way",
)  # fmt: skip


def parse_rule(table: Table) -> Rule:
    """Return the rule that a table says.

    Raises:
        RulesInvalid: it says something that rules cannot; the message begins with file and line.
    """
    content = table.content
    for key in content:
        if key not in _KEYS:
            table.refuse(key, unknown(key, _KEYS))
    if "match" not in content:
        table.refuse("match", "a rule has the names that it matches")
    match = _patterns(table, "match")
    if "drop" in content:
        return _dropping(table, match)
    rename = _patterns(table, "rename", match[0]) if "rename" in content else match
    parts = _parts(table)
    if len(match) != len(rename) and 1 not in (len(match), len(rename)):
        table.refuse("rename", f"{len(match)} names become {len(rename)}: one side has one name")
    names = max(len(match), len(rename))
    if names > 1 and len(parts) != names:
        table.refuse(
            "parts", f"there are {names} names, so `parts` has {names} entries: name = size"
        )
    if parts and len(match) == len(rename) > 1:
        table.refuse("rename", "of tensors that stay apart, write a rule for each")
    stacks = _stacks(table, match, rename)
    source_stacks = tuple(stack for stack in stacks if stack.placeholder in _placeholders(rename))
    target_stacks = tuple(stack for stack in stacks if stack not in source_stacks)
    _check_placeholders(table, match, rename, stacks)
    transforms = _transforms(table, parts)
    dim = _dimension(table, "dim", content.get("dim", 0))
    if ("dim" in content or "interleave" in content) and not parts:
        table.refuse("dim" if "dim" in content else "interleave", "`parts` says of which parts")
    source_dim, target_dim = _dims(table, dim, match, rename, transforms)
    interleave, rename_interleave = _interleaves(table, match, rename)
    sharding, shard_dim = _sharding(table)
    return Rule(
        place=table.place,
        source=Side(
            patterns=match,
            also=_also(table, match),
            stacks=source_stacks,
            dim=source_dim,
            interleave=interleave,
            sharding=sharding,
            shard_dim=shard_dim,
        ),
        target=Side(
            patterns=rename, stacks=target_stacks, dim=target_dim, interleave=rename_interleave
        ),
        parts=parts,
        transforms=transforms,
        ranges=_ranges(table, match, rename),
        is_one_way=_one_way(table),
    )


def _dropping(table: Table, match: tuple[NamePattern, ...]) -> Rule:
    why = table.content["drop"]
    if not isinstance(why, str) or not why:
        table.refuse("drop", "say in quotes why these tensors are left out")
    for key in table.content:
        if key not in ("match", "drop", "range"):
            table.refuse(key, "tensors that are left out have only `match`, `range` and `drop`")
    side = Side(patterns=match)
    if len(match) > 1:
        table.refuse("match", "write a rule for each name that is left out")
    return Rule(
        place=table.place,
        source=side,
        target=side,
        drop=why,
        ranges=_ranges(table, match, match),
    )


def _patterns(table: Table, key: str, like: NamePattern | None = None) -> tuple[NamePattern, ...]:
    """Return the patterns of a key. Placeholders without a kind have that of `like`."""
    given = table.content[key]
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        table.refuse(key, f"a name or a list of names, not {given!r}")
    try:
        patterns = tuple(
            NamePattern(text if like is None else like.kinds_for(text)) for text in texts
        )
    except PatternError as error:
        table.refuse(key, error)
    if len({pattern.placeholders for pattern in patterns}) > 1:
        table.refuse(key, "the names of all parts have the same placeholders")
    return patterns


def _placeholders(patterns: tuple[NamePattern, ...]) -> frozenset[str]:
    return patterns[0].placeholders


def _check_placeholders(
    table: Table,
    match: tuple[NamePattern, ...],
    rename: tuple[NamePattern, ...],
    stacks: tuple[Stack, ...],
) -> None:
    stacked = {stack.placeholder for stack in stacks}
    for name in sorted(_placeholders(match) ^ _placeholders(rename)):
        if name not in stacked:
            here, there = (
                ("match", "rename") if name in match[0].placeholders else ("rename", "match")
            )
            table.refuse(
                here,
                f"{{{name}}} is not in `{there}`; if it counts an axis there, say so by "
                f'stacked = {{ axis = 0, placeholder = "{name}" }}',
            )


def _also(table: Table, match: tuple[NamePattern, ...]) -> tuple[NamePattern, ...]:
    if "also" not in table.content:
        return ()
    also = _patterns(table, "also", match[0])
    if len(match) > 1 or also[0].placeholders != match[0].placeholders:
        table.refuse("also", "other names of a tensor with one name, with the same placeholders")
    return also


def _parts(table: Table) -> tuple[FusedPart, ...]:
    given = table.content.get("parts", {})
    if not isinstance(given, Mapping) or ("parts" in table.content and len(given) < 2):
        table.refuse("parts", "two parts or more: { name = size, name = size }")
    return tuple(FusedPart(name, _size(table, "parts", size)) for name, size in given.items())


def _size(table: Table, key: str, given: Json) -> Expression:
    try:
        return expression(given)
    except ExpressionError as error:
        table.refuse(key, error)


def _stacks(
    table: Table, match: tuple[NamePattern, ...], rename: tuple[NamePattern, ...]
) -> tuple[Stack, ...]:
    stacks = []
    for key in ("stacked", "experts"):
        if key not in table.content:
            continue
        given = _members(table, key, ("axis", "placeholder"))
        stack = Stack(_dimension(table, key, given["axis"]), given["placeholder"])
        sides = [side for side in (match, rename) if stack.placeholder in _placeholders(side)]
        if len(sides) != 1 or not all(stack.placeholder in pattern.numbers for pattern in sides[0]):
            table.refuse(
                key, f"{{{stack.placeholder}:int}} is to stand in one of `match` and `rename`"
            )
        stacks.append(stack)
    if len({stack.axis for stack in stacks}) < len(stacks):
        table.refuse("experts", "`stacked` and `experts` are different axes")
    return tuple(sorted(stacks, key=lambda stack: stack.axis))


def _members(
    table: Table, key: str, names: tuple[str, ...], defaults: Mapping[str, Json] | None = None
) -> dict[str, Json]:
    given = table.content[key]
    if not isinstance(given, Mapping):
        table.refuse(key, f"a table {{ {', '.join(f'{name} = ...' for name in names)} }}")
    for name in given:
        if name not in names:
            table.refuse(key, unknown(name, names))
    members = {**(defaults or {}), **given}
    for name in names:
        if name not in members:
            table.refuse(key, f"{name!r} is missing")
    return members


def _dimension(table: Table, key: str, given: Json) -> int:
    if type(given) is not int or given < 0:
        table.refuse(key, f"a dimension is a number from 0, not {given!r}")
    return given


def _order(table: Table, key: str, given: Json) -> tuple[int, ...]:
    if (
        not isinstance(given, list)
        or any(type(dim) is not int for dim in given)
        or sorted(given) != list(range(len(given)))
    ):
        table.refuse(key, f"each dimension once, in their new order, not {given!r}")
    return tuple(given)


def _transforms(table: Table, parts: tuple[FusedPart, ...]) -> tuple[Transform, ...]:
    """Return the transforms from the side of `match` to that of `rename`."""
    transforms: list[Transform] = []
    if "pad" in table.content:
        pad = _members(table, "pad", ("dim", "size", "to"), {"dim": 0})
        if parts or "reorder" in table.content:
            table.refuse("pad", "a rule with `pad` has neither `parts` nor `reorder`")
        transforms.append(
            Resize(
                _dimension(table, "pad", pad["dim"]),
                _size(table, "pad", pad["to"]),
                _size(table, "pad", pad["size"]),
            )
        )
    if "reorder" in table.content:
        transforms.append(_reorder(table, parts))
    if "transpose" in table.content:
        transforms.append(Transpose(_order(table, "transpose", table.content["transpose"])))
    return tuple(transforms)


def _reorder(table: Table, parts: tuple[FusedPart, ...]) -> Reorder:
    reorder = _members(
        table, "reorder", ("dim", "parts", "shape", "order"), {"dim": 0, "parts": None}
    )
    names = reorder["parts"]
    known = [part.name for part in parts]
    if parts and (not isinstance(names, list) or not names or not set(names) <= set(known)):
        table.refuse("reorder", f"`parts` says which are permuted, of {', '.join(known)}")
    if not parts and names is not None:
        table.refuse("reorder", "the rule has no `parts`")
    order = _order(table, "reorder", reorder["order"])
    shape = reorder["shape"]
    if not isinstance(shape, list) or len(shape) != len(order) or len(order) < 2:
        table.refuse("reorder", "`shape` and `order` have the same two entries or more")
    return Reorder(
        _dimension(table, "reorder", reorder["dim"]),
        tuple(_size(table, "reorder", size) for size in shape),
        order,
        frozenset(names) if parts else None,
    )


def _one_way(table: Table) -> bool:
    given = table.content.get("one_way", False)
    if "one_way" in table.content and given is not True:
        table.refuse("one_way", f"true, not {given!r}")
    return given is True


def _dims(
    table: Table,
    dim: int,
    match: tuple[NamePattern, ...],
    rename: tuple[NamePattern, ...],
    transforms: tuple[Transform, ...],
) -> tuple[int, int]:
    """Return the dimension of the parts on either side.

    `dim` is that of the fused tensor; of `match`, where both are fused.
    """
    order = next((step.order for step in transforms if isinstance(step, Transpose)), None)
    if order is None:
        return dim, dim
    if dim >= len(order):
        table.refuse("transpose", f"there is no dimension {dim} in {list(order)}")
    if len(match) == 1:
        return dim, order.index(dim)
    return order[dim], dim


def _interleaves(
    table: Table, match: tuple[NamePattern, ...], rename: tuple[NamePattern, ...]
) -> tuple[Expression, Expression]:
    interleave = _size(table, "interleave", table.content.get("interleave", 1))
    both_fused = len(match) == len(rename) == 1
    if "rename_interleave" not in table.content:
        return interleave, interleave
    if not both_fused:
        table.refuse("rename_interleave", "only where `match` and `rename` are both fused")
    return interleave, _size(table, "rename_interleave", table.content["rename_interleave"])


def _sharding(table: Table) -> tuple[Sharding | None, int]:
    given = [kind for kind in Sharding if kind.value in table.content]
    if not given:
        return None, 0
    if len(given) > 1:
        table.refuse(given[1].value, f"the rule says already {given[0].value!r}")
    kind = given[0]
    value = table.content[kind.value]
    if kind is Sharding.SHARD:
        return kind, _dimension(table, kind.value, value)
    if value is not True:
        table.refuse(kind.value, f"true, not {value!r}")
    return kind, 0


def _ranges(
    table: Table, match: tuple[NamePattern, ...], rename: tuple[NamePattern, ...]
) -> tuple[tuple[str, Expression, Expression | None], ...]:
    given = table.content.get("range", {})
    if not isinstance(given, Mapping):
        table.refuse("range", "a table { placeholder = [first, end] }")
    ranges = []
    for name, bounds in given.items():
        if not all(name in pattern.numbers for pattern in (*match, *rename)):
            table.refuse("range", f"{{{name}:int}} is to stand in `match` and `rename`")
        if not isinstance(bounds, list) or len(bounds) not in (1, 2):
            table.refuse("range", f"[first, end] or [first], not {bounds!r}")
        sizes = [_size(table, "range", bound) for bound in bounds]
        ranges.append((name, sizes[0], sizes[1] if len(sizes) == 2 else None))
    return tuple(ranges)
