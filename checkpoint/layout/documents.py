"""The documents of a state that several ranks hold parts of. Pure, and without torch: snapshot servers use it too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from keepstep.checkpoint.layout.boxes import Json

GROUPS = "optim/groups"
SCALARS = "optim/scalars"
TIED = "model/tied"


def merged_documents(held: Iterable[Mapping[str, Json]]) -> dict[str, Json]:
    """Return the documents of all ranks as one; pipeline stages have different parameters, and each knows its own only."""
    merged: dict[str, Json] = {}
    grouped: set[str] = set()
    for documents in held:
        for name, content in documents.items():
            if name in (SCALARS, TIED):
                merged[name] = {**merged.get(name, {}), **content}
            elif name == GROUPS:
                fresh = [group for group in content if not grouped.issuperset(group["parameters"])]
                grouped.update(parameter for group in fresh for parameter in group["parameters"])
                merged[name] = [*merged.get(name, []), *fresh]
            else:
                merged[name] = content
    return merged
