"""Interprets names of tensors, and checks that they can be paths of groups and objects.

Pure. Writers refuse a bad name before any byte is written; readers refuse it before any path is
built from it.
"""

from __future__ import annotations

from collections.abc import Collection

MODEL_PREFIX = "model/"
OPTIMIZER_PREFIX = "optim/"

_RESERVED_ROOTS = frozenset(
    {
        "parts",
        "packs",
        "chunks.json",
        "manifest.json",
        "documents.json",
        "zarr.json",
        "removed.json",
    }
)
# File systems allow 255 bytes in a name, and a file being written carries a suffix.
_MAX_NBYTES = 200


def parameter_of(key: str) -> str:
    """Return the key of the parameter that an optimizer slot belongs to; any other key itself."""
    if not key.startswith(OPTIMIZER_PREFIX):
        return key
    return f"{MODEL_PREFIX}{key.removeprefix(OPTIMIZER_PREFIX).rpartition('/')[0]}"


def check_keys(keys: Collection[str]) -> None:
    """Refuse keys that cannot name arrays of one hierarchy.

    Raises:
        ValueError: a key is malformed, or is also a group of another.
    """
    for key in keys:
        parts = key.split("/")
        if parts[0] in _RESERVED_ROOTS:
            raise ValueError(f"{key!r}: {parts[0]!r} is reserved by the format")
        for part in parts:
            if not part or part in (".", "..", "zarr.json") or part.startswith("__"):
                raise ValueError(f"{key!r}: {part!r} cannot be part of a name")
            if not part.isprintable() or "\\" in part or len(part.encode()) > _MAX_NBYTES:
                raise ValueError(
                    f"{key!r}: names must be printable, without backslash, and at most "
                    f"{_MAX_NBYTES} bytes long"
                )
    known = set(keys)
    for key in keys:
        parts = key.split("/")
        for depth in range(1, len(parts)):
            group = "/".join(parts[:depth])
            if group in known:
                raise ValueError(f"{group!r} is a tensor, so {key!r} cannot lie inside it")


def is_text(value: str) -> bool:
    """Return whether UTF-8 can encode a text: it has no half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
