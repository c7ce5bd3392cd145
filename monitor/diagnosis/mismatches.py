"""Where ranks parted: collectives that bear the same number in one communicator, and are not the same.

The classic silent deadlock: one rank skips a call, or calls with another size, and every later call of the communicator pairs with the
wrong one. Whoever is in the minority at the first number that differs is named; with no majority, nobody is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from keepstep.monitor.diagnosis.signatures import describe
from keepstep.monitor.diagnosis.tables import HISTORY


@dataclass(frozen=True, slots=True)
class CollectiveMismatch:
    """The first number at which ranks of a communicator called different things.

    Args:
        communicator: its id.
        number: in the communicator.
        calls: what was called, and by which ranks.
    """

    communicator: int
    number: int
    calls: Mapping[int, tuple[int, ...]]

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks that called otherwise than most, ascending; empty if there is no majority."""
        most = max(self.calls.values(), key=len)
        total = sum(map(len, self.calls.values()))
        if 2 * len(most) <= total:
            return ()
        return tuple(
            sorted(rank for ranks in self.calls.values() if ranks is not most for rank in ranks)
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks whose call at this number is known."""
        return tuple(sorted(rank for ranks in self.calls.values() for rank in ranks))

    def told(self) -> tuple[str, ...]:
        """Return who called what, for people; most first, at most four ranks by name."""
        lines = []
        for signature, ranks in sorted(
            self.calls.items(), key=lambda item: (-len(item[1]), item[1])
        ):
            names = ", ".join(map(str, ranks[:4])) + (
                f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
            )
            lines.append(f"operation {self.number}: {describe(signature)} at rank {names}")
        return tuple(lines)


def first_mismatch(frontiers: np.ndarray) -> CollectiveMismatch | None:
    """Return where the ranks of one communicator parted, as far as frontiers (its collectives' alone) remember."""
    if len(frontiers) < 2:
        return None
    entered = frontiers["entered"].astype(np.int64)
    newest = int(entered.max())
    for number in range(max(1, newest - 2 * HISTORY), newest + 1):
        known = (entered >= number) & (entered < number + HISTORY)
        calls = frontiers["history"][:, number % HISTORY]
        known &= calls != 0
        if known.sum() < 2 or len(np.unique(calls[known])) < 2:
            continue
        by_call: dict[int, list[int]] = defaultdict(list)
        for rank, call in zip(
            frontiers["rank"][known].tolist(), calls[known].tolist(), strict=True
        ):
            by_call[call].append(rank)
        return CollectiveMismatch(
            int(frontiers["communicator"][0]),
            number,
            {call: tuple(sorted(ranks)) for call, ranks in by_call.items()},
        )
    return None
