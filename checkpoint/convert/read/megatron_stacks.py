"""Cuts tensors of Megatron-Core's torch_dist files into those of the module, under its names.

Pure. A file has one tensor of all layers, and of all layers' experts one: `decoder.layers.mlp.
experts.experts.linear_fc1.weight`, of shape [layers, experts, rows, columns]. Layers that differ
from each other have tensors of their own, with numbers that count over all pipeline stages. The
names here are those of a module that one process holds whole, with an `experts.local_experts.N`
for each expert.

Where Transformer Engine fuses a norm with the linear layer behind it, the norm's name is that of
the linear layer. All files have that name, and modules without Transformer Engine another.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from keepstep.checkpoint.convert.read.arrays import Array, Values
from keepstep.checkpoint.convert.read.files import Extent, damaged
from keepstep.checkpoint.convert.read.pieces import ForeignTensor, Piece
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.source import TensorSpec

_MOST_LAYERS_AND_EXPERTS = 2**20

_STACKED_LAYERS = re.compile(r"((?:.+\.)?layers\.)(?!\d)(.+)")
_STACKED_EXPERTS = re.compile(r"(.*mlp\.experts\.)experts\.(?!\d)(.+)")
_ONE_EXPERT = re.compile(r"(.*mlp\.experts\.)experts\.(\d+)\.(.+)")
_LIVE_LAYER = re.compile(r"((?:.+\.)?layers\.)(\d+)\.(.+)")
_LIVE_EXPERT = re.compile(r"(.*mlp\.experts\.)local_experts\.(\d+)\.(.+)")

_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
"""Norms of a layer, as modules without Transformer Engine call them, and as files do."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of the module, and its place in the leading dimensions of a stored one."""

    name: str
    index: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnstackedArray:
    """An array without its leading dimensions, each of which has one place."""

    stored: Array
    dimensions: int

    @property
    def dtype(self) -> str:
        """See `Array.dtype`."""
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Array.shape`."""
        return self.stored.shape[self.dimensions :]

    @property
    def location(self) -> str:
        """See `Array.location`."""
        return self.stored.location

    @property
    def extents(self) -> tuple[Extent, ...]:
        """See `Array.extents`."""
        return self.stored.extents

    def narrow(self, box: Box) -> UnstackedArray:
        """See `Array.narrow`."""
        return UnstackedArray(self.stored.narrow(self._stacked(box)), self.dimensions)

    def read_into(self, box: Box, into: Values) -> None:
        """See `Array.read_into`."""
        self.stored.read_into(self._stacked(box), into[(None,) * self.dimensions + (...,)])

    def _stacked(self, box: Box) -> Box:
        count = self.dimensions
        return Box((0,) * count + box.offset, (1,) * count + box.shape)


def module_name(name: str, *, has_fused_norms: bool) -> str:
    """Return what the module calls a layer's tensor, of what files call it.

    Args:
        name: as in files, with the layer's number.
        has_fused_norms: whether the module is of Transformer Engine.
    """
    return name if has_fused_norms else _renamed_norm(name, to_file=False)


def file_name_of(name: str) -> str:
    """Return what files call a tensor of the module, whose norms are fused or not."""
    return _renamed_norm(name, to_file=True)


def _renamed_norm(name: str, *, to_file: bool) -> str:
    layer = _LIVE_LAYER.fullmatch(name)
    if layer is None:
        return name
    for unfused, fused in _NORMS:
        old, new = (unfused, fused) if to_file else (fused, unfused)
        if layer[3].startswith(old):
            return f"{layer[1]}{layer[2]}.{new}{layer[3].removeprefix(old)}"
    return name


def stack_of(name: str) -> Placed:
    """Return the stacked tensor of a layer's or expert's, and the place in it; none if it has none.

    Args:
        name: as in files, with the layer's number and perhaps an expert's.
    """
    index: tuple[int, ...] = ()
    layer = _LIVE_LAYER.fullmatch(name)
    if layer is not None:
        name, index = f"{layer[1]}{layer[3]}", (int(layer[2]),)
    expert = _LIVE_EXPERT.fullmatch(name)
    if expert is not None:
        name, index = f"{expert[1]}experts.{expert[3]}", (*index, int(expert[2]))
    return Placed(name, index)


def placed_in(key: str, shape: tuple[int, ...], location: str) -> Iterator[Placed]:
    """Yield the module's tensors that a stored one has, under the names of files.

    Raises:
        CheckpointDamaged: it has no dimension of layers or experts, or absurdly many of them.
    """
    layers, experts = _STACKED_LAYERS.fullmatch(key), _STACKED_EXPERTS.fullmatch(key)
    dimensions = (layers is not None) + (experts is not None)
    if len(shape) < dimensions:
        raise damaged(location, f"{key} of all layers has the shape {shape}")
    counts = shape[:dimensions]
    if math.prod(counts) > _MOST_LAYERS_AND_EXPERTS:
        raise damaged(location, f"{key} has {counts} layers and experts, and no model has so many")
    for index in itertools.product(*map(range, counts)):
        name, rest = key, list(index)
        if layers is not None:
            name = f"{layers[1]}{rest.pop(0)}.{layers[2]}"
        expert = _STACKED_EXPERTS.fullmatch(name)
        if expert is not None:
            name = f"{expert[1]}local_experts.{rest.pop(0)}.{expert[2]}"
        elif single := _ONE_EXPERT.fullmatch(name):
            name = f"{single[1]}local_experts.{single[2]}.{single[3]}"
        yield Placed(name, index)


def cut(tensor: ForeignTensor, placed: tuple[Placed, ...]) -> Iterator[tuple[str, ForeignTensor]]:
    """Yield the tensors, by name, that lie at places in the leading dimensions of a stored one."""
    dimensions = len(placed[0].index) if placed else 0
    if not dimensions:
        yield from ((place.name, tensor) for place in placed)
        return
    shape = tensor.spec.shape[dimensions:]
    pieces: dict[tuple[int, ...], list[Piece]] = {place.index: [] for place in placed}
    for piece in tensor.pieces:
        first, rest = piece.box.offset[:dimensions], piece.box.offset[dimensions:]
        extents, inner = piece.box.shape[:dimensions], piece.box.shape[dimensions:]
        zeros = (0,) * len(rest)
        for steps in itertools.product(*map(range, extents)):
            part = piece.array
            if math.prod(extents) > 1:
                part = part.narrow(Box((*steps, *zeros), ((1,) * dimensions) + inner))
            index = tuple(a + b for a, b in zip(first, steps, strict=True))
            pieces[index].append(Piece(Box(rest, inner), UnstackedArray(part, dimensions)))
    spec = TensorSpec(tensor.spec.dtype, shape)
    for place in placed:
        yield place.name, ForeignTensor(spec, tuple(pieces[place.index]))
