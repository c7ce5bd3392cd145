"""Merges documents, the parts of a state that are not tensors, over the ranks that hold them.

Pure, and without torch: snapshot servers use it too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

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
"""The document of a shard in memory that lists parameters without slots on any rank, so that no
rank is asked for them. Stored checkpoints do not have it."""

_BY_TENSOR = frozenset({SCALARS, TIED, PARTS, PADDING, MASTERS, AVERAGES, SCALES, SUBCLASSES})
"""Documents with an entry for each tensor that they describe: ranks have different ones."""

OF_OWN_TENSORS = _BY_TENSOR | {GROUPS}
"""Documents in which each rank describes its own tensors only."""


def merged_documents(documents_of_ranks: Iterable[Mapping[str, Json]]) -> dict[str, Json]:
    """Return the documents of all ranks, in their order, as one mapping.

    Pipeline stages have different parameters, and each rank knows those of its own stage only; a
    rank may also give values that others do not give. If ranks have different values under one
    name, or different documents, the last rank's count; for the provenance, the first rank's.
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

    These ranks' documents are all that `merged_documents` needs: where values differ, the last
    rank's count.

    Args:
        digests_of_ranks: the result of `document_digests` on each rank.
    """
    return {
        (name, digest): rank
        for rank, digests in enumerate(digests_of_ranks)
        for name, digest in digests.items()
    }


@cache
def release_of(package: str) -> str:
    """Return an installed package's version; `unknown` for a source tree that is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
