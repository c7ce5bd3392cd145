"""Reads buffers of Megatron's distributed optimizer (`dp_reshardable`) as parameters' state.

Each rank of model parallelism has the parameters of its pipeline stage, the last first, flattened
one after the other in buckets. The files do not say where a parameter begins. So the places follow
from the order in which Megatron's modules make their parameters, and are then shown to be right:
sizes add up, every parameter begins where a stored chunk does, and the first elements of each
are, rounded, those of the model. Tensors that cannot be proved are left out; wrong ones are
refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keepstep.checkpoint.convert.read.contents import Contents
from keepstep.checkpoint.convert.read.dcp_entries import (
    EntryArray,
    FlatRange,
    tensor_of_chunks,
)
from keepstep.checkpoint.convert.read.dcp_metadata import ChunkedTensor, Metadata
from keepstep.checkpoint.convert.read.files import damaged
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.megatron_settings import (
    OUTPUT_LAYER,
    WORD_EMBEDDINGS,
    is_expert,
)
from keepstep.checkpoint.convert.read.megatron_stacks import placed_in
from keepstep.checkpoint.convert.read.pieces import ForeignTensor, Piece, assembled
from keepstep.checkpoint.convert.read.torch_file import read_torch_file
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.completeness import OPTIMIZER
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.fragments import boxes_of_range
from keepstep.checkpoint.format.layout.source import BoxRequest, TensorSpec

_BUFFER = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_BUCKET = re.compile(r"gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.(\w+)")
_OBJECT = re.compile(r"(.+)/shard_[\d.]+_[\d.]+")

MASTER = "param"
"""The slot of a bucket that has the parameters themselves."""

_ALIGNMENT = 64
"""Each parameter begins at a multiple of this number of elements in a bucket."""

_COMPARED = 16
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_ORDER_OF_MODULE = ("embedding.", "decoder.layers.", "decoder.final_layernorm.", "output_layer.")
_ORDER_OF_LAYER = (
    "input_layernorm.",
    "self_attention.linear_proj.",
    "self_attention.linear_qkv.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "pre_mlp_layernorm.",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
)
_ORDER_OF_LINEAR = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")


@dataclass(frozen=True, slots=True)
class BufferName:
    """Names a rank's buffers: the rank, and the optimizer if several are chained.

    Attributes:
        optimizer: number of the optimizer.
        rank: of model parallelism; ranks of tensor parallelism count first.
        rest: the name in the rank's state.
    """

    optimizer: int
    rank: int
    rest: str


class _Unexplained(Exception):
    """The places of the parameters are unknown; the message says why."""


@dataclass(frozen=True, slots=True)
class _Local:
    """A rank's part of a parameter: boxes of it, one after the other in a dimension."""

    name: str
    axis: int
    boxes: tuple[Box, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.boxes[0].shape)
        if shape:
            shape[self.axis] = sum(box.shape[self.axis] for box in self.boxes)
        return tuple(shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def globally(self, local: Box) -> Iterator[tuple[Box, Box]]:
        """Yield the parts of a box of the rank's tensor, and the boxes of the parameter they are.

        The former are relative to the box.
        """
        start = 0
        for box in self.boxes:
            offset = [0] * len(box.shape)
            if offset:
                offset[self.axis] = start
                start += box.shape[self.axis]
            place = Box(tuple(offset), box.shape)
            common = place.intersect(local)
            if common is not None:
                moved = (
                    a - b + c
                    for a, b, c in zip(common.offset, place.offset, box.offset, strict=True)
                )
                yield common.within(local), Box(tuple(moved), common.shape)


@dataclass(slots=True)
class _Rank:
    """The buckets of one rank by (buffer, bucket), each with its slots."""

    buckets: dict[tuple[int, int], dict[str, ChunkedTensor]] = field(default_factory=dict)


def buffer_name(key: str) -> BufferName | None:
    """Return what an entry of buffers is called, or None if it is none."""
    match = _BUFFER.fullmatch(key)
    if match is None:
        return None
    stem = _OBJECT.fullmatch(match[3])
    return BufferName(int(match[1] or 0), int(match[2]), stem[1] if stem else match[3])


def optimizers_of_buffers(metadata: Metadata) -> list[object]:
    """Return what the first rank's files say of its optimizers, without their tensors.

    Raises:
        CheckpointDamaged: they are no files of `torch.save`.
    """
    found: dict[int, object] = {}
    for key, extent in metadata.values.items():
        name = buffer_name(key)
        if name is not None and (name.rank, name.rest) == (0, "optimizer"):
            value = read_torch_file(extent)
            found[name.optimizer] = value[0] if isinstance(value, list) and value else value
    return [found[number] for number in sorted(found)]


def tensors_of_buffers(
    contents: Contents,
    metadata: Metadata,
    arguments: Mapping[str, Any],
    live_names: Mapping[str, str],
    location: str,
) -> dict[tuple[str, str], ForeignTensor]:
    """Return the state of the parameters, by name and slot; note it as left out if it has no place.

    Args:
        contents: has the model's tensors.
        metadata: what the folder has.
        arguments: Megatron's, which say how many ranks there were.
        live_names: names of the module's tensors by those of files.

    Raises:
        CheckpointDamaged: the buffers have other parameters than the model, or gaps.
    """
    ranks: dict[int, _Rank] = {}
    for key, chunked in metadata.tensors.items():
        name = buffer_name(key)
        if name is None:
            continue
        bucket = _BUCKET.fullmatch(name.rest)
        if bucket is None or name.optimizer:
            contents.leave_out(
                "optimizer", f"{key} is of experts, or unknown; {_INSTEAD}", key=OPTIMIZER
            )
            return {}
        rank = ranks.setdefault(name.rank, _Rank())
        rank.buckets.setdefault((int(bucket[1]), int(bucket[3])), {})[bucket[4]] = chunked
    try:
        module = _Module(metadata, arguments, live_names, location)
        tensors = _assembled(contents, _placed(ranks, module))
    except _Unexplained as error:
        contents.leave_out("optimizer", f"{error}; {_INSTEAD}", key=OPTIMIZER)
        return {}
    _compare(contents, tensors, location)
    return tensors


_INSTEAD = (
    "the buffers of the distributed optimizer do not say which parameters they have; save with "
    "--dist-ckpt-optim-fully-reshardable"
)

_Placed = Iterator[tuple[_Local, str, TensorSpec, list[Piece]]]


class _Module:
    """Each rank's part of the model, in the order in which its modules make parameters."""

    def __init__(
        self,
        metadata: Metadata,
        arguments: Mapping[str, Any],
        live_names: Mapping[str, str],
        location: str,
    ) -> None:
        sizes = [arguments.get(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline")]
        if any(type(size) is not int or size < 1 for size in sizes):
            raise _Unexplained("common.pt does not say how many ranks of which kind there were")
        self.tp, self.pp = int(sizes[0] or 1), int(sizes[1] or 1)
        self.vp = int(arguments.get("virtual_pipeline_model_parallel_size") or 1)
        self._is_tied = arguments.get("untie_embeddings_and_output_weights") is False
        self._boxes: dict[str, list[Box]] = {}
        for key, chunked in metadata.tensors.items():
            if key.startswith(("optimizer.", "chained_")):
                continue
            dimensions = 0
            by_index: dict[tuple[int, ...], list[Box]] = {}
            places = list(placed_in(key, chunked.spec.shape, location))
            dimensions = len(places[0].index) if places else 0
            for chunk in chunked.chunks:
                by_index.setdefault(chunk.box.offset[:dimensions], []).append(
                    Box(chunk.box.offset[dimensions:], chunk.box.shape[dimensions:])
                )
            for place in places:
                name = live_names.get(place.name, place.name)
                self._boxes[name] = sorted(
                    set(by_index.get(place.index, [])), key=lambda box: box.offset
                )
        layers = {int(m[1]) for name in self._boxes if (m := _LAYER.fullmatch(name))}
        if any(map(is_expert, self._boxes)):
            raise _Unexplained("the model has experts")
        self._layers = len(layers)
        if layers != set(range(self._layers)) or self._layers % (self.pp * self.vp):
            raise _Unexplained(
                f"{self._layers} layers are not equally on {self.pp} x {self.vp} stages"
            )

    def parameters(self, rank: int, chunk: int) -> list[_Local]:
        """Return what a rank has, in the order of the module, of one of its model's chunks."""
        stage = rank // self.tp
        each = self._layers // (self.pp * self.vp)
        first = (chunk * self.pp + stage) * each
        is_first, is_last = first == 0, first + each == self._layers
        names = []
        for name in self._boxes:
            layer = _LAYER.fullmatch(name)
            if layer is not None:
                is_here = first <= int(layer[1]) < first + each
            else:
                is_here = is_first if name.startswith("embedding.") else is_last
            if is_here:
                names.append(name)
        locals_ = [self._local(name, rank % self.tp) for name in sorted(names, key=_order)]
        if self._is_tied and is_last and not is_first:
            # A copy of the embeddings, which is trained as they are.
            copy = self._local(WORD_EMBEDDINGS, rank % self.tp)
            locals_.append(_Local(OUTPUT_LAYER, copy.axis, copy.boxes))
        return locals_

    def _local(self, name: str, tensor_rank: int) -> _Local:
        boxes = self._boxes[name]
        if len(boxes) == 1:
            return _Local(name, 0, tuple(boxes))
        (axis, *others) = [
            n for n in range(len(boxes[0].shape)) if len({box.offset[n] for box in boxes}) > 1
        ] or [0]
        parts = len(boxes) // self.tp
        if others or len(boxes) % self.tp or parts > 2:
            raise _Unexplained(
                f"{name} is in {len(boxes)} chunks, and there were {self.tp} ranks of tensor "
                "parallelism"
            )
        own = tuple(boxes[part * self.tp + tensor_rank] for part in range(parts))
        return _Local(name, axis, own)


def _order(name: str) -> tuple[int, ...]:
    """Return where a parameter is in the order in which Megatron's modules make them."""
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        place = _first(_ORDER_OF_LAYER, layer[2])
        leaf = layer[2].rpartition(".")[2]
        if place is None or leaf not in _ORDER_OF_LINEAR:
            raise _Unexplained(f"the place of {name} in a layer is not known")
        return (1, int(layer[1]), place, _ORDER_OF_LINEAR.index(leaf))
    place = _first(_ORDER_OF_MODULE, name)
    leaves = ("word_embeddings.weight", "position_embeddings.weight", "weight", "bias")
    ending = next((n for n, leaf in enumerate(leaves) if name.endswith(leaf)), None)
    if place is None or ending is None:
        raise _Unexplained(f"the place of {name} in the model is not known")
    return (place, ending)


def _first(prefixes: Sequence[str], name: str) -> int | None:
    return next((n for n, prefix in enumerate(prefixes) if name.startswith(prefix)), None)


def _placed(ranks: Mapping[int, _Rank], module: _Module) -> _Placed:
    """Yield pieces of the parameters' state, with what each rank has of a parameter."""
    count = module.tp * module.pp
    if sorted(ranks) != list(range(count)):
        raise _Unexplained(
            f"there are buffers of the ranks {sorted(ranks)}, and {module.tp} x {module.pp} ranks "
            "had the model"
        )
    found = []
    for number in range(count):
        buckets = ranks[number].buckets
        if sorted({buffer for buffer, _ in buckets}) != list(range(module.vp)):
            raise _Unexplained(f"rank {number} has parameters of several data types")
        for chunk in range(module.vp):
            order = sorted(bucket for buffer, bucket in buckets if buffer == chunk)
            if order != list(range(len(order))):
                raise _Unexplained(f"rank {number} has the buckets {order}")
            sizes = [_size(buckets[chunk, bucket]) for bucket in order]
            places = _places(module.parameters(number, chunk), sizes, number)
            for local, bucket, start in places:
                for slot, chunked in buckets[chunk, bucket].items():
                    if start not in {piece.box.offset[0] for piece in chunked.chunks}:
                        raise _Unexplained(
                            f"{local.name} would begin at {start} in bucket {bucket} of rank "
                            f"{number}, where no chunk does"
                        )
                    found.append((local, slot, chunked.spec, (number, chunk, bucket, start)))
    whole = {
        (number, *place, slot): tensor_of_chunks(f"{slot} of bucket {place} of rank {number}", c)
        for number, rank in ranks.items()
        for place, slots in rank.buckets.items()
        for slot, c in slots.items()
    }
    for local, slot, spec, (number, chunk, bucket, start) in found:
        pieces = list(_pieces(local, whole[number, chunk, bucket, slot], start))
        yield local, slot, spec, pieces


def _size(slots: Mapping[str, ChunkedTensor]) -> int:
    shapes = {chunked.spec.shape for chunked in slots.values()}
    shape = shapes.pop()
    if shapes or len(shape) != 1:
        raise _Unexplained(f"the slots of a bucket have the shapes {sorted({shape, *shapes})}")
    return shape[0]


def _places(
    parameters: Sequence[_Local], sizes: Sequence[int], rank: int
) -> Iterator[tuple[_Local, int, int]]:
    """Yield each parameter with its bucket and its place there."""
    bucket = position = 0
    for local in reversed(parameters):
        start = _aligned(position)
        position = start + local.size
        if bucket >= len(sizes) or position > sizes[bucket]:
            raise _Unexplained(
                f"rank {rank} has buckets of {list(sizes)} elements, in which the "
                f"{local.size} of {local.name} would end at {position} of bucket {bucket}"
            )
        yield local, bucket, start
        # The next one would begin at the bucket's end, or behind it.
        if _aligned(position) >= sizes[bucket]:
            bucket, position = bucket + 1, 0
    if bucket < len(sizes):
        raise _Unexplained(
            f"rank {rank} has buckets of {list(sizes)} elements, and its parameters end at "
            f"{position} of bucket {bucket}"
        )


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def _pieces(local: _Local, bucket: ForeignTensor, start: int) -> Iterator[Piece]:
    """Yield the pieces of a parameter that a range of a bucket is."""
    for piece in bucket.pieces:
        first = max(piece.box.offset[0], start)
        last = min(piece.box.offset[0] + piece.box.shape[0], start + local.size)
        if first >= last:
            continue
        assert isinstance(piece.array, EntryArray)
        position = first - piece.box.offset[0]
        for box in boxes_of_range(local.shape, first - start, last - start):
            flat = FlatRange(position, box.shape)
            array = EntryArray(piece.array.entry, Box.whole(box.shape), flat)
            position += box.size
            for part, whole in local.globally(box):
                yield Piece(whole, array.narrow(part))


def _assembled(contents: Contents, placed: _Placed) -> dict[tuple[str, str], ForeignTensor]:
    """Return the tensors that the ranks' pieces make up."""
    pieces: dict[tuple[str, str], dict[Box, Piece]] = {}
    dtypes: dict[tuple[str, str], str] = {}
    for local, slot, spec, parts in placed:
        if f"model/{local.name}" not in contents.tensors:
            # The copy of the embeddings on the last stage.
            continue
        into = pieces.setdefault((local.name, slot), {})
        dtypes[local.name, slot] = spec.dtype
        for part in parts:
            into.setdefault(part.box, part)
    return {
        (name, slot): assembled(
            f"{slot} of {name}",
            TensorSpec(dtypes[name, slot], contents.tensors[f"model/{name}"].spec.shape),
            by_box.values(),
        )
        for (name, slot), by_box in pieces.items()
    }


def _compare(
    contents: Contents, tensors: Mapping[tuple[str, str], ForeignTensor], location: str
) -> None:
    """Compare the first elements of the parameters in the buffers with those of the model."""
    masters = {name: tensor for (name, slot), tensor in tensors.items() if slot == MASTER}
    both = ForeignCheckpoint(
        url=location,
        format_name="",
        step=0,
        foreign_tensors={
            **{f"model/{name}": contents.tensors[f"model/{name}"] for name in masters},
            **{f"master/{name}": tensor for name, tensor in masters.items()},
        },
        documents={},
    )
    values: dict[str, np.ndarray] = {}
    requests = []
    for key, spec in both.tensors.items():
        shape = (*(1 for _ in spec.shape[:-1]), *(min(n, _COMPARED) for n in spec.shape[-1:]))
        values[key] = np.empty(shape, numpy_dtype(spec.dtype))
        into = values[key].reshape(-1).view(np.uint8).data
        requests.append(BoxRequest(key, Box((0,) * len(shape), shape), into))
    both.read(requests)
    for name in masters:
        model = values[f"model/{name}"]
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = values[f"master/{name}"].astype(model.dtype)
        if rounded.tobytes() != model.tobytes():
            raise damaged(
                location,
                f"where the optimizer's buffers would have {name}, they have other values than "
                "the model",
            )
