"""JSON as it is stored, and the check of its numbers. Pure."""

from __future__ import annotations

import json
from typing import Any

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Json


def encode(content: Json) -> bytes:
    """Return JSON as it is stored: UTF-8, compact, keys in the order given.

    Numbers must be finite, as JSON's are; see `keepstep.checkpoint.format.stored.strict_json`.
    """
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def decode(data: bytes, where: str) -> Any:
    """Parse stored JSON.

    Raises:
        CheckpointDamaged: it is not JSON.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{where} is not JSON: {error}") from error


def is_count(value: Any) -> bool:
    """Return whether a parsed value is a count: an integer that 63 bits hold, not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
