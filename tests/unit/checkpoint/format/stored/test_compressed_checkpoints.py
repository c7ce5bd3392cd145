"""Claims about checkpoints with compressed cells: what is read, and what is refused as damage."""

from __future__ import annotations

import base64
import json
import struct
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointTooNew
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import _NUMPY, numpy_dtype
from keepstep.checkpoint.format.layout.source import BoxRequest
from keepstep.checkpoint.format.stored import cell_codec, manifest
from keepstep.checkpoint.format.stored.chunking import (
    ChunkPlan,
    PlannedChunk,
    StoredTensor,
    chunks_over,
)
from keepstep.checkpoint.format.stored.housekeeping import collect_garbage, compare, copy, remove
from keepstep.checkpoint.format.stored.manifest import COMPRESSED_CELLS, Manifest, StoredObject
from keepstep.checkpoint.format.stored.object_names import MANIFEST, ROOT, Attempt, StoredStep
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.format.stored.stored_json import encode
from keepstep.checkpoint.format.stored.writer import publish, write_part
from keepstep.checkpoint.format.stored.zarr_metadata import parse_listings

Bytes = npt.NDArray[np.uint8]
Change = Callable[[Any], Any]

PART = "parts/000000.json"
KEY = "model/w"
CELL = (32, 16)
TENSOR = StoredTensor(
    dtype="float32", shape=(64, 33), chunk=(64, 32), cell=CELL, is_packed=False, compression="zstd"
)
CHUNK = f"{KEY}/c.0.0"


def weights(tensor: StoredTensor = TENSOR, seed: int = 0) -> Bytes:
    """Return bytes that compress as a model's do: those of normally distributed numbers."""
    values = np.random.default_rng(seed).normal(0, 0.02, tensor.shape).astype(np.float32)
    return values.view(np.uint8).reshape(*tensor.shape, 4)


def save(
    url: str, values: Mapping[str, tuple[StoredTensor, Bytes]], step: int = 1, name: str = "a"
) -> StoredCheckpoint:
    """Store whole tensors; the last axis of their values is an element's bytes."""
    tensors = {key: tensor for key, (tensor, _) in values.items()}
    chunks = tuple(
        PlannedChunk(chunk.key, chunk.place, chunk.box, ())
        for key, tensor in tensors.items()
        for chunk in chunks_over(key, tensor.shape, tensor.chunk, Box.whole(tensor.shape))
    )
    plan = ChunkPlan(tensors, (chunks,))
    storage, attempt = open_storage(url), Attempt(StoredStep(step, 0), name)

    def read_box(key: str, box: Box) -> Bytes:
        return values[key][1][box.slices]

    part = write_part(storage, attempt, plan, [0], read_box, name=0)
    publish(storage, attempt, [part], tensors, plan.chunk_parts(), {})
    return StoredCheckpoint.open(open_storage(url), step)


def read(source: StoredCheckpoint, box: Box, key: str = KEY) -> Bytes:
    itemsize = numpy_dtype(source.stored_tensors[key].dtype).itemsize
    into = np.empty((*box.shape, itemsize), np.uint8)
    source.read([BoxRequest(key, box, into.data.cast("B") if into.size else memoryview(b""))])
    return into


