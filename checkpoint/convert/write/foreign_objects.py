"""Pickles objects of classes that are not installed here, by the names of their classes.

DeepSpeed's loader uses attributes of a few objects of its own. Nothing of DeepSpeed is needed to
write them: a pickle has the class's name and the attributes.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class ForeignObject:
    """An object, by its class's module and name, with its attributes."""

    module: str
    name: str
    attributes: Mapping[str, object]


# Its members are not declared to type checkers.
_PythonPickler: Any = pickle._Pickler


class _Pickler(_PythonPickler):  # type: ignore[misc]
    """Pickles a `ForeignObject` as one of its class, without calling its constructor."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if not isinstance(obj, ForeignObject):
            super().save(obj, save_persistent_id)
            return
        if known := self.memo.get(id(obj)):
            self.write(self.get(known[0]))
            return
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.memoize(obj)
        self.save(dict(obj.attributes))
        self.write(pickle.BUILD)


PICKLE_MODULE = SimpleNamespace(__name__="pickle", Pickler=_Pickler)
"""A `pickle_module` for `torch.save`, to save a tree with such objects."""
