"""Reads the parameters of modules that were pickled as objects, without making the objects.

`torch.save(model)` pickles the module's class by name and its attributes. The class is not needed
to know the tensors: every `torch.nn.Module` keeps them in the same attributes.
"""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.checkpoint.convert.read.files import damaged
from keepstep.checkpoint.convert.read.pickled_values import Record

_MOST_MODULES = 10**5


def is_module(value: object) -> bool:
    """Return whether a value is an object with the attributes of a `torch.nn.Module`."""
    return isinstance(value, Record) and {"_parameters", "_buffers", "_modules"} <= set(
        value.attributes
    )


def module_state(module: Record, location: str) -> dict[str, object]:
    """Return what the `state_dict` of a pickled module has, by name.

    Raises:
        CheckpointDamaged: modules contain each other.
    """
    state: dict[str, object] = {}
    pending: list[tuple[str, Record]] = [("", module)]
    for _ in range(_MOST_MODULES):
        if not pending:
            return state
        prefix, current = pending.pop()
        attributes = current.attributes
        transient = attributes.get("_non_persistent_buffers_set")
        for name, value in _items(attributes, "_parameters"):
            state[f"{prefix}{name}"] = value
        for name, value in _items(attributes, "_buffers"):
            if not isinstance(transient, set) or name not in transient:
                state[f"{prefix}{name}"] = value
        inner = [
            (f"{prefix}{name}.", value)
            for name, value in _items(attributes, "_modules")
            if isinstance(value, Record)
        ]
        pending.extend(reversed(inner))
    raise damaged(location, f"it has more than {_MOST_MODULES} modules, or one contains itself")


def _items(attributes: object, name: str) -> Iterator[tuple[str, object]]:
    """Yield what a module has of one kind; None stands for what it could have and has not."""
    content = attributes.get(name) if isinstance(attributes, dict) else None
    if isinstance(content, dict):
        yield from (
            (key, value)
            for key, value in content.items()
            if isinstance(key, str) and value is not None
        )
