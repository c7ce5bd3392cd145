"""Locates the named parts of a fused dimension, and tensor-parallel slices of them.

Pure. A fused projection is several matrices in one: q, k and v, or gate and up. Tensor parallelism
cuts each of them, so that a rank's rows are [q_r | k_r | v_r], and the shards put one after the
other are not the unsharded matrix. A table names the parts; with it a shard is stored as pieces of
the global tensor, which are the same whatever the number of ranks.

Megatron-LM interleaves q, k and v by query group: its global order is
[q_0 | k_0 | v_0 | q_1 | k_1 | v_1 | ...]. Up to as many ranks as groups have whole groups each;
beyond that, ranks share a group's k and v.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a fused dimension.

    Args:
        name: its name, such as `q`.
        extent: its size in elements along the dimension, in all groups together.
        most_slices: the most slices it is cut into, such as the number of key and value heads; more
            ranks than that hold copies. None: as many as there are ranks.
    """

    name: str
    extent: int
    most_slices: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a part's name is a text that is not empty, not {self.name!r}")
        _check_positive(self.extent, f"part {self.name!r}: extent")
        if self.most_slices is not None:
            _check_positive(self.most_slices, f"part {self.name!r}: most_slices")
            if self.extent % self.most_slices:
                raise ValueError(
                    f"part {self.name!r}: its extent {self.extent} is not a multiple of "
                    f"most_slices={self.most_slices}"
                )


@dataclass(frozen=True, slots=True)
class PartSpan:
    """A run of elements along the fused dimension; all numbers in elements."""

    local_offset: int
    global_offset: int
    extent: int


@dataclass(frozen=True, slots=True)
class PartTable:
    """The parts of a fused dimension of a tensor.

    Args:
        axis: the fused dimension.
        parts: the parts, in their order in the tensor (in each group, if there are several).
        groups: the number of query groups by which the global tensor is interleaved,
            [q_g | k_g | v_g] for each group g; 1 for [q | k | v]. It divides every extent.

    Raises:
        ValueError: the numbers contradict each other; the message names the part.
    """

    axis: int
    parts: tuple[Part, ...]
    groups: int = 1

    def __post_init__(self) -> None:
        if type(self.axis) is not int or self.axis < 0:
            raise ValueError(f"the axis of a part table is 0 or more, not {self.axis!r}")
        _check_positive(self.groups, "groups")
        if not self.parts or not all(isinstance(part, Part) for part in self.parts):
            raise ValueError("a part table has one part or more")
        if len({part.name for part in self.parts}) != len(self.parts):
            raise ValueError(f"two parts have one name: {_names(self.parts)}")
        for part in self.parts:
            if part.extent % self.groups:
                raise ValueError(
                    f"part {part.name!r}: its extent {part.extent} is not a multiple of the "
                    f"{self.groups} groups"
                )
            if part.most_slices is not None and part.most_slices % self.groups:
                raise ValueError(
                    f"part {part.name!r}: most_slices={part.most_slices} is not a multiple of the "
                    f"{self.groups} groups; each group has a slice of its own"
                )

    @property
    def extent(self) -> int:
        """The size of the dimension in the unsharded tensor, in elements."""
        return sum(part.extent for part in self.parts)

    def pieces(self, degree: int, number: int) -> tuple[PartSpan, ...]:
        """Return the elements of the global dimension that a rank holds, in their local order.

        Locally the pieces lie one after the other, without gaps. No two touch in both orders.

        Args:
            degree: the number of ranks that slice the parts.
            number: this rank's place among them.

        Raises:
            LayoutMismatch: a part cannot be cut evenly; the message names it.
        """
        if not 0 <= number < degree:
            raise ValueError(f"there is no slice {number} of {degree}")
        pieces: list[PartSpan] = []
        local_offset = 0
        for global_offset, extent in self._runs(degree, number):
            last = pieces[-1] if pieces else None
            if last is not None and last.global_offset + last.extent == global_offset:
                pieces[-1] = PartSpan(last.local_offset, last.global_offset, last.extent + extent)
            else:
                pieces.append(PartSpan(local_offset, global_offset, extent))
            local_offset += extent
        return tuple(pieces)

    def local_extent(self, degree: int) -> int:
        """Return the size of the dimension on each of the ranks. Raises as `pieces` does."""
        return sum(piece.extent for piece in self.pieces(degree, 0))

    def to_json(self) -> Json:
        """Return the table as a JSON object."""
        return {
            "axis": self.axis,
            "groups": self.groups,
            "parts": [
                {"name": part.name, "extent": part.extent, "most_slices": part.most_slices}
                for part in self.parts
            ],
        }

    @classmethod
    def from_json(cls, data: Json) -> PartTable:
        """Parse a result of `to_json`.

        Raises:
            ValueError: it is anything else.
        """
        _check_members(data, {"axis", "groups", "parts"}, "a part table")
        if not isinstance(data["parts"], list):
            raise ValueError(f"the parts of a part table are a list, not {data['parts']!r}")
        for part in data["parts"]:
            _check_members(part, {"name", "extent", "most_slices"}, "a part")
        return cls(
            data["axis"],
            tuple(
                Part(part["name"], part["extent"], part["most_slices"]) for part in data["parts"]
            ),
            data["groups"],
        )

    def _runs(self, degree: int, number: int) -> Iterator[tuple[int, int]]:
        """Yield (global offset, extent) of the rank's elements of each part in each group."""
        if degree % self.groups and self.groups % degree:
            raise LayoutMismatch(
                f"parts {_names(self.parts)} are interleaved in {self.groups} groups, which "
                f"{degree} ranks cannot share evenly; take a number of ranks that divides the "
                "number of groups or is a multiple of it"
            )
        slices = [_slice(part, degree, number) for part in self.parts]
        # Beyond as many ranks as groups, several ranks share a group.
        ranks_per_group = max(1, degree // self.groups)
        groups_per_rank = max(1, self.groups // degree)
        first = number // ranks_per_group * groups_per_rank
        for group in range(first, first + groups_per_rank):
            offset = group * (self.extent // self.groups)
            for part, elements in zip(self.parts, slices, strict=True):
                extent = part.extent // self.groups
                start = max(elements.start, group * extent)
                stop = min(elements.stop, (group + 1) * extent)
                yield offset + start - group * extent, stop - start
                offset += extent


def _slice(part: Part, degree: int, number: int) -> range:
    """Return the elements of a part, counted within it, that a rank holds."""
    count = degree if part.most_slices is None else min(degree, part.most_slices)
    if part.extent % count:
        raise LayoutMismatch(
            f"part {part.name!r}: its {part.extent} elements cannot be cut into {count} equal "
            "slices; take another number of ranks, or correct the part table"
        )
    if degree % count:
        raise LayoutMismatch(
            f"part {part.name!r}: {degree} ranks cannot share its {count} slices evenly; take "
            "another number of ranks, or correct the part table"
        )
    extent = part.extent // count
    start = number // (degree // count) * extent
    return range(start, start + extent)


def _names(parts: tuple[Part, ...]) -> str:
    return ", ".join(part.name for part in parts)


def _check_positive(number: object, what: str) -> None:
    if type(number) is not int or number < 1:
        raise ValueError(f"{what} is a positive whole number, not {number!r}")


def _check_members(data: Json, names: set[str], what: str) -> None:
    if not isinstance(data, dict) or data.keys() != names:
        raise ValueError(f"{what} is an object with {', '.join(sorted(names))}, not {data!r}")
