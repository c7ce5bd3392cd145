"""Boxes of foreign checkpoints are read by few requests in bounded memory, from any storage."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.convert.read.arrays import FileArray, MemoryArray
from keepstep.checkpoint.convert.read.files import ForeignFile
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.pieces import ForeignTensor, Piece, assembled, whole
from keepstep.checkpoint.errors import CheckpointDamaged, LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.source import BoxRequest, TensorSpec
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.opened_checkpoints import open_foreign
from tests.unit.checkpoint.convert.read.test_arrays import permuted
from tests.unit.checkpoint.convert.read.test_safetensors_file import content_of
from tests.unit.checkpoint.convert.read.written import CountedStorage, box_of, extent_of, tensor_of


def source_of(tensors: dict[str, ForeignTensor]) -> ForeignCheckpoint:
    return ForeignCheckpoint(
        url="here", format_name="test", step=0, foreign_tensors=tensors, documents={}
    )


def counted(directory: Path, values: np.ndarray) -> tuple[FileArray, list[tuple[int, int]]]:
    (directory / "file").write_bytes(values.tobytes())
    storage = CountedStorage(str(directory), directory)
    file = ForeignFile(storage, "file", values.nbytes)
    return FileArray.contiguous(file.whole, values.dtype.name, values.shape), storage.reads


@given(st.data())
def test_boxes_of_tensors_in_pieces_are_those_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Columns of a transposed file beside rows in memory, as a tensor of three pieces."""
    values = np.arange(7 * 9, dtype=np.int16).reshape(7, 9)
    extent = extent_of(tmp_path_factory.mktemp("pieces"), values.T.copy().tobytes())
    array = permuted(FileArray.contiguous(extent, "int16", (9, 7)), (1, 0))
    cut = data.draw(st.integers(0, 9))
    row = data.draw(st.integers(0, 7))
    boxes = [
        Box((0, 0), (7, cut)),
        Box((0, cut), (row, 9 - cut)),
        Box((row, cut), (7 - row, 9 - cut)),
    ]
    in_memory = MemoryArray("int16", values[boxes[2].slices], "memory")
    pieces = [*(Piece(box, array.narrow(box)) for box in boxes[:2]), Piece(boxes[2], in_memory)]
    source = source_of({"w": assembled("w", TensorSpec("int16", (7, 9)), pieces)})
    starts = [data.draw(st.integers(0, n)) for n in (7, 9)]
    extents = [data.draw(st.integers(0, n - at)) for n, at in zip((7, 9), starts, strict=True)]
    box = Box(tuple(starts), tuple(extents))
    np.testing.assert_array_equal(box_of(source, "w", box), values[box.slices])


def test_bytes_that_lie_together_are_read_once(tmp_path: Path) -> None:
    array, reads = counted(tmp_path, np.arange(6000, dtype=np.float32).reshape(60, 100))
    tensors = {f"t{n}": whole(array.narrow(Box((n, 0), (1, 100)))) for n in range(0, 60, 2)}
    source = source_of(tensors)
    memory = [np.zeros((1, 100), np.float32) for _ in tensors]
    source.read([
        BoxRequest(key, Box.whole((1, 100)), memoryview(values.view(np.uint8).reshape(-1)))
        for key, values in zip(tensors, memory, strict=True)
    ])  # fmt: skip
    assert reads == [(0, 59 * 400)]
    assert [values[0, 0] for values in memory] == list(range(0, 6000, 200))


def test_bytes_far_apart_are_not_read(tmp_path: Path) -> None:
    array, reads = counted(tmp_path, np.zeros((4, 2**16), np.int32))
    box_of(source_of({"w": whole(array)}), "w", Box((0, 10), (4, 5)))
    assert sorted(reads) == [(2**18 * n + 40, 2**18 * n + 60) for n in range(4)]


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    """Columns of 96 MiB: all of the file is read, and little of it is in memory at a time."""
    rows = 3 * 2**13
    with (tmp_path / "file").open("wb") as file:
        file.truncate(rows * 2**12)
    storage = open_storage(str(tmp_path))
    extent = ForeignFile(storage, "file", rows * 2**12).whole
    array = FileArray.contiguous(extent, "float32", (rows, 2**10))
    source = source_of({"w": whole(array)})
    tracemalloc.start()
    box_of(source, "w", Box((0, 0), (rows, 1)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 48 * 2**20


def test_contiguous_bytes_go_to_the_callers_memory_directly(tmp_path: Path) -> None:
    array, reads = counted(tmp_path, np.ones(2**23, np.uint8))
    source = source_of({"w": whole(array)})
    values = np.zeros(2**23, np.uint8)
    tracemalloc.start()
    source.read([BoxRequest("w", Box.whole(values.shape), memoryview(values))])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert values.all()
    assert sorted(reads) == [(0, 2**22), (2**22, 2**23)]
    assert peak < 2**20


def test_memory_may_lie_at_any_address(tmp_path: Path) -> None:
    array, _ = counted(tmp_path, np.arange(12, dtype=np.float64).reshape(3, 4))
    source = source_of({"w": whole(permuted(array, (1, 0)))})
    memory = bytearray(12 * 8 + 1)
    source.read([BoxRequest("w", Box.whole((4, 3)), memoryview(memory)[1:])])
    expected = np.arange(12, dtype=np.float64).reshape(3, 4).T
    np.testing.assert_array_equal(np.frombuffer(memory[1:], np.float64).reshape(4, 3), expected)


def test_failure_of_a_read_is_told(tmp_path: Path) -> None:
    array, _ = counted(tmp_path, np.ones(2**23, np.uint8))
    source = source_of({"w": whole(array)})
    (tmp_path / "file").write_bytes(bytes(100))
    with pytest.raises(CheckpointDamaged, match="file: it ended at byte 100"):
        tensor_of(source, "w")
    with pytest.raises(LayoutMismatch, match="v: not in here"):
        source.read([BoxRequest("v", Box.whole((1,)), memoryview(bytearray(1)))])


def test_file_in_an_object_store_is_read(tmp_path: Path) -> None:
    del tmp_path
    values = np.arange(2**16, dtype=np.float32)
    header = {"w": {"dtype": "F32", "shape": [2**16], "data_offsets": [0, values.nbytes]}}
    storage = open_storage("memory://foreign-source/run")
    storage.write("model.safetensors", [content_of(header, values.tobytes())])
    for url in ("memory://foreign-source/run", "memory://foreign-source/run/model.safetensors"):
        source = open_foreign(url)
        np.testing.assert_array_equal(tensor_of(source, "model/w"), values)
