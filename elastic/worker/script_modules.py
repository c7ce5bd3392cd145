"""Lists the modules of installed packages that a script has imported, and imports them elsewhere.

A process that will run the script in another's place imports them while it waits for that.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterable

_FOLDERS = frozenset({"site-packages", "dist-packages"})
"""Names of the folders that packages are installed in."""


def imported_modules(before: Collection[str]) -> tuple[str, ...]:
    """Return the names of installed packages' modules, in the order of their import.

    The script's own modules are left out: their import may do anything.

    Args:
        before: names that are left out, as they are imported everywhere.
    """
    return tuple(
        name
        for name, module in list(sys.modules.items())
        if name not in before
        and name != "__main__"
        and not _FOLDERS.isdisjoint((getattr(module, "__file__", None) or "").split("/"))
    )


def import_modules(names: Iterable[str]) -> None:
    """Import modules; what fails here is left to the script, which reports it."""
    for name in names:
        if name in sys.modules:
            continue
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - any error of a foreign module, which may need the script
            continue
