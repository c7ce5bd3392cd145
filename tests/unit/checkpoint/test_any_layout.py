"""Property test: state that was saved in any layout is read bit for bit in any other.

One process plays all ranks, with the real planner, chunking, writer and reader, over a storage in
memory. The format's sizes are made small, so that small tensors have many chunks, cells and packs.
Real processes do the same in tests/integration.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from keepstep.checkpoint.errors import CheckpointMissing
from keepstep.checkpoint.format.layout.boxes import Box, Entry, Json, ShardIndex
from keepstep.checkpoint.format.layout.completeness import ONLY_MODEL
from keepstep.checkpoint.format.layout.descriptions import Descriptions, describing_documents
from keepstep.checkpoint.format.layout.integers import ceil_div
from keepstep.checkpoint.format.layout.planner import plan_reads
from keepstep.checkpoint.format.layout.source import BoxRequest, TensorSpec
from keepstep.checkpoint.format.stored import chunking, writer
from keepstep.checkpoint.format.stored.chunking import ChunkPlan, plan_chunks
from keepstep.checkpoint.format.stored.object_names import Attempt, StoredStep
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.writer import publish, write_part
from keepstep.checkpoint.live.fills import fill
from keepstep.checkpoint.live.placement import local_box
from keepstep.checkpoint.live.restore import plan_fills
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor, as_bytes, torch_dtype
from keepstep.checkpoint.snapshot.arena import box_bytes
from tests.examples import examples

Bytes = npt.NDArray[np.uint8]
ITEMSIZES = {"uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass
class DictStorage:
    """Objects in a dictionary."""

    url: str = "dict://"
    objects: dict[str, bytes] = field(default_factory=dict)

    def read(self, name: str, nbytes: int = 0) -> bytes:
        if name not in self.objects:
            raise CheckpointMissing(name)
        return self.objects[name]

    def read_into(self, name: str, buffers: Sequence[memoryview], offset: int = 0) -> int:
        data = self.read(name)[offset:]
        start = 0
        for buffer in buffers:
            piece = data[start : start + buffer.nbytes]
            buffer[: len(piece)] = piece
            start += len(piece)
        return start

    @property
    def reads_past_cache(self) -> bool:
        return False

    def read_past_cache(self, name: str, buffer: memoryview, offset: int) -> int | None:
        return None

    can_link: bool = False

    def link(self, source: str, name: str, pieces: Sequence[bytes | memoryview]) -> bool:
        return False

    def prefetch(self, name: str, offset: int, nbytes: int) -> None:
        assert offset + nbytes <= len(self.objects[name]), "no read beyond an object's end"

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        assert name not in self.objects, "a chunk has one writer"
        self.objects[name] = b"".join(pieces)

    def create(self, name: str, data: bytes) -> None:
        self.objects[name] = data

    def flush(self, names: Sequence[str]) -> None:
        assert set(names) <= self.objects.keys()

    def exists(self, name: str) -> bool:
        return name in self.objects

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)

    def names(self, prefix: str = "") -> Sequence[str]:
        return sorted(name for name in self.objects if name.startswith(prefix))

    def directories_with(self, leaf: str, after: str = "") -> Sequence[str]:
        return [name.split("/")[0] for name in self.objects if name.endswith(leaf)]


@dataclass(frozen=True)
class Tensor:
    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def values(self) -> Bytes:
        """Random bytes, the same at every call; the last axis is an element's bytes."""
        seed = int.from_bytes(self.key.encode()[-6:])
        shape = (*self.shape, ITEMSIZES[self.dtype])
        return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


Layout = list[list[tuple[Tensor, Box]]]
"""The shards of each rank: (tensor, box); a rank may have several shards of one tensor."""


def flat_boxes(shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    """Return the boxes that make up a range of elements of the flattened tensor.

    ZeRO and FSDP1 have such shards, which may begin and end within rows.
    """
    if begin >= end:
        return []
    if not shape:
        return [Box((), ())]
    row_shape = shape[1:]
    row = math.prod(row_shape)
    first, last = ceil_div(begin, row), end // row  # The complete rows.
    if first > last:
        start = begin // row
        return boxes_in_row(start, row_shape, begin % row, end - start * row)
    boxes = []
    if begin % row:
        boxes += boxes_in_row(first - 1, row_shape, begin % row, row)
    if last > first:
        boxes.append(Box((first, *(0 for _ in row_shape)), (last - first, *row_shape)))
    if end % row:
        boxes += boxes_in_row(last, row_shape, 0, end % row)
    return boxes


def boxes_in_row(row: int, row_shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.shape)) for box in flat_boxes(row_shape, begin, end)]


