"""Returns versions of installed packages, for documents that name their writer."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def release_of(package: str) -> str:
    """Return an installed package's version; `unknown` for a source tree that is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
