"""Opens checkpoints of any format in one call, as `keepstep ckpt` does in two."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.checkpoint.conversion.opened import Opened, locate, open_place


def open_any(url: str, parameter_names: Sequence[str] | None = None) -> Opened:
    """Open the checkpoint at a URL. Raises what `locate` and `open_place` do."""
    return open_place(locate(url), parameter_names)
