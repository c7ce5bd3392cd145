"""Seeds the random number generators of forked processes as those of started ones are.

Forked processes would all draw the same numbers, and Python seeds its own generator again in each.
A generator that was seeded at random on import is seeded at random in each process; one that a
module of the user has seeded keeps its seed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


def generator_states() -> dict[str, bytes]:
    """Return the state of each global generator, by the name of its library, to be compared."""
    import torch

    states = {
        "torch": bytes(torch.default_generator.get_state().numpy()),
        "random": repr(random.getstate()).encode(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, numbers, position, *_ = numpy.random.get_state()
        states["numpy"] = numbers.tobytes() + str(position).encode()
    return states


@dataclass(frozen=True, slots=True)
class Seeds:
    """The generators' states that forked processes begin with.

    Attributes:
        kept: the libraries whose generators keep their state.
        python: the state of Python's own.
    """

    kept: frozenset[str]
    python: tuple[Any, ...]

    @classmethod
    def set_since(cls, before: Mapping[str, bytes]) -> Self:
        """Keep the generators that are in another state than `generator_states` returned before."""
        now = generator_states()
        kept = frozenset(name for name, state in before.items() if now[name] != state)
        return cls(kept, random.getstate())

    def give(self) -> None:
        """Seed this process's generators, right after the fork."""
        import torch

        if "torch" not in self.kept:
            torch.default_generator.seed()
        numpy = sys.modules.get("numpy")
        if numpy is not None and "numpy" not in self.kept:
            numpy.random.seed()
        if "random" in self.kept:
            random.setstate(self.python)
