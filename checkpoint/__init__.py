"""Checkpoints of sharded state, in a universal stored format and in the memory of nodes.

`save` and `load` need no other part of keepstep; they run in one process or as a collective of a
torch process group. `Saver` saves while training goes on.
"""

from __future__ import annotations

if __name__ != "keepstep.checkpoint":
    raise ImportError(
        f"{__name__} is a folder of keepstep's source tree; import keepstep.checkpoint"
    )

from typing import TYPE_CHECKING, Any

from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointExists,
    CheckpointMissing,
    CheckpointTooNew,
    FormatUnsupported,
    LayoutMismatch,
    MemoryShort,
    ProcessEnded,
    RankFailed,
    RulesInvalid,
    SnapshotInvariantViolated,
    SnapshotUnavailable,
    StateChanged,
)
from keepstep.checkpoint.format.layout.descriptions import Average, Descriptions, Scale
from keepstep.checkpoint.format.layout.part_table import Part, PartTable

if TYPE_CHECKING:
    from keepstep.checkpoint.api import SaveHandle, Saver, load, save
    from keepstep.checkpoint.live.flat_fragment import FlatFragment

__all__ = [
    "Average",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointExists",
    "CheckpointMissing",
    "CheckpointTooNew",
    "Descriptions",
    "FlatFragment",
    "FormatUnsupported",
    "LayoutMismatch",
    "MemoryShort",
    "Part",
    "PartTable",
    "ProcessEnded",
    "RankFailed",
    "RulesInvalid",
    "SaveHandle",
    "Saver",
    "Scale",
    "SnapshotInvariantViolated",
    "SnapshotUnavailable",
    "StateChanged",
    "load",
    "save",
]


def __getattr__(name: str) -> Any:
    # The snapshot server imports this package, and must start without importing PyTorch.
    if name in ("SaveHandle", "Saver", "load", "save"):
        from keepstep.checkpoint import api

        return getattr(api, name)
    if name == "FlatFragment":
        from keepstep.checkpoint.live.flat_fragment import FlatFragment

        return FlatFragment
    raise AttributeError(f"module 'keepstep.checkpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
