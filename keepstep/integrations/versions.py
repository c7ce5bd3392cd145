"""Says when a framework has another version than those that were tried."""

from __future__ import annotations

import logging
from collections.abc import Collection

log = logging.getLogger("keepstep")


def warn_if_untried(package: str, version: str, tried: Collection[str]) -> None:
    """Log a warning if a version does not begin with one of those that were tried."""
    if not version.startswith(tuple(f"{begin}." for begin in tried)):
        log.warning(
            "keepstep.integrations.%s was tried with %s %s, and this is %s: what it reads of the "
            "framework may have changed",
            package,
            package,
            ", ".join(sorted(tried)),
            version,
        )
