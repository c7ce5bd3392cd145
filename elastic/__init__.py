"""keepstep's elastic runtime: wrap a training loop with `join`, and it keeps in step while machines fail, slow down, leave and join."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.trainer import Job, State, Step, World, join

__all__ = ["Job", "State", "Step", "World", "join"]


def __getattr__(name: str) -> Any:
    # Agents import this package too, and have no use for PyTorch.
    if name in __all__:
        from elastic import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'elastic' has no attribute {name!r}")
