"""Property test: fused tensors arrive in their places, however their parts were and are sliced.

One process plays all ranks, as in `test_any_layout`. Each rank has the DTensor that tensor
parallelism gives it, which is made here element by element from what a part table means.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from keepstep.checkpoint import Descriptions, Part, PartTable
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.descriptions import describing_documents
from keepstep.checkpoint.format.layout.source import BoxRequest
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.live.fills import fill
from keepstep.checkpoint.live.part_slices import FusedTensors
from keepstep.checkpoint.live.restore import plan_fills
from keepstep.checkpoint.live.tensors import (
    LiveState,
    LiveTensor,
    as_bytes,
    local_of,
    specs_of,
    torch_dtype,
)
from tests.examples import examples
from tests.unit.checkpoint.test_any_layout import (
    Bytes,
    DictStorage,
    Tensor,
    small_sizes,
    store_held,
)

__all__ = ["small_sizes"]


@dataclass(frozen=True)
class Fused:
    """A tensor of fused parts; each of its elements has its own value."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    table: PartTable

    @property
    def key(self) -> str:
        return f"model/{self.name}"

    @property
    def whole(self) -> torch.Tensor:
        """The unsharded tensor, in the order of its parts."""
        values = torch.arange(math.prod(self.shape), dtype=torch_dtype(self.dtype))
        return values.reshape(self.shape)


@dataclass(frozen=True)
class Splits:
    """Which dimension of a tensor each of two mesh axes splits, one after the other; None: none."""

    inner: int | None
    outer: int | None


@dataclass(frozen=True)
class Layout:
    """Ranks in a mesh of two axes; the first to split tensors slices parts if it is named so."""

    inner_name: str
    inner_size: int
    outer_size: int
    is_outer_left: bool
    splits: dict[str, Splits]

    @property
    def ranks(self) -> range:
        return range(self.inner_size * self.outer_size)

    def mesh(self, rank: int) -> DeviceMesh:
        """Return the mesh as a rank has it."""
        shape, names = (self.inner_size, self.outer_size), (self.inner_name, "dp")
        if self.is_outer_left:
            shape, names = shape[::-1], names[::-1]
        ranks = torch.arange(len(self.ranks)).reshape(shape)
        return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)

    def tensor(self, fused: Fused, rank: int) -> torch.Tensor:
        """Return what a rank computes with, in memory of its own."""
        splits = self.splits[fused.key]
        if splits == Splits(None, None):
            return fused.whole
        mesh = self.mesh(rank)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        outer, inner = coordinate if self.is_outer_left else coordinate[::-1]
        local, shape = fused.whole, list(fused.shape)
        if splits.inner == fused.table.axis and self.inner_name == "tp":
            places = places_of(fused.table, self.inner_size, inner)
            local = local.index_select(splits.inner, torch.tensor(places))
            # PyTorch counts what several ranks hold several times.
            shape[splits.inner] = len(places) * self.inner_size
        elif splits.inner is not None:
            local = chunk(local, splits.inner, self.inner_size, inner)
        if splits.outer is not None:
            local = chunk(local, splits.outer, self.outer_size, outer)
        return DTensor.from_local(
            local.clone(memory_format=torch.contiguous_format), mesh, self._placements(splits),
            run_check=False, shape=torch.Size(shape), stride=torch.empty(shape).stride(),
        )  # fmt: skip

    def _placements(self, splits: Splits) -> tuple[Placement, ...]:
        inner: Placement = Replicate() if splits.inner is None else Shard(splits.inner)
        outer: Placement = Replicate() if splits.outer is None else Shard(splits.outer)
        if not self.is_outer_left:
            return inner, outer
        if splits.outer is not None and splits.outer == splits.inner:
            # Placements apply from left to right, unless they are strided, as those of FSDP.
            outer = _StridedShard(splits.outer, split_factor=self.inner_size)
        return outer, inner


def places_of(table: PartTable, degree: int, number: int) -> list[int]:
    """Return which elements of the fused dimension a rank has, in the order that it has them in."""
    places, place = [], 0
    for group, part in itertools.product(range(table.groups), table.parts):
        slices = degree if part.most_slices is None else min(degree, part.most_slices)
        share = part.extent // table.groups
        for element in range(group * share, (group + 1) * share):
            if element * slices // part.extent == number * slices // degree:
                places.append(place)
            place += 1
    return places


def chunk(tensor: torch.Tensor, axis: int, parts: int, number: int) -> torch.Tensor:
    """Split as PyTorch does, with an empty tensor for ranks without a chunk."""
    chunks = torch.chunk(tensor, parts, axis)
    return chunks[number] if number < len(chunks) else tensor.narrow(axis, 0, 0)