tensors = st.lists(
    st.tuples(
        st.sampled_from(sorted(ITEMSIZES)), st.lists(st.integers(0, 11), max_size=3).map(tuple)
    ),
    min_size=1,
    max_size=4,
).map(
    lambda drawn: [
        Tensor(f"model/t{i}.weight", dtype, shape) for i, (dtype, shape) in enumerate(drawn)
    ]
)


@st.composite
def layouts(draw: st.DrawFn, stored: Sequence[Tensor]) -> Layout:
    """Draw a layout of pipeline x data x tensor parallelism.

    Each tensor is on one stage or on all, and is sharded by placements, as a flat range, or as the
    tensor of an expert, which one data-parallel rank has.
    """
    pp_size, dp_size, tp_size = (draw(st.integers(1, n)) for n in (2, 4, 3))
    ranks: Layout = [[] for _ in range(pp_size * dp_size * tp_size)]
    for tensor in stored:
        shape, size = tensor.shape, math.prod(tensor.shape)
        stage = draw(st.integers(-1, pp_size - 1))
        kind = draw(st.sampled_from(["placed", "placed", "flat", "expert"]))
        expert = draw(st.integers(0, dp_size - 1))
        placements = draw(placements_of(tensor, tp_size))
        for p, d, t in itertools.product(range(pp_size), range(dp_size), range(tp_size)):
            if stage not in (-1, p) or (kind == "expert" and d != expert):
                continue
            if kind == "flat":
                piece = ceil_div(size, dp_size * tp_size)
                begin = min(size, piece * (d * tp_size + t))
                boxes = flat_boxes(shape, begin, min(size, begin + piece))
            elif kind == "expert":
                boxes = [local_box(shape, (tp_size,), (t,), placements[1:])]
            else:
                boxes = [local_box(shape, (dp_size, tp_size), (d, t), placements)]
            ranks[(p * dp_size + d) * tp_size + t] += [(tensor, box) for box in boxes]
        if kind == "flat" and size == 0:
            ranks[0].append((tensor, Box.whole(shape)))
    return ranks


@st.composite
def placements_of(draw: st.DrawFn, tensor: Tensor, parts: int) -> tuple[Placement, ...]:
    if not tensor.shape:
        return (Replicate(), Replicate())
    axes = st.integers(0, len(tensor.shape) - 1)
    if draw(st.booleans()):
        axis = draw(axes)
        return (_StridedShard(axis, split_factor=parts), Shard(axis))
    placement = st.one_of(st.just(Replicate()), axes.map(Shard))
    return (draw(placement), draw(placement))


def store(
    storage: DictStorage, layout: Layout, documents: Mapping[str, Json] | None = None
) -> ChunkPlan:
    """Save the state, with ranks that can read each other's memory."""
    ranks = [[(t, box, t.values[box.slices]) for t, box in shards] for shards in layout]
    return store_held(storage, ranks, documents)


def store_held(
    storage: DictStorage,
    ranks: Sequence[Sequence[tuple[Tensor, Box, Bytes]]],
    documents: Mapping[str, Json] | None = None,
) -> ChunkPlan:
    """Save what each rank holds in its boxes, whatever it is."""
    memories: list[Bytes] = []
    indexes: list[ShardIndex] = []
    for shards in ranks:
        entries, memory = [], [np.zeros(0, np.uint8)]
        offset = 0
        for tensor, box, elements in shards:
            data = np.ascontiguousarray(elements).reshape(-1)
            entries.append(
                Entry(
                    key=tensor.key,
                    dtype=tensor.dtype,
                    global_shape=tensor.shape,
                    box=box,
                    byte_offset=offset,
                    nbytes=data.nbytes,
                )
            )
            memory.append(data)
            offset += data.nbytes
        memories.append(np.concatenate(memory))
        indexes.append(ShardIndex(offset, tuple(entries), {}))
    plan = plan_chunks(indexes)

    def read_box(key: str, box: Box) -> Bytes:
        itemsize = ITEMSIZES[plan.tensors[key].dtype]
        result = np.zeros((*box.shape, itemsize), np.uint8)
        for read in plan_reads([(key, box)], indexes):
            result[read.box.within(box).slices] = box_bytes(
                read.entry, memories[read.source], read.box
            )
        return result

    attempt = Attempt(StoredStep(1, 0), "a")
    parts = [
        write_part(storage, attempt, plan, [rank], read_box, name=rank)
        for rank in range(len(ranks))
    ]
    publish(storage, attempt, parts, plan.tensors, plan.chunk_parts(), documents or {})
    return plan


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"CHUNK_NBYTES": 512, "PACKED_NBYTES": 96, "CELL_NBYTES": (16, 64), "SEGMENT_NBYTES": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(chunking, name, value)
    monkeypatch.setattr(writer, "PACK_NBYTES", 128)


