"""How many examples a property test draws: fewer in `make check`, more in a search."""

from __future__ import annotations

from hypothesis import settings

_FACTORS = {"quick": 0.2, "steady": 1, "explore": 10}


def examples(steady: int) -> int:
    """Return the number under this run's profile of what are `steady` examples in `make test`."""
    return round(steady * _FACTORS[settings.get_current_profile_name()])
