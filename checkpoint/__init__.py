"""keepstep's checkpoints: sharded state in a universal stored format, and in the memory of its nodes.

`save` and `load` work on their own, in one process or as a collective of a torch process group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoint.api import load, save

__all__ = ["load", "save"]


def __getattr__(name: str) -> Any:
    # The snapshot server imports this package too, and must start without PyTorch.
    if name in __all__:
        from checkpoint import api

        return getattr(api, name)
    raise AttributeError(f"module 'checkpoint' has no attribute {name!r}")
