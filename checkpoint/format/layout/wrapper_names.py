"""Removes the names of wrapper modules from the names of a model's tensors.

Pure. A checkpoint names tensors as the bare model does, so that it loads with or without a wrapper.
Converted checkpoints may have wrappers' names that nothing distinguished from the model's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.described import REFERRING
from keepstep.checkpoint.format.layout.documents import (
    AVERAGES,
    GROUPS,
    MASTERS,
    PADDING,
    PARTS,
    SCALARS,
    SCALES,
    TIED,
)

_Tensor = TypeVar("_Tensor")

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
"""Attributes in which FSDP1, activation checkpointing and `torch.compile` hold their module; no
others use them."""

PARALLEL = "module"
"""The attribute in which `DistributedDataParallel` holds its module; others may use it too."""


def without_wrappers(name: str, parallel: Collection[str] = ()) -> str:
    """Return a name without those of wrappers.

    Args:
        name: of a tensor or module, with dots.
        parallel: which parts `module` are wrappers' as well: the name up to such a part, without
            `_WRAPPERS`.
    """
    kept: list[str] = []
    path: list[str] = []
    for part in name.split("."):
        if part in _WRAPPERS:
            continue
        path.append(part)
        if not (part == PARALLEL and parallel and ".".join(path) in parallel):
            kept.append(part)
    return ".".join(kept)


def may_have_wrappers(keys: Iterable[str]) -> bool:
    """Return whether a part of any of these keys is a name that a wrapper may have."""
    names = {*_WRAPPERS, PARALLEL}
    return any(not names.isdisjoint(key.replace("/", ".").split(".")) for key in keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNames:
    """The way a checkpoint names the tensors of a model. Made by `of`.

    Attributes:
        keys: the stored keys that have names of wrappers, by the keys without.
        is_parallel: whether the outermost `module` in all names is a wrapper's.
    """

    keys: Mapping[str, str]
    is_parallel: bool

    @classmethod
    def of(cls, keys: Collection[str], names: Collection[str]) -> StoredNames:
        """Return the way tensors are named.

        Args:
            keys: those of a checkpoint, maybe a converted one.
            names: of all ranks' parameters, without wrappers. A rank's own are not enough: ranks
                would interpret a checkpoint's names differently.
        """
        # Any module may have the name `module`. It is a wrapper's if all tensors have it, and the
        # model to load into has more of the names without it: it may have such a module, too.
        kinds = (key.partition("/") for key in keys)
        stored = {without_wrappers(name) for kind, _, name in kinds if kind == "model"}
        is_parallel = (
            bool(stored)
            and all(name.startswith(f"{PARALLEL}.") for name in stored)
            and _common(names, {name.removeprefix(f"{PARALLEL}.") for name in stored})
            > _common(names, stored)
        )
        without_keys = cls(keys={}, is_parallel=is_parallel)
        renamed = ((without_keys._without_wrappers(key), key) for key in keys)
        return cls(
            keys={clean: key for clean, key in renamed if clean != key and clean not in keys},
            is_parallel=is_parallel,
        )

    def rename(self, name: str) -> str:
        """Return a stored name without those of wrappers."""
        return without_wrappers(name, (PARALLEL,) if self.is_parallel else ())

    def renamed(self, tensors: Mapping[str, _Tensor]) -> dict[str, _Tensor]:
        """Return stored objects by their keys without wrappers."""
        clean_keys = {stored: clean for clean, stored in self.keys.items()}
        return {clean_keys.get(key, key): tensor for key, tensor in tensors.items()}

    def documents(self, documents: Mapping[str, Json]) -> dict[str, Json]:
        """Return stored documents in which parameters are named without wrappers."""
        rename = self.rename
        renamed = dict(documents)
        if GROUPS in documents:
            renamed[GROUPS] = [
                {**group, "parameters": [rename(name) for name in group["parameters"]]}
                for group in documents[GROUPS]
            ]
        if SCALARS in documents:
            renamed[SCALARS] = {
                "/".join((rename(key.rpartition("/")[0]), key.rpartition("/")[2])): value
                for key, value in documents[SCALARS].items()
            }
        if TIED in documents:
            renamed[TIED] = {
                rename(alias): rename(first)
                if isinstance(first, str)
                else {**first, "name": rename(first["name"])}
                for alias, first in documents[TIED].items()
            }
        for document in (PARTS, PADDING, MASTERS, AVERAGES, SCALES):
            if document in documents:
                renamed[document] = {
                    self._described(name): self._entry(document, entry)
                    for name, entry in documents[document].items()
                }
        return renamed

    def _described(self, name: str) -> str:
        """Return a document's reference to a tensor, a key or a name, without wrappers' names."""
        return self._without_wrappers(name) if "/" in name else self.rename(name)

    def _entry(self, document: str, entry: Json) -> Json:
        if document not in (AVERAGES, SCALES):
            return entry
        references = {
            member: self._without_wrappers(entry[member]) for member in REFERRING if member in entry
        }
        return {**entry, **references}

    def _without_wrappers(self, key: str) -> str:
        kind, _, rest = key.partition("/")
        if kind not in ("model", "optim"):
            return key
        name, slash, slot = rest.rpartition("/") if kind == "optim" else (rest, "", "")
        return f"{kind}/{self.rename(name)}{slash}{slot}"


def _common(names: Collection[str], others: Collection[str]) -> int:
    """Return how many names are among others."""
    return sum(name in others for name in names)