def read_all(source: StoredCheckpoint) -> Bytes:
    return read(source, Box.whole(TENSOR.shape))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of an attempt that has stored the tensor, compressed."""
    return tmp_path / save(str(tmp_path), {KEY: (TENSOR, weights())}).directory


def url_of(root: Path) -> str:
    return str(root.parents[1])


def tamper(root: Path, name: str, change: Change) -> None:
    """Change an object that the manifest lists, and its checksum in the manifest."""
    data = encode(change(json.loads((root / name).read_bytes())))
    (root / name).write_bytes(data)
    committed = root.parent / MANIFEST
    before = Manifest.decode(committed.read_bytes(), "")
    objects = tuple(
        StoredObject(name, len(data), crc32c.crc32c(data)) if item.name == name else item
        for item in before.objects
    )
    committed.write_bytes(replace(before, objects=objects).encode())


def numbers(text: str) -> list[int]:
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def text(values: list[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}I", *values)).decode()


@st.composite
def stored(draw: st.DrawFn) -> tuple[StoredTensor, Bytes]:
    """Draw a tensor of any type, cut into any cells, and data of any entropy."""
    dtype = draw(st.sampled_from(sorted(_NUMPY)))
    rank = draw(st.integers(0, 3))
    cell = tuple(draw(st.integers(1, 5)) for _ in range(rank))
    chunk = tuple(extent * draw(st.integers(1, 3)) for extent in cell)
    shape = tuple(draw(st.integers(1, 2 * extent + 1)) for extent in chunk)
    tensor = StoredTensor(
        dtype=dtype, shape=shape, chunk=chunk, cell=cell, is_packed=False,
        compression=draw(st.sampled_from(["zstd", "zstd", None])),
    )  # fmt: skip
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    most = draw(st.sampled_from([1, 2, 16, 256]))
    itemsize = numpy_dtype(dtype).itemsize
    return tensor, random.integers(0, most, (*shape, itemsize), np.uint8)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    return Box(
        offset,
        tuple(
            draw(st.integers(1, extent - start))
            for extent, start in zip(shape, offset, strict=True)
        ),
    )


@given(st.lists(stored(), min_size=1, max_size=3), st.data())
def test_any_box_of_compressed_tensors_is_read_as_it_was_written(
    drawn: list[tuple[StoredTensor, Bytes]], data: st.DataObject
) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    source = save(url, {f"t{n}": item for n, item in enumerate(drawn)})
    for number, (tensor, values) in enumerate(drawn):
        box = data.draw(boxes(tensor.shape))
        assert np.array_equal(read(source, box, f"t{number}"), values[box.slices])
    source.verify()


def test_a_model_s_numbers_shrink_and_random_bytes_grow_by_a_header(tmp_path: Path) -> None:
    shape = (512, 256)
    tensor = replace(TENSOR, shape=shape, chunk=shape, cell=shape)
    plain = replace(tensor, compression=None)
    random = np.random.default_rng(0).integers(0, 256, (*shape, 4), np.uint8)

    def stored_nbytes(tensor: StoredTensor, values: Bytes, step: int) -> int:
        source = save(str(tmp_path), {KEY: (tensor, values)}, step)
        return sum(item.nbytes for item in source.cell_index.objects)

    for step, (values, least, most) in enumerate(
        [(weights(tensor), 0, 0.9), (random, 1.0, 1.001)], 1
    ):
        compressed = stored_nbytes(tensor, values, 2 * step)
        ratio = compressed / stored_nbytes(plain, values, 2 * step + 1)
        assert least <= ratio <= most
    assert compressed == random.nbytes + 16 + 4 + 16 + 4


@given(position=st.integers(0, 2**20), bit=st.integers(0, 7))
def test_a_damaged_compressed_cell_is_found_and_named(position: int, bit: int) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    source = save(url, {KEY: (TENSOR, weights())})
    name = f"{source.directory}/{CHUNK}"
    content = bytearray(source.storage.read(name))
    content[position % len(content)] ^= 1 << bit
    source.storage.write(name, [bytes(content)])
    for act in (lambda: read_all(source), source.verify):
        with pytest.raises(CheckpointDamaged, match=f"{CHUNK}: the data of {KEY} does not match"):
            act()


def with_first_cell(root: Path, cell: bytes) -> None:
    """Replace the first cell by other bytes of its size, and make all checksums agree with it."""
    path = root / CHUNK
    content = bytearray(path.read_bytes())
    checksum = crc32c.crc32c(cell)
    content[: len(cell) + 4] = cell + checksum.to_bytes(4, "little")
    path.write_bytes(content)

    def change(listing: Any) -> Any:
        chunk = next(item for item in listing if item[0] == CHUNK)
        chunk[2] = text([checksum, *numbers(chunk[2])[1:]])
        return listing

    tamper(root, PART, change)


def first_cell(root: Path) -> bytes:
    listing = json.loads((root / PART).read_bytes())
    size = numbers(next(item for item in listing if item[0] == CHUNK)[3])[0]
    return (root / CHUNK).read_bytes()[: size - 4]


@pytest.mark.parametrize(
    ("field", "number"),
    [(4, 2**31), (4, 0), (4, 2047), (4, 2049), (12, 0), (12, 2**31), (12, 16), (8, 2**31), (0, 0)],
)
def test_a_cell_whose_header_lies_is_refused_though_its_checksum_matches(
    root: Path, field: int, number: int
) -> None:
    """Blosc reads and writes as much as the header tells."""
    cell = bytearray(first_cell(root))
    cell[field : field + 4] = number.to_bytes(4, "little")
    with_first_cell(root, bytes(cell))
    source = StoredCheckpoint.open(open_storage(url_of(root)))
    for act in (lambda: read_all(source), source.verify):
        with pytest.raises(
            CheckpointDamaged, match=f"the data of {KEY} matches its checksum and cannot be decomp"
        ):
            act()


def sizes(change: Callable[[list[int]], list[int]]) -> Change:
    """Return what changes the sizes of the first chunk's cells, and its object's size with them."""

    def changed(listing: Any) -> Any:
        chunk = next(item for item in listing if item[0] == CHUNK)
        before = numbers(chunk[3])
        after = change(list(before))
        chunk[1] += sum(after) - sum(before)
        chunk[3] = text(after)
        return listing

    return changed


def moved(before: list[int]) -> list[int]:
    """Let the first cell end a byte later, and the second one be as much shorter."""
    return [before[0] + 1, before[1] - 1, *before[2:]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (sizes(lambda before: [0, before[0] + before[1], *before[2:]]), "sizes that its cells"),
        (sizes(lambda before: before[:-1]), "sizes that its cells cannot have"),
        (sizes(lambda before: [*before, 20]), "sizes that its cells cannot have"),
        (sizes(lambda before: []), "sizes that its cells cannot have"),
        (sizes(lambda before: [2**32 - 1, *before[1:]]), "sizes that its cells cannot have"),
        (sizes(lambda before: [2048 + 21, *before[1:]]), "sizes that its cells cannot have"),
        (sizes(moved), "does not match its checksum"),
        (sizes(lambda before: [*before[:-1], before[-1] + 1]), "ends before byte"),
        (lambda listing: [[*item[:3], text([])] for item in listing], "sizes that its cells"),
        (lambda listing: [item[:3] for item in listing], "sizes that its cells cannot have"),
        (lambda listing: [[*item[:3], "AAA="] for item in listing], "is not a listing"),
        (lambda listing: [[*item, ""] for item in listing], "is not a listing"),
        (
            lambda listing: [[item[0], item[1] + 1, *item[2:]] for item in listing],
            "its cells have",
        ),
    ],
)
def test_listed_sizes_that_contradict_the_object_are_refused(
    root: Path, change: Change, reason: str
) -> None:
    tamper(root, PART, change)
    source = StoredCheckpoint.open(open_storage(url_of(root)))
    for act in (lambda: read_all(source), source.verify):
        with pytest.raises(CheckpointDamaged, match=reason):
            act()


def test_sizes_of_cells_that_are_not_compressed_are_refused(tmp_path: Path) -> None:
    plain = replace(TENSOR, compression=None)
    root = tmp_path / save(str(tmp_path), {KEY: (plain, weights())}).directory
    size = plain.cell_nbytes + 4
    tamper(
        root,
        PART,
        lambda listing: [[*item, text([size] * (len(item[2]) // 5))] for item in listing],
    )
    with pytest.raises(CheckpointDamaged, match="sizes that its cells cannot have"):
        read_all(StoredCheckpoint.open(open_storage(str(tmp_path))))


def test_a_release_that_lacks_the_feature_refuses_it_by_name(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "FEATURES", frozenset())
    with pytest.raises(CheckpointTooNew, match=f"requires '{COMPRESSED_CELLS}'"):
        StoredCheckpoint.open(open_storage(url_of(root)))
    with pytest.raises(CheckpointTooNew, match=f"requires '{COMPRESSED_CELLS}'"):
        parse_listings((root / ROOT).read_bytes(), "here")


def test_checkpoints_without_compressed_cells_require_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(str(tmp_path), {KEY: (replace(TENSOR, compression=None), weights())})
    assert source.manifest.required == ()
    root = json.loads(source.verified(ROOT))
    assert root["attributes"]["keepstep"]["required"] == []


def test_compressed_cells_that_the_manifest_does_not_require_are_refused(root: Path) -> None:
    committed = root.parent / MANIFEST
    before = Manifest.decode(committed.read_bytes(), "")
    committed.write_bytes(replace(before, required=()).encode())
    with pytest.raises(CheckpointDamaged, match=f"needs {COMPRESSED_CELLS}, which the manifest"):
        StoredCheckpoint.open(open_storage(url_of(root))).verify()


def blosc(**changes: Any) -> Change:
    def change(content: Any) -> Any:
        node = content["consolidated_metadata"]["metadata"][KEY]
        node["codecs"][0]["configuration"]["codecs"][1]["configuration"] |= changes
        return content

    return change


def huge(content: Any) -> Any:
    """Let a cell have 2 GiB."""
    node = content["consolidated_metadata"]["metadata"][KEY]
    shape = [2**29]
    node |= {"shape": shape, "chunk_grid": {**node["chunk_grid"]}}
    node["chunk_grid"]["configuration"] = {"chunk_shape": shape}
    node["codecs"][0]["configuration"]["chunk_shape"] = shape
    return blosc(blocksize=2**31)(content)


@pytest.mark.parametrize(
    "change",
    [blosc(cname="lz4"), blosc(shuffle="bitshuffle"), blosc(typesize=2), blosc(x=1), huge],
    ids=["algorithm", "shuffle", "type", "unknown", "huge"],
)
def test_another_compression_in_the_metadata_is_refused_as_damage(
    root: Path, change: Change
) -> None:
    tamper(root, ROOT, change)
    with pytest.raises(CheckpointDamaged, match="does not describe"):
        StoredCheckpoint.open(open_storage(url_of(root))).verify()


def test_chunks_that_did_not_change_are_linked(tmp_path: Path) -> None:
    first = save(str(tmp_path), {KEY: (TENSOR, weights())}, 1)
    changed = weights()
    changed[0, 32] ^= 1
    second = save(str(tmp_path), {KEY: (TENSOR, changed)}, 2)
    inodes = [
        {
            name: (tmp_path / source.directory / KEY / name).stat().st_ino
            for name in ("c.0.0", "c.0.1")
        }
        for source in (first, second)
    ]
    assert inodes[0]["c.0.0"] == inodes[1]["c.0.0"]
    assert inodes[0]["c.0.1"] != inodes[1]["c.0.1"]
    assert np.array_equal(read_all(second), changed)


def test_a_copy_has_the_same_compressed_bytes(root: Path, tmp_path: Path) -> None:
    source, target = (
        StoredCheckpoint.open(open_storage(url_of(root))),
        f"memory://{uuid.uuid4().hex}",
    )
    for _ in range(2):  # The second time it is there already.
        copy(source, open_storage(target))
    copied = StoredCheckpoint.open(open_storage(target))
    copied.verify()
    assert copied.manifest.required == (COMPRESSED_CELLS,)
    assert copied.storage.read(f"{copied.directory}/{CHUNK}") == (root / CHUNK).read_bytes()
    assert np.array_equal(read_all(copied), weights())


def test_a_damaged_checkpoint_is_not_copied(root: Path) -> None:
    content = bytearray((root / CHUNK).read_bytes())
    content[100] ^= 1
    (root / CHUNK).write_bytes(content)
    with pytest.raises(CheckpointDamaged, match="is not what was written"):
        copy(
            StoredCheckpoint.open(open_storage(url_of(root))),
            open_storage(f"memory://{uuid.uuid4().hex}"),
        )


def test_the_same_values_compare_equal_however_they_are_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(step: int, tensor: StoredTensor, values: Bytes) -> StoredCheckpoint:
        return save(str(tmp_path), {KEY: (tensor, values)}, step)

    first = saved(1, TENSOR, weights())
    changed = weights()
    changed[-1, -1] ^= 1
    same = [
        first,
        saved(2, TENSOR, weights()),
        saved(3, replace(TENSOR, compression=None), weights()),
    ]
    # As another version of the library may.
    monkeypatch.setattr(cell_codec, "BLOSC_LEVEL", 9)
    same.append(saved(4, TENSOR, weights()))
    assert same[0].parts() != same[3].parts()
    for source in same:
        assert compare(first, source).changed == {}
        assert compare(source, saved(5 + source.step, TENSOR, changed)).changed == {KEY: "values"}


def test_a_removed_checkpoint_is_deleted(root: Path) -> None:
    (stored,) = list_steps(open_storage(url_of(root)))
    remove(open_storage(url_of(root)), stored, now=0.0)
    assert collect_garbage(open_storage(url_of(root)), now=1.0, grace_s=0.0)
    assert not root.exists()
