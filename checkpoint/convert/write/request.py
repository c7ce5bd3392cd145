"""Describes a conversion's task as values: any process that has them opens the same source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.checkpoint.convert.read.megatron_settings import MEGATRON
from keepstep.checkpoint.convert.write.opened import (
    Checkpoint,
    open_location,
    without_wrapper_names,
)
from keepstep.checkpoint.convert.write.rules_given import apply_naming_rules, rank_rules
from keepstep.checkpoint.convert.write.selection import Selection
from keepstep.checkpoint.errors import RulesInvalid
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.documents import CONFIG
from keepstep.checkpoint.format.layout.location import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionRequest:
    """The checkpoint to read, and the conversion to apply.

    Attributes:
        location: the checkpoint to read.
        parameter_names: names of the optimizer's parameters in the order of its groups, for formats
            that number them.
        keeps_wrappers: keep the names of modules that only wrap another one.
        rules: a file of rules, or FAMILY:FROM:TO of a preset; None for none.
        config: the model's configuration, for rules; None for that of the checkpoint.
        only_model: leave out all but the model.
        model_dtype: data type of the model's floating-point tensors; None keeps theirs.
    """

    location: Location
    parameter_names: tuple[str, ...] | None = None
    keeps_wrappers: bool = False
    rules: str | None = None
    config: Mapping[str, Json] | None = None
    only_model: bool = False
    model_dtype: str | None = None

    def open(self) -> Checkpoint:
        """Open the checkpoint, in the spelling that was asked for.

        Raises:
            CheckpointError: it cannot be opened, or the rules do not fit it.
        """
        opened = self.open_before_rules()
        if self.rules is None:
            return opened
        return apply_naming_rules(opened, self.rules, configuration(opened, self.config))

    def open_before_rules(self) -> Checkpoint:
        """Open the checkpoint under the names that rules are given.

        Raises:
            CheckpointError: it cannot be opened, or what rules say of ranks does not fit it.
        """
        # Before it is opened, what a checkpoint says of its configuration is not known.
        of_ranks = None if self.rules is None else rank_rules(self.rules, self.config or {})
        opened = open_location(self.location, self.parameter_names, of_ranks)
        return opened if self.keeps_wrappers else without_wrapper_names(opened)

    def select(self, opened: Checkpoint) -> Selection:
        """Return what of the opened checkpoint is written.

        Raises:
            LayoutMismatch: the data type is none that can be rounded to.
        """
        return Selection(
            whole=opened.source, only_model=self.only_model, model_dtype=self.model_dtype
        )

    def spelling(self) -> Json:
        """Return as JSON what of the request decides how tensors are called and laid out."""
        return [self.parameter_names, self.keeps_wrappers, self.rules, self.config]


def configuration(opened: Checkpoint, given: Mapping[str, Json] | None) -> Mapping[str, Json]:
    """Return the model's configuration: what is given, else the checkpoint's; empty without.

    Settings that only Megatron's checkpoints have, such as the padded vocabulary, are added.

    Raises:
        RulesInvalid: it is no JSON object.
    """
    content = opened.source.documents.get(CONFIG, {}) if given is None else given
    if not isinstance(content, Mapping):
        raise RulesInvalid("the model's configuration is no JSON object; give one that is")
    megatron = opened.source.documents.get(MEGATRON) or {}
    return {**megatron.get("model", {}), **content}


def seen_in(chosen: Selection) -> str:
    """Return a digest of what a selection has, by which processes know that they see the same."""
    tensors = {key: [spec.dtype, spec.shape] for key, spec in chosen.tensors.items()}
    content = json.dumps([chosen.step, tensors]).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()
