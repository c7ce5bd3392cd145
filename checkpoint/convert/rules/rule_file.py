"""Parses rules from TOML: the text of a file becomes rule sets, or an error that names a line.

Pure. A file has a table `[config]` of variables and, in arrays of tables, the rules of one
spelling or of several. A rule describes the tensors that `match` names:

    [[rule]]
    match = "decoder.layers.self_attention.linear_qkv.weight"
    rename = ["h.{layer:int}.q.weight", "h.{layer:int}.k.weight", "h.{layer:int}.v.weight"]
    stacked = { axis = 0, placeholder = "layer" }
    parts = { q = "heads * head_dim", k = "groups * head_dim", v = "groups * head_dim" }
    interleave = "groups"

| key | meaning |
|---|---|
| `match` | the name, or one name for each part |
| `rename` | the names on the other side; as `match` if absent |
| `also` | other names under which the tensor may be read |
| `parts`, `dim` | what the dimension `dim` of a fused tensor consists of: names and sizes |
| `interleave` | parts alternate in this many groups (`rename_interleave`: where both are fused) |
| `stacked`, `experts` | a placeholder of one side that is an axis of the other side's tensor |
| `transpose` | the order of the dimensions, as NumPy's transpose takes it |
| `reorder` | a dimension seen as a grid of `shape`, whose axes are permuted to `order` |
| `pad` | dimension `dim`, of `size` elements, is padded to `to` elements on the side of `match` |
| `range` | bounds [first, end] or [first] of a placeholder, for some layers only |
| `drop` | why these tensors are left out |
| `replicated`, `shard`, `average` | what each rank's own files hold |

A placeholder is written with its kind once, in `match`, or in `rename` if it stands only there
(`checkpoint.convert.rules.name_patterns` has the kinds). `dim`, `shard` and the other dimensions
count without stacked axes. Where `match` has one name and
`rename` several, the parts are split; the other way round they are merged.
"""

from __future__ import annotations

from collections.abc import Collection

from keepstep.checkpoint.convert.rules.expressions import Definition, ExpressionError, expression
from keepstep.checkpoint.convert.rules.rule import RuleSet
from keepstep.checkpoint.convert.rules.rule_parser import parse_rule
from keepstep.checkpoint.convert.rules.tables import (
    Table,
    line_of,
    parse_toml,
    table_of,
    tables_of,
    unknown,
)
from keepstep.checkpoint.errors import RulesInvalid

RULES = "rule"
"""Name of the only rule set of a file that is not about several spellings."""


def parse_rules(text: str, file: str, spellings: Collection[str] = (RULES,)) -> dict[str, RuleSet]:
    """Return the rule sets of a file, by the name of their tables.

    Args:
        text: the file's content.
        spellings: the names that tables of rules may have.

    Raises:
        RulesInvalid: the text is no TOML, or says something that rules cannot; the message begins
            with file and line.
    """
    document = parse_toml(text, file)
    known = ("config", "model_types", *spellings)
    for name in document:
        if name not in known:
            raise RulesInvalid(f"{file}:{line_of(text, name)}: {unknown(name, known)}")
    definitions = _definitions(table_of(document, "config", text, file))
    sets: dict[str, RuleSet] = {}
    for name in spellings:
        if name in document:
            tables = tables_of(document, name, text, file)
            sets[name] = RuleSet(
                name=file,
                rules=tuple(parse_rule(table) for table in tables),
                definitions=definitions,
            )
    if not sets:
        raise RulesInvalid(
            f"{file}: there is no rule; a rule is a table [[{next(iter(spellings))}]]"
        )
    return sets


def model_types_of(text: str, file: str) -> tuple[str, ...]:
    """Return the `model_type`s of Hugging Face that a file of rules is for.

    Raises:
        RulesInvalid: the text is no TOML.
    """
    return tuple(parse_toml(text, file).get("model_types", ()))


def _definitions(table: Table) -> dict[str, Definition]:
    definitions: dict[str, Definition] = {}
    for name, given in table.content.items():
        try:
            alternatives = [
                expression(value) for value in (given if isinstance(given, list) else [given])
            ]
        except ExpressionError as error:
            table.refuse(name, error)
        definitions[name] = Definition(table.place_of(name), tuple(alternatives))
    return definitions