degrees = st.sampled_from([1, 2, 2, 3, 4, 4, 6, 8])


@st.composite
def tables(draw: st.DrawFn, axis: int, cut_by: Sequence[int]) -> PartTable:
    """Draw a table whose parts each of these numbers of ranks can slice."""
    groups = draw(
        st.sampled_from([
            groups
            for groups in (1, 2, 3, 4, 8)
            if all(degree % groups == 0 or groups % degree == 0 for degree in cut_by)
        ])
    )  # fmt: skip
    limits = [
        most
        for most in range(groups, 9, groups)
        if all(degree % min(degree, most) == 0 for degree in cut_by)
    ]
    parts = []
    for name in ("q", "k", "v", "gate")[: draw(st.integers(1, 4))]:
        most = draw(st.sampled_from([None, *limits]))
        slices = [degree if most is None else min(degree, most) for degree in cut_by]
        least = math.lcm(groups, most or 1, *slices)
        parts.append(Part(name, least * draw(st.integers(1, 3)), most))
    return PartTable(axis, tuple(parts), groups)


@st.composite
def fused_tensors(draw: st.DrawFn, cut_by: Sequence[int]) -> list[Fused]:
    tensors = []
    for number in range(draw(st.integers(1, 2))):
        extents = st.sampled_from([1, 2, 3, 3, 4, 5, 0])
        shape = draw(st.lists(extents, min_size=1, max_size=3))
        axis = draw(st.integers(0, len(shape) - 1))
        table = draw(tables(axis, cut_by))
        shape[axis] = table.extent
        dtype = draw(st.sampled_from(["float32", "float64"]))
        tensors.append(Fused(f"t{number}.weight", dtype, tuple(shape), table))
    return tensors


@st.composite
def layouts(draw: st.DrawFn, tensors: Sequence[Fused], inner_size: int) -> Layout:
    """Draw a layout whose ranks slice parts, shard tensors plainly, or have all of them."""
    splits = {}
    for tensor in tensors:
        fused = tensor.table.axis
        axes = [*range(len(tensor.shape)), None]
        # Most often parts are sliced, and what is left of them is split once more.
        inner = draw(st.sampled_from([fused] * 9 + axes))
        splits[tensor.key] = Splits(inner, draw(st.sampled_from([fused, fused, *axes])))
    return Layout(
        inner_name=draw(st.sampled_from(["tp"] * 5 + ["cp"])),
        inner_size=inner_size,
        outer_size=draw(st.sampled_from([1, 2, 2, 3])),
        is_outer_left=draw(st.booleans()),
        splits=splits,
    )


def held(live: LiveTensor) -> tuple[Tensor, Box, Bytes]:
    data = as_bytes(live.data.contiguous())
    return Tensor(live.key, live.dtype, live.global_shape), live.box, np.asarray(data)


@settings(
    max_examples=examples(150),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_parts_sliced_in_one_layout_are_stored_whole_and_arrive_in_another(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    saved_by, loaded_by = data.draw(degrees), data.draw(degrees)
    tensors = data.draw(fused_tensors((saved_by, loaded_by)))
    saved = data.draw(layouts(tensors, saved_by))
    loaded = data.draw(layouts(tensors, loaded_by))
    descriptions = Descriptions(parts={tensor.name: tensor.table for tensor in tensors})
    fused = FusedTensors(descriptions)
    ranks = [
        [live for t in tensors for live in fused.describe(t.key, saved.tensor(t, rank))]
        for rank in saved.ranks
    ]
    documents = describing_documents(descriptions, specs_of(itertools.chain(*ranks)))
    storage = DictStorage()
    store_held(storage, [[held(live) for live in lives] for lives in ranks], documents)

    source = StoredCheckpoint.open(storage)
    source.verify()
    for tensor in tensors:
        stored = torch.full_like(tensor.whole, -1)
        source.read([BoxRequest(tensor.key, Box.whole(tensor.shape), as_bytes(stored))])
        assert torch.equal(stored, tensor.whole), "what is stored has the order of its parts"
    for rank in loaded.ranks:
        wanted = [loaded.tensor(tensor, rank) for tensor in tensors]
        expected = [local_of(tensor).clone() for tensor in wanted]
        for tensor in wanted:
            local_of(tensor).fill_(-1)
        lives = [
            live
            for tensor, own in zip(tensors, wanted, strict=True)
            for live in fused.describe(tensor.key, own)
        ]
        fill(plan_fills(LiveState(tuple(lives), documents), source), source)
        for own, values in zip(wanted, expected, strict=True):
            assert torch.equal(local_of(own), values)