@settings(
    max_examples=examples(250),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_state_saved_in_one_layout_is_read_bit_for_bit_in_another(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    stored = data.draw(tensors)
    storage = DictStorage()
    store(storage, data.draw(layouts(stored)))
    source = StoredCheckpoint.open(storage)
    source.verify()
    for wanted in data.draw(layouts(stored)):
        requests, expected = [], []
        for tensor, box in wanted:
            into = np.zeros(box.size * ITEMSIZES[tensor.dtype], np.uint8)
            requests.append(BoxRequest(tensor.key, box, into.data))
            expected.append((into, tensor.values[box.slices].reshape(-1)))
        source.read(requests)
        for got, want in expected:
            assert (got == want).all()


@dataclass(frozen=True)
class Padded:
    """A parameter and a slot of it, padded in one way when saved, in another when loaded."""

    name: str
    dtype: str
    logical: tuple[int, ...]
    stored: tuple[int, ...]
    live: tuple[int, ...]
    has_stored_description: bool

    @property
    def keys(self) -> tuple[str, str]:
        return f"model/{self.name}", f"optim/{self.name}/exp_avg"


@st.composite
def padded_parameters(draw: st.DrawFn) -> list[Padded]:
    """Draw parameters; without a description the stored shape is the logical one."""
    parameters = []
    for number in range(draw(st.integers(1, 3))):
        logical = tuple(draw(st.lists(st.integers(0, 8), min_size=1, max_size=3)))
        stored, live = (
            tuple(extent + draw(st.sampled_from([0, 0, 1, 2, 5])) for extent in logical)
            for _ in range(2)
        )
        is_described = stored != logical or draw(st.booleans())
        dtype = draw(st.sampled_from(sorted(ITEMSIZES)))
        name = f"t{number}.weight"
        parameters.append(Padded(name, dtype, logical, stored, live, is_described))
    return parameters


def with_slots(layout: Layout, parameters: Sequence[Padded]) -> Layout:
    """Return a layout in which a slot lies where its parameter does."""
    slots = dict(parameter.keys for parameter in parameters)
    return [
        [*shards, *((Tensor(slots[t.key], t.dtype, t.shape), box) for t, box in shards)]
        for shards in layout
    ]


@settings(
    max_examples=examples(250),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_padded_tensors_are_read_in_any_other_padding_and_layout(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    parameters = data.draw(padded_parameters())
    stored = [Tensor(p.keys[0], p.dtype, p.stored) for p in parameters]
    layout = with_slots(data.draw(layouts(stored)), parameters)
    specs = {t.key: TensorSpec(t.dtype, t.shape) for shards in layout for t, _ in shards}
    described = {p.name: p.logical for p in parameters if p.has_stored_description}
    storage = DictStorage()
    store(storage, layout, describing_documents(Descriptions(padding=described), specs))
    source = StoredCheckpoint.open(storage)

    by_key = {key: p for p in parameters for key in p.keys}
    saved = {key: Tensor(key, p.dtype, p.stored).values for key, p in by_key.items()}
    padding = {p.keys[0]: {"logical_shape": list(p.logical)} for p in parameters}
    wanted = data.draw(layouts([Tensor(p.keys[0], p.dtype, p.live) for p in parameters]))
    for shards in with_slots(wanted, parameters):
        tensors = []
        for tensor, box in shards:
            values = torch.empty(box.shape, dtype=torch_dtype(tensor.dtype))
            # Neither zero nor what is saved.
            as_bytes(values)[:] = (~tensor.values[box.slices]).tobytes()
            tensors.append(LiveTensor(tensor.key, tensor.shape, box, values))
        state = LiveState(tuple(tensors), {"padding": padding})
        fill(plan_fills(state, source, requested=replace(ONLY_MODEL, elsewhere=saved)), source)
        for (tensor, box), live in zip(shards, tensors, strict=True):
            parameter = by_key[tensor.key]
            whole = ~tensor.values if tensor.key == parameter.keys[0] else 0 * tensor.values
            filled = parameter.stored if parameter.stored == parameter.live else parameter.logical
            inside = Box.whole(filled).slices
            whole[inside] = saved[tensor.key][inside]
            assert as_bytes(live.data).tobytes() == whole[box.slices].tobytes()


@given(st.lists(st.integers(1, 5), max_size=3).map(tuple), st.data())
def test_flat_boxes_are_disjoint_and_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    numbers = np.arange(size).reshape(shape)
    elements = [numbers[box.slices].reshape(-1) for box in flat_boxes(shape, begin, end)]
    assert np.concatenate([np.zeros(0, int), *elements]).tolist() == list(range(begin, end))
