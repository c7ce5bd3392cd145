"""Opens checkpoints of any format in one call, as `keepstep ckpt` does in two."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.opening import locate_foreign, open_located
from keepstep.checkpoint.convert.rules.rank_shards import RankRules
from keepstep.checkpoint.convert.write.opened import Checkpoint, locate, open_location
from keepstep.checkpoint.format.layout.location import Format, Location


def open_any(url: str, parameter_names: Sequence[str] | None = None) -> Checkpoint:
    """Open the checkpoint at a URL. Raises what `locate` and `open_location` do."""
    return open_location(locate(url), parameter_names)


def open_foreign(
    url: str,
    form: Format | None = None,
    parameter_names: Sequence[str] | None = None,
    rank_rules: RankRules | None = None,
) -> ForeignCheckpoint:
    """Open another tool's checkpoint. Raises what `locate_foreign` and `open_located` do."""
    return open_located(locate_foreign(Location(url, form)), parameter_names, rank_rules)
