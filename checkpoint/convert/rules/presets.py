"""Loads the rules that come with keepstep: for each family of models, its spellings.

A spelling is how one framework names and lays out a model's tensors. The hub of every family is the
spelling of Hugging Face's files: the rules of each spelling lead to it, and inverted from it. From
one spelling to another two steps are planned as one.

| spelling | what it is |
|---|---|
| `hf` | files of Hugging Face |
| `live` | the module of transformers 5 in memory, which DeepSpeed, FSDP and Trainer save |
| `megatron` | the module of Megatron-Core, as its checkpoints are read and written |
| `torchtitan` | torchtitan's models |

The files are read from the package; nothing else here is more than a function of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from keepstep.checkpoint.convert.rules.plan import Plan, unchanged
from keepstep.checkpoint.convert.rules.planning import apply
from keepstep.checkpoint.convert.rules.rule import RuleSet
from keepstep.checkpoint.convert.rules.rule_file import model_types_of, parse_rules
from keepstep.checkpoint.errors import RulesInvalid
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.source import TensorSpec

HUB = "hf"
SPELLINGS = (HUB, "live", "megatron", "torchtitan")
"""The spellings that presets may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The rules of one family.

    Args:
        family: its name.
        model_types: what Hugging Face's configuration calls the models of the family.
        spellings: the rules from each spelling to the hub. The hub's own rules have the names of
            older files, and what is left out.
    """

    family: str
    model_types: tuple[str, ...]
    spellings: Mapping[str, RuleSet]

    def rules(self, spelling: str) -> RuleSet:
        """Return the rules from a spelling to the hub.

        Raises:
            RulesInvalid: the preset does not have this spelling.
        """
        if spelling not in self.spellings:
            raise RulesInvalid(
                f"the preset {self.family!r} has no spelling {spelling!r}; it has "
                f"{', '.join(self.spellings)}; write a rule file of your own for others"
            )
        return self.spellings[spelling]

    def plan(
        self,
        source: str,
        target: str,
        tensors: Mapping[str, TensorSpec],
        config: Mapping[str, Json],
    ) -> Plan:
        """Plan a checkpoint in one spelling from one in another.

        Args:
            source: the spelling of the tensors.
            target: the wanted spelling.

        Raises:
            RulesInvalid: as for `apply`, or the preset does not have a spelling.
        """
        if source == target:
            return Plan(tensors={key: unchanged(key, spec) for key, spec in tensors.items()})
        to_hub = apply(self.rules(source), tensors, config)
        if target == HUB:
            return to_hub
        return apply(self.rules(target).inverted, to_hub.specs, config).after(to_hub)


def families() -> tuple[str, ...]:
    """Return the names of the families that have a preset."""
    names = (entry.name for entry in (files(__package__) / "presets").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def preset(family: str) -> Preset:
    """Return the preset of a family, or of the family that has models of this `model_type`.

    Raises:
        RulesInvalid: there is none.
    """
    for name in sorted(families(), key=lambda name: name != family):
        file = f"{name}.toml"
        text = (files(__package__) / "presets" / file).read_text(encoding="utf-8")
        model_types = model_types_of(text, file)
        if family == name or family in model_types:
            return Preset(
                family=name, model_types=model_types, spellings=parse_rules(text, file, SPELLINGS)
            )
    raise RulesInvalid(
        f"there is no preset for models of type {family!r}; there are {', '.join(families())}; "
        "write a rule file of your own"
    )
