"""Finds where ranks diverged: different collectives with the same number in one communicator.

This is the classic silent deadlock: one rank skips a call, or calls with another size, and every
later call of the communicator is paired with the wrong one. The ranks in the minority at the first
number that differs are named; without a majority, no rank is.
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
    """The first number at which ranks of a communicator called different operations.

    Args:
        communicator: its id.
        number: sequence number in the communicator.
        calls: ranks by the signature of their call.
    """

    communicator: int
    number: int
    calls: Mapping[int, tuple[int, ...]]

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks whose call differs from the majority's, ascending; empty without a majority."""
        majority = max(self.calls.values(), key=len)
        total = sum(map(len, self.calls.values()))
        if 2 * len(majority) <= total:
            return ()
        return tuple(
            sorted(rank for ranks in self.calls.values() if ranks is not majority for rank in ranks)
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks whose call at this number is known."""
        return tuple(sorted(rank for ranks in self.calls.values() for rank in ranks))

    def describe_calls(self) -> tuple[str, ...]:
        """Return one line for each different call, for people.

        The most frequent call first; at most four ranks of each by name.
        """
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
    """Return the first mismatch of one communicator's collectives; None if there is none.

    Args:
        frontiers: dtype FRONTIER, of this communicator's collectives only. Earlier mismatches than
            their `history` holds are not found.
    """
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
