"""Reads how parameters are cut from DeepSpeed's `universal_checkpoint_info`. Pure.

A script, or DeepSpeed's own AutoTP, puts it into the modules' files: lists of patterns of names
for each way of cutting, or for each parameter the blocks that ranks have (`affine_map`). A
parameter that no pattern names is cut along its first dimension. The meaning of each key is that
of `deepspeed/checkpoint/ds_to_universal.py` of DeepSpeed 0.19.8.

Patterns come from the file and are matched by Python's `re`, so those are refused that could take
it very long.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keepstep.checkpoint.convert.read.contents import mapping_of
from keepstep.checkpoint.convert.read.files import damaged
from keepstep.checkpoint.convert.read.pickled_values import Record
from keepstep.checkpoint.convert.read.safe_repr import safe_repr
from keepstep.checkpoint.convert.rules.rank_merges import (
    REPLICATED,
    RankPart,
    ShardMerge,
    ShardSpec,
    merge_of,
)
from keepstep.checkpoint.convert.rules.rule import Shape, Sharding
from keepstep.checkpoint.errors import FormatUnsupported
from keepstep.checkpoint.format.layout.boxes import Box

INFO = "universal_checkpoint_info"

_REPLICATED = "tp_replicated_parameter_patterns"
_AVERAGE = "parameter_to_average_patterns"
_ROW = "parameter_with_row_parallelism_patterns"
_VOCABULARY = "vocabulary_parameter_patterns"
_TWO_PARTS = "parameter_with_2_sub_params_cat_dim_0"
_PARTS = "parameter_with_sub_params"
_WIDTHS = "sub_param_shard_widths"
_AFFINE = "affine_map"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_SAYING = (_REPLICATED, _AVERAGE, _ROW, _VOCABULARY, _TWO_PARTS, _PARTS, _AFFINE)

_AFFINE_VERSION = 1
_RECORDED_WIDTHS_VERSION = 0.4

# What is escaped in a pattern, two backslashes too; then what stands for any number of characters,
# and what repeats a group of them.
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_UNBOUNDED = re.compile(r"[*+]|\{\d*,?\d*\}")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_MOST_STEPS = 10**10


@dataclass(slots=True)
class UniversalInfo:
    """The files' information about the parameters' cuts.

    Attributes:
        location: URL of the file that has it.
        content: all that it says.
        ranks: the number of ranks of tensor parallelism.
    """

    location: str
    content: Mapping[str, Any]
    ranks: int
    _steps: int = field(default=0, repr=False)

    @property
    def vocabulary_size(self) -> int | None:
        """The number of words; embeddings may have more rows."""
        size = self.content.get("original_vocab_size")
        return size if type(size) is int and size > 0 else None

    def is_vocabulary(self, name: str) -> bool:
        """Return whether a parameter has a row for each word."""
        return self._matched(_VOCABULARY, name) is not None

    def merge(self, name: str, shapes: Sequence[Shape], *, is_buffer: bool) -> ShardMerge:
        """Return how a parameter or buffer consists of what the ranks have.

        Args:
            shapes: of the ranks' tensors.
            is_buffer: whether it is a buffer, which ranks have as copies unless patterns say more.

        Raises:
            CheckpointDamaged: the files say of it what contradicts the shapes.
            FormatUnsupported: they say that it is cut in a way that is not read.
        """
        for pattern in mapping_of(self.content.get(_UNSUPPORTED)):
            if self._is_match(pattern, name):
                raise FormatUnsupported(
                    f"{self.location}: DeepSpeed notes of {name} that its cut cannot be undone; "
                    "load it with the script that trained it, and save whole parameters"
                )
        if (entry := self._affine(name)) is not None:
            return self._joining_of_blocks(name, entry, shapes)
        try:
            return merge_of(self._cut(name, shapes, is_buffer=is_buffer), shapes)
        except ValueError as error:
            raise damaged(self.location, f"{INFO}: {name}: {error}") from None

    def _cut(self, name: str, shapes: Sequence[Shape], *, is_buffer: bool) -> ShardSpec:
        if self._matched(_REPLICATED, name) is not None:
            return REPLICATED
        if self._matched(_AVERAGE, name) is not None:
            return ShardSpec(sharding=Sharding.AVERAGE)
        if self._matched(_TWO_PARTS, name) is not None:
            halves = tuple(_half(shape) for shape in shapes)
            return ShardSpec(sharding=Sharding.SHARD, widths=(halves, halves))
        if (cut := self._cut_of_parts(name, shapes)) is not None:
            return cut
        if self._matched(_ROW, name) is not None:
            return ShardSpec(sharding=Sharding.SHARD, dim=1)
        if is_buffer and self._matched(_VOCABULARY, name) is None:
            return REPLICATED
        return ShardSpec(sharding=Sharding.SHARD)

    def _cut_of_parts(self, name: str, shapes: Sequence[Shape]) -> ShardSpec | None:
        """Return the cut of a parameter that is several, side by side in a view of it."""
        listed = self.content.get(_PARTS)
        for entry in listed if isinstance(listed, list | tuple) else ():
            content = entry.attributes if isinstance(entry, Record) else mapping_of(entry)
            patterns = content.get("patterns")
            for pattern in patterns if isinstance(patterns, list | tuple) else ():
                if self._is_match(pattern, name):
                    return self._parts_of_view(pattern, content, shapes)
        return None

    def _parts_of_view(
        self, pattern: str, content: Mapping[str, Any], shapes: Sequence[Shape]
    ) -> ShardSpec:
        view, dim = content.get("shape"), content.get("partition_dim")
        if (
            not isinstance(view, list | tuple)
            or type(dim) is not int
            or not 0 <= dim < len(view)
            or not all(_is_extent(extent) for extent in view)
        ):
            raise ValueError(f"{_PARTS} has no shape, or no dimension of it that is cut")
        sizes = list(view[dim]) if isinstance(view[dim], list | tuple) else None
        others = [
            sum(extent) if isinstance(extent, list | tuple) else extent
            for n, extent in enumerate(view)
            if n != dim
        ]
        known = math.prod(extent for extent in others if extent >= 0)
        elements = sum(math.prod(shape) for shape in shapes)
        if sizes is None:
            # In older files: the number of parts, all of one size.
            count = view[dim]
            total = _cut_extent(shapes, dim)
            if count <= 0 or not total or total % count:
                raise ValueError(f"its {count} parts are not equal in {_PARTS}")
            sizes = [total // count] * count
        recorded = mapping_of(self.content.get(_WIDTHS)).get(pattern)
        widths = self._widths(sizes, recorded)
        size = sum(sizes)
        if len([extent for extent in others if extent < 0]) > 1 or not known * size:
            raise ValueError(f"{_PARTS} has no shape that can be completed: {tuple(view)}")
        missing = elements // (known * size)
        resolved = [missing if extent < 0 else extent for extent in others]
        if math.prod(resolved) * size != elements:
            raise ValueError(f"{elements} elements are not of the shape {tuple(view)} of {_PARTS}")
        outer, inner = math.prod(resolved[:dim]), math.prod(resolved[dim:])
        # A view of as many dimensions has the parameter's own.
        is_own = len(view) == len(shapes[0])
        for own_dim in (dim,) if is_own else range(len(shapes[0])):
            before = math.prod(shapes[0][:own_dim])
            after = math.prod(shapes[0][own_dim + 1 :])
            if before and after and outer % before == 0 and inner % after == 0:
                scale = inner // after
                scaled = tuple(tuple(width * scale for width in row) for row in widths)
                groups = outer // before
                if groups * sum(row[0] for row in scaled) == shapes[0][own_dim]:
                    return ShardSpec(
                        sharding=Sharding.SHARD, dim=own_dim, widths=scaled, groups=groups
                    )
        raise ValueError(f"ranks have {shapes[0]}, which is no view of {tuple(view)} ({_PARTS})")

    def _widths(self, sizes: Sequence[int], recorded: object) -> list[list[int]]:
        """Return how many elements of each part each rank has."""
        if isinstance(recorded, list | tuple) and recorded:
            rows = [list(row) if isinstance(row, list | tuple) else [] for row in recorded]
            if any(type(width) is not int or width < 0 for row in rows for width in row):
                raise ValueError(f"{_WIDTHS} are no numbers of elements")
            if [sum(row) for row in rows] != list(sizes) or any(
                len(row) != self.ranks for row in rows
            ):
                raise ValueError(f"{_WIDTHS} are not those of {self.ranks} ranks and {sizes}")
            return rows
        version = self.content.get("universal_checkpoint_version", 0.0)
        if isinstance(version, int | float) and version >= _RECORDED_WIDTHS_VERSION:
            raise ValueError(f"there are no {_WIDTHS} for its parts {sizes}")
        if any(size % self.ranks for size in sizes):
            raise ValueError(
                f"its parts {sizes} do not divide by {self.ranks} ranks, and no {_WIDTHS} say how "
                "they were cut"
            )
        return [[size // self.ranks] * self.ranks for size in sizes]

    def _affine(self, name: str) -> Mapping[str, Any] | None:
        """Return the blocks of a parameter, if the files list them."""
        listed = mapping_of(self.content.get(_AFFINE))
        if not listed:
            return None
        version = listed.get("version", _AFFINE_VERSION)
        if version != _AFFINE_VERSION:
            raise FormatUnsupported(
                f"{self.location}: its {_AFFINE} has version {safe_repr(version)}, and "
                f"{_AFFINE_VERSION} is read; give rules that say how parameters are cut"
            )
        for pattern, entry in mapping_of(listed.get("params")).items():
            if self._is_match(pattern, name):
                return mapping_of(entry)
        return None

    def _joining_of_blocks(
        self, name: str, entry: Mapping[str, Any], shapes: Sequence[Shape]
    ) -> ShardMerge:
        logical = _shape_of(entry.get("logical_shape"))
        listed = entry.get("ranks")
        by_rank = (
            {str(rank): mapping_of(value) for rank, value in listed.items()}
            if isinstance(listed, dict)
            else {}
        )
        parts: list[RankPart] = []
        for rank, shape in enumerate(shapes):
            own = by_rank.get(str(rank), {})
            pieces = own.get("pieces")
            if (
                logical is None
                or _shape_of(own.get("shard_shape")) != shape
                or not isinstance(pieces, list | tuple)
            ):
                raise damaged(
                    self.location,
                    f"{_AFFINE}: it does not say of {name} what rank {rank} has, whose file has "
                    f"{shape}",
                )
            for piece in pieces:
                parts.append(self._block(name, mapping_of(piece), rank, logical, shape))
        assert logical is not None
        return ShardMerge(logical, tuple(parts))

    def _block(
        self, name: str, piece: Mapping[str, Any], rank: int, logical: Shape, shape: Shape
    ) -> RankPart:
        if piece.get("scale", 1.0) != 1.0:
            raise FormatUnsupported(
                f"{self.location}: {_AFFINE}: ranks have {name} scaled by "
                f"{safe_repr(piece.get('scale'))}, which is not read; load it with the script that "
                "trained it, and save whole parameters"
            )
        extents = _shape_of(piece.get("shape"))
        target = None if extents is None else _box_of(piece.get("source"), extents, logical)
        source = None if extents is None else _box_of(piece.get("dest"), extents, shape)
        if target is None or source is None:
            raise FormatUnsupported(
                f"{self.location}: {_AFFINE}: what rank {rank} has of {name} is no block of "
                f"{logical}, which is not read; load it with the script that trained it, and save "
                "whole parameters"
            )
        return RankPart(rank, source, target)

    def _matched(self, kind: str, name: str) -> str | None:
        """Return the pattern of a list that matches a name; None without one."""
        patterns = self.content.get(kind)
        listed = patterns if isinstance(patterns, list | tuple) else ()
        return next((pattern for pattern in listed if self._is_match(pattern, name)), None)

    def _is_match(self, pattern: object, name: str) -> bool:
        if not isinstance(pattern, str):
            raise damaged(self.location, f"{INFO} has patterns of names that are no text")
        plain = _ESCAPED.sub("x", pattern)
        repeats = len(_UNBOUNDED.findall(plain))
        self._steps += (len(name) + 1) ** min(repeats, 8) * _choices(plain)
        if _REPEATED_GROUP.search(plain) or "(?" in plain or self._steps > _MOST_STEPS:
            raise FormatUnsupported(
                f"{self.location}: {INFO}: matching {pattern[:80]!r} may take very long, so it is "
                "not read; load it with the script that trained it, and save whole parameters"
            )
        try:
            return re.match(pattern, name) is not None
        except re.error as error:
            raise damaged(
                self.location, f"{INFO}: {pattern[:80]!r} is no pattern: {error}"
            ) from None


def universal_info(location: str, content: Mapping[str, Any], ranks: int) -> UniversalInfo | None:
    """Return what a module's file says of cuts; None if it says nothing."""
    info = mapping_of(content.get(INFO))
    return UniversalInfo(location, info, ranks) if any(info.get(key) for key in _SAYING) else None


