"""Joins the objects that a framework's state consists of with those that its user adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keepstep.elastic.errors import UsageError


def joined_extra(own: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return both, as `extra` of `keepstep.attach`.

    Args:
        own: what the integration takes of the framework.
        given: the user's option `extra`.

    Raises:
        UsageError: a name is in both, so that a part of the framework's state would be lost.
    """
    given = given or {}
    if taken := sorted(own.keys() & given):
        raise UsageError(
            f"extra={taken[0]!r} is the name of a part of the framework's own state: choose another"
        )
    return {**own, **given}
