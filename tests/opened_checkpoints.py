"""Opens checkpoints of any format in one call, as `keepstep ckpt` does in two."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.checkpoint.conversion.opened import Opened, locate, open_place
from keepstep.checkpoint.foreign.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.foreign.opening import locate_foreign, open_located
from keepstep.checkpoint.foreign.rank_cuts import RankRules
from keepstep.checkpoint.foreign.recognition import Format


def open_any(url: str, parameter_names: Sequence[str] | None = None) -> Opened:
    """Open the checkpoint at a URL. Raises what `locate` and `open_place` do."""
    return open_place(locate(url), parameter_names)


def open_foreign(
    url: str,
    form: Format | None = None,
    parameter_names: Sequence[str] | None = None,
    rank_rules: RankRules | None = None,
) -> ForeignCheckpoint:
    """Open another tool's checkpoint. Raises what `locate_foreign` and `open_located` do."""
    return open_located(url, locate_foreign(url, form), parameter_names, rank_rules)
