"""Documents (the parts of a state that are not tensors), merged over the ranks that hold them.

Pure, and without torch: snapshot servers use it too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

from keepstep.checkpoint.format.layout.boxes import Json

GROUPS = "optim/groups"
SCALARS = "optim/scalars"
TIED = "model/tied"
PARTS = "parts"
PADDING = "padding"
MASTERS = "masters"
AVERAGES = "averages"
SCALES = "scales"
SUBCLASSES = "subclasses"
PROVENANCE = "provenance"
CONFIG = "config"
VALUES = "values"
"""The document that holds the JSON values that a caller gave, by name."""

WITHOUT_SLOTS = "optim/without slots"
"""The document of a shard in memory that lists parameters of which no rank has slots: nobody is to
be asked for them. What is stored does not have it."""

_BY_TENSOR = frozenset({SCALARS, TIED, PARTS, PADDING, MASTERS, AVERAGES, SCALES, SUBCLASSES})
"""Documents with an entry for each tensor that they are about: ranks have different ones."""

OF_OWN_TENSORS = _BY_TENSOR | {GROUPS}
"""Documents in which each rank says only what it knows of its own tensors."""


def merged_documents(documents_of_ranks: Iterable[Mapping[str, Json]]) -> dict[str, Json]:
    """Return the documents of all ranks, in their order, as one mapping.

    Pipeline stages have different parameters, and each rank knows those of its own stage only; a
    rank may also give values that others do not give. Of values of one name, and of other
    documents, the last rank's count, of the provenance the first's.
    """
    merged: dict[str, Json] = {}
    grouped: set[str] = set()
    for documents in documents_of_ranks:
        for name, content in documents.items():
            if name in _BY_TENSOR or name == VALUES:
                merged[name] = {**merged.get(name, {}), **content}
            elif name == GROUPS:
                added = [group for group in content if not grouped.issuperset(group["parameters"])]
                grouped.update(parameter for group in added for parameter in group["parameters"])
                merged[name] = [*merged.get(name, []), *added]
            elif name != WITHOUT_SLOTS and (name != PROVENANCE or name not in merged):
                merged[name] = content
    return merged


def document_digests(documents: Mapping[str, Json]) -> dict[str, str]:
    """Return the digest of each document, by name."""
    return {
        name: hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
        for name, content in documents.items()
    }


def last_holders(digests_of_ranks: Sequence[Mapping[str, str]]) -> dict[tuple[str, str], int]:
    """Return the last rank that has each document, by the document's name and digest.

    What these ranks have is all that `merged_documents` needs: of values that differ the last
    rank's count.

    Args:
        digests_of_ranks: what `document_digests` returned on each rank.
    """
    return {
        (name, digest): rank
        for rank, digests in enumerate(digests_of_ranks)
        for name, digest in digests.items()
    }
