"""Reads the rules that a user names: a file, or a preset with two spellings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from keepstep.checkpoint.convert.rules.matching import MatchReport, match_names
from keepstep.checkpoint.convert.rules.plan import Plan
from keepstep.checkpoint.convert.rules.planning import apply, names_of
from keepstep.checkpoint.convert.rules.presets import preset
from keepstep.checkpoint.convert.rules.rank_shards import RankRules
from keepstep.checkpoint.convert.rules.rule import RuleSet
from keepstep.checkpoint.convert.rules.rule_file import parse_rules
from keepstep.checkpoint.convert.write.opened import Checkpoint
from keepstep.checkpoint.convert.write.renaming import Planner, aliases_of, renamed_source
from keepstep.checkpoint.errors import CheckpointMissing, RulesInvalid
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.source import Source, TensorSpec


def apply_naming_rules(opened: Checkpoint, given: str, config: Mapping[str, Json]) -> Checkpoint:
    """Return an opened checkpoint in the spelling that rules lead to.

    Args:
        given: as for `planner`.

    Raises:
        CheckpointMissing: there is no such file of rules.
        RulesInvalid: the rules do not fit the checkpoint, or are none.
        CheckpointDamaged: tensors differ that have to be equal.
    """
    source = renamed_source(opened.source, planner(given, config))
    source.check_equal()
    return replace(opened, source=source, left_out=(*opened.left_out, *source.left_out()))


def planner(given: str, config: Mapping[str, Json]) -> Planner:
    """Return what plans by the rules that a user names.

    Args:
        given: the path of a file of rules, or FAMILY:FROM:TO of a preset, as `llama:hf:megatron`.

    Raises:
        CheckpointMissing: there is no such file.
        RulesInvalid: they are no rules, or there is no such preset.
    """
    named = _preset(given)
    if named is not None:
        family, source, target = named
        chosen = preset(family)

        def plan_by_preset(tensors: Mapping[str, TensorSpec]) -> Plan:
            return chosen.plan(source, target, tensors, config)

        return plan_by_preset
    rules = _read_rules(given)
    return lambda tensors: apply(rules, tensors, config)


def report(given: str, source: Source, config: Mapping[str, Json]) -> MatchReport:
    """Return which rule takes which tensor.

    Args:
        given: as for `planner`; of a preset, the rules from FROM to Hugging Face's spelling.
        source: the checkpoint; its tied names are for rules like any other.

    Raises:
        CheckpointMissing: there is no such file.
        RulesInvalid: they are no rules, or there is no such preset.
    """
    rules = _source_rules(given)
    firsts = aliases_of(source)
    tensors = {**source.tensors, **{a: source.tensors[first] for a, first in firsts.items()}}
    return match_names(rules, names_of(tensors), rules.variables(config))


def rank_rules(given: str, config: Mapping[str, Json]) -> RankRules | None:
    """Return the rules that a user names, as what each rank's own files hold; None if none says it.

    Args:
        given: as for `planner`; of a preset, the rules from FROM to Hugging Face's spelling.
        config: the model's configuration, of a checkpoint that is not opened yet.

    Raises:
        CheckpointMissing: there is no such file.
        RulesInvalid: they are no rules, or there is no such preset.
    """
    rules = _source_rules(given)
    says_it = any(rule.source.sharding is not None for rule in rules.rules)
    return RankRules(rules, config) if says_it else None


def _source_rules(given: str) -> RuleSet:
    named = _preset(given)
    return preset(named[0]).rules(named[1]) if named is not None else _read_rules(given)


def _preset(given: str) -> tuple[str, str, str] | None:
    parts = given.split(":")
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 and "/" not in given else None


def _read_rules(path: str) -> RuleSet:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointMissing(
            f"{path}: rules cannot be read: {error}; give a file, or FAMILY:FROM:TO of a preset"
        ) from error
    spellings = parse_rules(text, path)
    if "rule" not in spellings:
        raise RulesInvalid(f"{path}: it has no [[rule]]")
    return spellings["rule"]
