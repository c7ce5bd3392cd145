"""Whatever layout state was saved in, it is read back bit for bit in any other.

Ranks are played in one process, with the real planner, chunking, writer and reader between them, over a storage in memory. The format's
sizes are made small, so that small tensors have many chunks, cells and packs. Real processes do the same in tests/integration.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from keepstep.checkpoint.errors import CheckpointMissing
from keepstep.checkpoint.layout.boxes import Box, Entry, ShardIndex
from keepstep.checkpoint.layout.planner import plan_reads
from keepstep.checkpoint.layout.source import BoxRequest
from keepstep.checkpoint.live.placement import local_box
from keepstep.checkpoint.memory.arena import box_bytes
from keepstep.checkpoint.stored import chunking, reader, writer
from keepstep.checkpoint.stored.chunking import ChunkPlan, plan_chunks
from keepstep.checkpoint.stored.format import StoredStep
from keepstep.checkpoint.stored.reader import StoredCheckpoint
from keepstep.checkpoint.stored.writer import publish, write_part

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
    def supports_links(self) -> bool:
        return False

    def link_identical(self, source: str, name: str, pieces: Sequence[bytes | memoryview]) -> bool:
        return False

    def prefetch(self, name: str, offset: int, nbytes: int) -> None:
        assert offset + nbytes <= len(self.objects[name]), "only what is there is read"

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

    def directories_with(self, leaf: str) -> Sequence[str]:
        return [name.split("/")[0] for name in self.objects if name.endswith(leaf)]


@dataclass(frozen=True)
class Tensor:
    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def values(self) -> Bytes:
        """Random bytes, the same every time: the tensor's shape plus a last axis of one element's."""
        seed = int.from_bytes(self.key.encode()[-6:])
        shape = (*self.shape, ITEMSIZES[self.dtype])
        return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


# What every rank holds: (tensor, box), of one tensor perhaps several.
Layout = list[list[tuple[Tensor, Box]]]


def flat_boxes(shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    """Return the boxes that elements `begin` to `end` of the flattened tensor are (ZeRO, FSDP1: shards that cut rows)."""
    if begin >= end:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    boxes = []
    if first > last:  # Within one row.
        return [
            prefix(begin // row, box)
            for box in flat_boxes(shape[1:], begin % row, end - begin // row * row)
        ]
    boxes += (
        [prefix(first - 1, box) for box in flat_boxes(shape[1:], begin % row, row)]
        if begin % row
        else []
    )
    if last > first:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    boxes += [prefix(last, box) for box in flat_boxes(shape[1:], 0, end % row)] if end % row else []
    return boxes


def prefix(position: int, box: Box) -> Box:
    return Box((position, *box.offset), (1, *box.shape))


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
def layouts(draw: st.DrawFn, held: Sequence[Tensor]) -> Layout:
    """Draw pipeline x data x tensor parallelism: each tensor on one stage or all, each placed or flat in its own way."""
    stages, data, tensor = (draw(st.integers(1, n)) for n in (2, 4, 3))
    ranks: Layout = [[] for _ in range(stages * data * tensor)]
    for one in held:
        stage = draw(st.integers(-1, stages - 1))
        how = draw(st.sampled_from(["placed", "placed", "flat", "expert"]))
        expert = draw(st.integers(0, data - 1))
        placements = draw(placements_of(one, tensor))
        for p, d, t in itertools.product(range(stages), range(data), range(tensor)):
            if stage not in (-1, p) or (how == "expert" and d != expert):
                continue
            size = math.prod(one.shape)
            rank = (p * data + d) * tensor + t
            if how == "flat":
                piece = -(-size // (data * tensor))
                begin = min(size, piece * (d * tensor + t))
                ranks[rank] += [
                    (one, box) for box in flat_boxes(one.shape, begin, min(size, begin + piece))
                ]
            elif how == "expert":
                ranks[rank].append((one, local_box(one.shape, (tensor,), (t,), placements[1:])))
            else:
                ranks[rank].append((one, local_box(one.shape, (data, tensor), (d, t), placements)))
        if how == "flat" and size == 0:
            ranks[0].append((one, Box.whole(one.shape)))
    return ranks


@st.composite
def placements_of(draw: st.DrawFn, tensor: Tensor, parts: int) -> tuple[Placement, ...]:
    if not tensor.shape:
        return (Replicate(), Replicate())
    axes = st.integers(0, len(tensor.shape) - 1)
    if draw(st.booleans()):
        axis = draw(axes)
        return (_StridedShard(axis, split_factor=parts), Shard(axis))
    one = st.one_of(st.just(Replicate()), axes.map(Shard))
    return (draw(one), draw(one))


def store(storage: DictStorage, layout: Layout) -> ChunkPlan:
    """Save as ranks do that see each other's memory."""
    memories: list[Bytes] = []
    indexes: list[ShardIndex] = []
    for held in layout:
        entries, memory = [], [np.zeros(0, np.uint8)]
        offset = 0
        for tensor, box in held:
            data = np.ascontiguousarray(tensor.values[box.slices]).reshape(-1)
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

    step = StoredStep(1, 0)
    parts = [
        write_part(storage, step, plan, [rank], read_box, name=rank) for rank in range(len(layout))
    ]
    publish(storage, step, parts, plan.tensors, {})
    return plan


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"CHUNK_NBYTES": 512, "PACKED_NBYTES": 96, "CELL_NBYTES": (16, 64), "SEGMENT_NBYTES": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(chunking, name, value)
    monkeypatch.setattr(writer, "PACK_NBYTES", 128)


@settings(
    max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_what_one_layout_saved_another_reads_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    held = data.draw(tensors)
    storage = DictStorage()
    monkeypatch.setattr(reader, "open_storage", lambda url: storage)
    store(storage, data.draw(layouts(held)))
    source = StoredCheckpoint.open("dict://")
    source.verify()
    for wanted in data.draw(layouts(held)):
        requests, expected = [], []
        for tensor, box in wanted:
            into = np.zeros(box.size * ITEMSIZES[tensor.dtype], np.uint8)
            requests.append(BoxRequest(tensor.key, box, into.data))
            expected.append((into, tensor.values[box.slices].reshape(-1)))
        source.read(requests)
        for got, want in expected:
            assert (got == want).all()


@given(st.lists(st.integers(1, 5), max_size=3).map(tuple), st.data())
def test_a_flat_range_is_disjoint_boxes_in_its_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    size = math.prod(shape)
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    numbers = np.arange(size).reshape(shape)
    found = [numbers[box.slices].reshape(-1) for box in flat_boxes(shape, begin, end)]
    assert np.concatenate([np.zeros(0, int), *found]).tolist() == list(range(begin, end))