def _choices(plain: str) -> int:
    """Return in how many ways a pattern can take its alternatives and options, or a larger number.

    Args:
        plain: the pattern without escaped characters.
    """
    ways = 1
    alternatives = [1]
    for character in plain:
        if character == "(":
            alternatives.append(1)
        elif character == "|":
            alternatives[-1] += 1
        elif character == "?":
            ways *= 2
        elif character == ")" and len(alternatives) > 1:
            ways *= alternatives.pop()
        if ways > _MOST_STEPS:
            return ways
    return ways * math.prod(alternatives)


def _half(shape: Shape) -> int:
    if not shape or shape[0] % 2:
        raise ValueError(f"it is said to have two halves in dimension 0, and ranks have {shape}")
    return shape[0] // 2


def _cut_extent(shapes: Sequence[Shape], dim: int) -> int:
    return sum(shape[dim] for shape in shapes) if all(len(shape) > dim for shape in shapes) else 0


def _is_extent(value: object) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(type(n) is int and 0 <= n < 2**40 for n in value)
    return type(value) is int and -1 <= value < 2**40


def _shape_of(value: object) -> Shape | None:
    if not isinstance(value, list | tuple) or not all(
        type(n) is int and 0 <= n < 2**40 for n in value
    ):
        return None
    return tuple(value)


def _box_of(place: object, extents: Shape, shape: Shape) -> Box | None:
    """Return the block of a tensor in C order that an offset and strides describe, if they do."""
    if not isinstance(place, list | tuple) or len(place) != 2 or len(extents) != len(shape):
        return None
    offset, strides = place[0], _shape_of(place[1])
    if type(offset) is not int or offset < 0 or strides is None or len(strides) != len(shape):
        return None
    starts = []
    for dim, extent in enumerate(extents):
        stride = math.prod(shape[dim + 1 :])
        if extent > 1 and strides[dim] != stride:
            return None
        start, offset = divmod(offset, stride) if stride else (0, offset)
        if start + extent > shape[dim]:
            return None
        starts.append(start)
    return None if offset else Box(tuple(starts), extents)
