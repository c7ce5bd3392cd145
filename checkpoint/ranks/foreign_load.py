"""Loads other tools' checkpoints, and keepstep's own by rules or with quantized weights.

This module imports the converters. `checkpoint.api` imports it where such a checkpoint is met, so
that a training worker loads none of them.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace

from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint, summary
from keepstep.checkpoint.convert.rules.rank_shards import RankRules
from keepstep.checkpoint.convert.write.dequantized import (
    Dequantized,
    dequantized,
    describe_dequantized,
)
from keepstep.checkpoint.convert.write.opened import Checkpoint, without_wrapper_names
from keepstep.checkpoint.convert.write.renaming import RenamedSource
from keepstep.checkpoint.convert.write.request import configuration
from keepstep.checkpoint.convert.write.rules_given import apply_naming_rules, rank_rules
from keepstep.checkpoint.errors import RulesInvalid
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.completeness import (
    Requested,
)
from keepstep.checkpoint.format.layout.location import Location
from keepstep.checkpoint.format.layout.source import Source
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.stored_json import to_strict_json
from keepstep.checkpoint.live.fills import fill
from keepstep.checkpoint.live.state_mapping import (
    StateMapping,
    optimizer_orders,
)
from keepstep.checkpoint.live.tensors import LiveState
from keepstep.checkpoint.ranks.control_group import ControlGroup
from keepstep.checkpoint.ranks.fill_state import (
    LoadOptions,
    LoadReport,
    fill_state,
    fitted_source,
    planned,
)
from keepstep.checkpoint.ranks.shared_foreign import find_foreign_together, open_foreign_together

log = logging.getLogger("keepstep")


def load_foreign(
    location: Location,
    state: StateMapping,
    options: LoadOptions,
    group: ControlGroup,
    step: int | None,
) -> LoadReport | None:
    """Load another tool's checkpoint; None if none is found at a location without a format."""
    found = None
    if location.format is None:
        found = find_foreign_together(location.url, group, step)
        if found is None:
            return None
    of_ranks = group.run_on_all_ranks(lambda: _rank_rules(options))
    # Rules lead to the module's names from others.
    orders = None if options.rules else group.run_on_all_ranks(lambda: optimizer_orders(state))
    source = open_foreign_together(
        location, group, found, step=step, parameter_names=orders, rank_rules=of_ranks
    )
    opened = Checkpoint(source, source.format_name, source.left_out)
    return _load_by_each(opened, source.url, state, options, group)


def load_stored_by_each(
    source: StoredCheckpoint,
    url: str,
    state: StateMapping,
    options: LoadOptions,
    group: ControlGroup,
) -> LoadReport:
    """Load a checkpoint of keepstep's own, of which each rank reads what it wants."""
    return _load_by_each(Checkpoint(source, "keepstep"), url, state, options, group)


def _load_by_each(
    opened: Checkpoint, url: str, state: StateMapping, options: LoadOptions, group: ControlGroup
) -> LoadReport:
    """Fill a state from a checkpoint, of which each rank reads what it wants."""
    opened, digests = group.run_and_share(lambda: _renamed(opened, options), _naming_digest)
    for number, digest in zip(group.global_ranks, digests, strict=True):
        if digest != digests[0]:
            raise RulesInvalid(
                f"{url}: rules lead to other tensors on rank {number} than on rank "
                f"{group.global_ranks[0]}; give all ranks the same rules and the same configuration"
            )
    source = opened.source
    assert isinstance(source, ForeignCheckpoint | RenamedSource | StoredCheckpoint)

    def fill_tensors(source: Source, live: LiveState, requested: Requested) -> str:
        def fill_own() -> str:
            fitting = fitted_source(live, source, requested, options)
            fill(planned(live, fitting, requested, options), fitting)
            return describe_dequantized(fitting) if isinstance(fitting, Dequantized) else ""

        return f"from {opened.format_name}{group.run_on_all_ranks(fill_own)}"

    loaded = fill_state(
        lambda: source,
        opened.format_name,
        url,
        state,
        options,
        group,
        fill_tensors,
        opened.left_out,
    )
    if group.rank == 0:
        for line in summary(opened.left_out):
            log.warning("%s: left out %s", url, line)
    return loaded


def _renamed(opened: Checkpoint, options: LoadOptions) -> Checkpoint:
    """Return a checkpoint in the spelling that rules lead to, if there are any."""
    if options.rules is None:
        return opened
    clean = without_wrapper_names(opened)
    if options.convert:
        clean = replace(clean, source=dequantized(clean.source))
    return apply_naming_rules(clean, options.rules, configuration(clean, options.config))


def _naming_digest(opened: Checkpoint) -> Json:
    """Return a digest of the renamed source, to compare across ranks; None without rules."""
    source = opened.source
    if not isinstance(source, RenamedSource):
        return None
    made = (sorted(source.plan.tensors.items()), to_strict_json(dict(source.documents)))
    return hashlib.blake2b(repr(made).encode(), digest_size=16).hexdigest()


def _rank_rules(options: LoadOptions) -> RankRules | None:
    return None if options.rules is None else rank_rules(options.rules, options.config or {})
