"""Evaluates the user's device mesh: its dimensions' sizes, or a rule that gives them.

Pure. A rule is a function of the number of ranks. It is called once for every number, so that
agents know in advance which ones fit, and again when a generation is entered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.rank_limits import MOST_RANKS, RankLimits

MeshSizes = Mapping[str, int]
"""Sizes of dimensions by name, the outermost first."""
Mesh = MeshSizes | Callable[[int], MeshSizes | None]

_OWN_SAMPLES = ("dp", "ep", "fsdp", "ddp", "replicate", "shard")
_SAME_SAMPLES = ("tp", "cp", "pp", "sp", "etp")


class MeshRule:
    """The mesh of each number of ranks, as `keepstep.join(mesh=...)` gives it.

    Args:
        mesh: sizes by name, of which one may be -1; or a function of the number of ranks that
            returns such sizes, and None where that number does not fit. None: `{"dp": -1}`.

    Raises:
        UsageError: sizes or names are invalid.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self._mesh: Mesh = {"dp": -1} if mesh is None else mesh
        if not callable(self._mesh):
            _check(self._mesh)

    def sizes(self, world_size: int) -> dict[str, int] | None:
        """Return the sizes for a number of ranks, whose product it is; None if it does not fit.

        Raises:
            UsageError: the rule raises, or returns sizes of another number of ranks.
        """
        if not callable(self._mesh):
            return resolved(self._mesh, world_size)
        try:
            given = self._mesh(world_size)
        except Exception as error:
            raise UsageError(
                f"mesh= raised {error!r} for {world_size} ranks; let it return None for a number "
                "of ranks that does not fit"
            ) from error
        if given is None:
            return None
        _check(given)
        sizes = resolved(given, world_size)
        if sizes is None and -1 not in given.values():
            raise UsageError(
                f"mesh= returned {dict(given)} for {world_size} ranks, which has places for "
                f"{math.prod(given.values())}; let it return None where a number does not fit"
            )
        return sizes

    def limits(self) -> RankLimits:
        """Return which numbers of ranks fit.

        Raises:
            UsageError: as `sizes` raises for any of them, or none fits.
        """
        if not callable(self._mesh):
            multiple = math.prod(size for size in self._mesh.values() if size > 0)
            has_free = -1 in self._mesh.values()
            return RankLimits(multiple, 0 if has_free else multiple)
        fitting = [ranks for ranks in range(1, MOST_RANKS + 1) if self.sizes(ranks) is not None]
        if not fitting:
            raise UsageError(f"mesh= returned None for each number of ranks up to {MOST_RANKS}")
        return RankLimits.of(fitting)


def resolved(sizes: MeshSizes, world_size: int) -> dict[str, int] | None:
    """Return sizes with the number in place of -1; None if their product is not the world size."""
    fixed = math.prod(size for size in sizes.values() if size > 0)
    if world_size % fixed or (world_size != fixed and -1 not in sizes.values()):
        return None
    return {name: world_size // fixed if size == -1 else size for name, size in sizes.items()}


def has_own_samples(name: str) -> bool:
    """Whether ranks that differ in a dimension compute different samples of a batch.

    Experts are spread over ranks that each have samples of their own and exchange tokens. Ranks of
    a tensor, a sequence or a pipeline are parts of one computation.
    """
    return name.startswith(_OWN_SAMPLES)


def data_share(sizes: MeshSizes, rank: int) -> tuple[int, int]:
    """Return which share of each global batch a rank computes, and the number of shares.

    Args:
        sizes: the mesh's dimensions, of which the last one's neighbours have successive ranks.
        rank: the rank.
    """
    data_rank, data_size = 0, 1
    for name, size in reversed(list(sizes.items())):
        rank, coordinate = divmod(rank, size)
        if has_own_samples(name):
            data_rank += coordinate * data_size
            data_size *= size
    return data_rank, data_size


def _check(sizes: Any) -> None:
    if not isinstance(sizes, Mapping) or not sizes:
        raise UsageError(f"mesh {sizes!r}: give sizes by name, such as {{'dp': -1, 'tp': 2}}")
    values = list(sizes.values())
    if values.count(-1) > 1 or any(
        not isinstance(size, int) or size == 0 or size < -1 for size in values
    ):
        raise UsageError(f"mesh {dict(sizes)}: sizes must be positive, and at most one may be -1")
    for name in sizes:
        if not isinstance(name, str) or not name.startswith((*_OWN_SAMPLES, *_SAME_SAMPLES)):
            raise UsageError(
                f"mesh {dict(sizes)}: whether ranks of dimension {name!r} compute the same samples "
                f"follows from its name: let it begin with {' or '.join(_OWN_SAMPLES)} if each has "
                f"samples of its own, or with {', '.join(_SAME_SAMPLES)} if all have the same"
            )
