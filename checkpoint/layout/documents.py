"""Documents (the parts of a state that are not tensors), merged over the ranks that hold them.

Pure, and without torch: snapshot servers use it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from keepstep.checkpoint.layout.boxes import Json

GROUPS = "optim/groups"
SCALARS = "optim/scalars"
TIED = "model/tied"
PARTS = "parts"


def merged_documents(documents_of_ranks: Iterable[Mapping[str, Json]]) -> dict[str, Json]:
    """Return the documents of all ranks as one mapping.

    Pipeline stages have different parameters, and each rank knows those of its own stage only.
    """
    merged: dict[str, Json] = {}
    grouped: set[str] = set()
    for documents in documents_of_ranks:
        for name, content in documents.items():
            if name in (SCALARS, TIED, PARTS):
                merged[name] = {**merged.get(name, {}), **content}
            elif name == GROUPS:
                added = [group for group in content if not grouped.issuperset(group["parameters"])]
                grouped.update(parameter for group in added for parameter in group["parameters"])
                merged[name] = [*merged.get(name, []), *added]
            else:
                merged[name] = content
    return merged
