"""Tests of checkpoints of many tensors: a reader reads and parses what tells of those it needs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import crc32c
import numpy as np
import pytest

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError
from keepstep.checkpoint.format.layout.boxes import Box, Entry, ShardIndex
from keepstep.checkpoint.format.layout.source import BoxRequest
from keepstep.checkpoint.format.stored import indexed_object, indexed_tensors
from keepstep.checkpoint.format.stored.chunking import StoredTensor, plan_chunks
from keepstep.checkpoint.format.stored.housekeeping import copy
from keepstep.checkpoint.format.stored.key_index import KeyIndex
from keepstep.checkpoint.format.stored.manifest import Manifest, StoredObject
from keepstep.checkpoint.format.stored.metadata import StoredMetadata
from keepstep.checkpoint.format.stored.object_names import (
    CHUNKS,
    INDEX,
    MANIFEST,
    ROOT,
    Attempt,
    StoredStep,
)
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.format.stored.writer import publish, write_part
from tests.unit.checkpoint.storage_fixtures import RecordingStorage, read_from

ATTEMPT = Attempt(StoredStep(1, 0), "x")
COUNT = 4000
KEYS = [f"model/{number:04d}" for number in range(COUNT)]
WRITERS = 4


def value_of(key: str) -> int:
    return int(key[-2:]) if key.startswith("model/") else 7


def store(url: str, keys: list[str]) -> None:
    """Store a number for each key, each quarter by a writer, as by stages; the last has none."""
    entries = []
    for key in keys:
        shape = (0,) if key == keys[-1] else (1,)
        entries.append(
            Entry(
                key=key,
                dtype="uint8",
                global_shape=shape,
                box=Box.whole(shape),
                byte_offset=0,
                nbytes=shape[0],
            )
        )
    quarter = len(keys) // WRITERS
    shards = [
        ShardIndex(rank, tuple(entries[rank * quarter : (rank + 1) * quarter]), {})
        for rank in range(WRITERS)
    ]
    plan, storage = plan_chunks(shards), open_storage(url)
    parts = [
        write_part(
            storage,
            ATTEMPT,
            plan,
            [rank],
            lambda key, box: np.full((1, 1), value_of(key), np.uint8),
            name=rank,
        )
        for rank in range(WRITERS)
    ]
    publish(storage, ATTEMPT, parts, plan.tensors, plan.chunk_parts(), {})


@pytest.fixture(scope="module")
def url() -> str:
    url = "memory://indexed"
    store(url, KEYS)
    return url


@pytest.fixture
def recorder(url: str, monkeypatch: pytest.MonkeyPatch) -> RecordingStorage:
    recorder = RecordingStorage(open_storage(url))
    read_from(recorder, monkeypatch)
    return recorder


def values(source: StoredCheckpoint, keys: list[str]) -> list[int]:
    data = bytearray(len(keys))
    views = [memoryview(data)[number : number + 1] for number in range(len(keys))]
    source.read([BoxRequest(k, Box.whole((1,)), v) for k, v in zip(keys, views, strict=True)])
    return list(data)


def test_a_reader_of_one_tensor_reads_what_tells_of_its_writers_tensors(
    url: str, recorder: RecordingStorage
) -> None:
    source = StoredCheckpoint.open(url)
    assert len(source.tensors) == COUNT
    assert recorder.ranges == []
    assert values(source, ["model/2345"]) == [45]
    assert ROOT not in recorder.reads
    # What tells of chunks is small, and read whole.
    assert recorder.reads.count(CHUNKS) == 1
    assert {name for name, _ in recorder.ranges} == {ROOT, "000002-0000"}
    # A block of the tensor, and those that its writer's listing tells of: a quarter.
    read = sum(nbytes for name, nbytes in recorder.ranges if name == ROOT)
    assert 0 < read < 0.45 * recorder.storage.size(f"{ATTEMPT.directory}/{ROOT}")


def test_what_tells_of_chunks_is_read_by_ranges_too_where_it_is_large(
    url: str, recorder: RecordingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed_object, "INDEXED_NBYTES", 0)
    assert values(StoredCheckpoint.open(url), ["model/2345"]) == [45]
    assert CHUNKS not in recorder.reads
    (read,) = (nbytes for name, nbytes in recorder.ranges if name == CHUNKS)
    assert 0 < read < 0.1 * recorder.storage.size(f"{ATTEMPT.directory}/{CHUNKS}")


def test_a_reader_of_all_tensors_reads_the_whole_objects_at_once(
    url: str, recorder: RecordingStorage
) -> None:
    source = StoredCheckpoint.open(url)
    assert len(dict(source.tensors.items())) == len(list(source.tensors.values())) == COUNT
    assert values(source, KEYS[:-1]) == [value_of(key) for key in KEYS[:-1]]
    assert recorder.reads.count(ROOT) == recorder.reads.count(CHUNKS) == 1
    assert not {ROOT, CHUNKS} & {name for name, _ in recorder.ranges}


def test_a_reader_that_asks_for_one_tensor_after_the_other_gets_all_after_some_reads(
    url: str, recorder: RecordingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed_object, "_SINGLE_READS", 3)
    source = StoredCheckpoint.open(url)
    assert [source.stored_tensors[key].shape for key in KEYS[:-1]] == [(1,)] * (COUNT - 1)
    assert recorder.reads.count(ROOT) == 1
    assert sum(name == ROOT for name, _ in recorder.ranges) == 3


def test_the_metadata_of_parameters_and_their_slots_is_read_at_once(
    recorder: RecordingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "memory://slots"
    store(url, sorted([*KEYS, *(f"optim/{key[6:]}/exp_avg" for key in KEYS)]))
    read_from(recording := RecordingStorage(open_storage(url)), monkeypatch)
    source = StoredCheckpoint.open(url)
    names = [key[6:] for key in KEYS[1000:1600]]
    assert source.slots(names).keys() == set(names)
    before = list(recording.ranges)
    assert len(before) > 3
    assert all(source.tensors[f"model/{name}"].shape == (1,) for name in names)
    assert recording.ranges == before
    assert ROOT not in recording.reads


def test_a_read_that_fails_leaves_the_checkpoint_usable(
    url: str, recorder: RecordingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = StoredCheckpoint.open(url)
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "unreadable", ROOT)
        with pytest.raises(CheckpointError, match="the storage is away"):
            values(source, ["model/2345"])
    assert values(source, ["model/2345"]) == [45]


def test_only_blocks_that_are_asked_for_are_parsed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    parse_array = indexed_tensors.parse_array

    def parse(key: str, *others: Any) -> StoredTensor:
        parsed.append(key)
        return parse_array(key, *others)

    monkeypatch.setattr(indexed_tensors, "parse_array", parse)
    source = StoredCheckpoint.open(url)
    assert source.slots(()) == {}
    assert not source.may_be_renamed
    assert list(source.known_keys()) == KEYS
    assert "model/0001" in source.tensors
    assert source.tensors.get("model/x") is None
    assert parsed == []
    assert source.tensors["model/0001"] == source.tensors["model/0001"]
    assert parsed == KEYS[: len(parsed)]
    assert 1 < len(parsed) < COUNT / 10


def test_what_another_rank_has_read_is_not_read_again(url: str, recorder: RecordingStorage) -> None:
    metadata = StoredMetadata.read(url, for_all_ranks=True)
    assert {ROOT, CHUNKS, INDEX} <= metadata.objects.keys()
    recorder.reads.clear()
    source = StoredCheckpoint.of(url, metadata)
    assert values(source, ["model/0000", "model/3998"]) == [0, 98]
    assert not {ROOT, CHUNKS} & {*recorder.reads, *(name for name, _ in recorder.ranges)}


def test_without_the_index_the_checkpoint_has_the_same_tensors(url: str) -> None:
    found, storage = StoredCheckpoint.open(url), open_storage(url)
    # As readers of before the index: they know no object of this name.
    objects = tuple(item for item in found.manifest.objects if item.name != INDEX)
    metadata = StoredMetadata(
        ATTEMPT.stored,
        replace(found.manifest, objects=objects).encode(),
        {
            name: storage.read(f"{ATTEMPT.directory}/{name}")
            for name in (ROOT, CHUNKS, "documents.json")
        },
    )
    without = StoredCheckpoint.of(url, metadata)
    assert isinstance(without.stored_tensors, dict)
    assert without.stored_tensors == found.stored_tensors
    assert values(without, KEYS[:-1]) == values(found, KEYS[:-1])


def test_a_checkpoint_of_few_tensors_has_no_index() -> None:
    store("memory://few", KEYS[:100])
    few = StoredCheckpoint.open("memory://few")
    assert few.manifest.find(INDEX) is None
    assert values(few, ["model/0042"]) == [42]


def test_a_copy_has_an_index_too(url: str) -> None:
    copy(StoredCheckpoint.open(url), "memory://copied")
    copied = StoredCheckpoint.open("memory://copied")
    assert copied.manifest.find(INDEX) is not None
    copied.verify()


def changed(change: Callable[[dict[str, bytes]], None], *, is_known: bool) -> str:
    """Store a checkpoint whose objects are changed; the manifest tells of it, or does not."""
    url = f"memory://changed-{len(CHANGED)}"
    CHANGED.append(url)
    store(url, KEYS)
    storage = open_storage(url)
    path = f"{ATTEMPT.stored.directory}/{MANIFEST}"
    manifest = Manifest.decode(storage.read(path), path)
    contents = {name: storage.read(f"{ATTEMPT.directory}/{name}") for name in (ROOT, CHUNKS, INDEX)}
    before = dict(contents)
    change(contents)
    for name, data in contents.items():
        if data != before[name]:
            storage.write(f"{ATTEMPT.directory}/{name}", [data])
    if is_known:
        objects = tuple(
            StoredObject(item.name, len(data), crc32c.crc32c(data))
            if (data := contents.get(item.name)) is not None
            else item
            for item in manifest.objects
        )
        storage.write(path, [replace(manifest, objects=objects).encode()])
    return url


CHANGED: list[str] = []


@pytest.mark.parametrize("name", [ROOT, CHUNKS])
def test_a_changed_block_is_found_by_those_who_need_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(contents: dict[str, bytes]) -> None:
        contents[name] = contents[name].replace(b'"model/3000"', b'"model/9000"')

    monkeypatch.setattr(indexed_object, "INDEXED_NBYTES", 0)
    url = changed(change, is_known=False)
    assert values(StoredCheckpoint.open(url), ["model/0001"]) == [1]
    with pytest.raises(CheckpointDamaged, match=rf"{name}: bytes from \d+ do not match"):
        values(StoredCheckpoint.open(url), ["model/3001"])
    with pytest.raises(CheckpointDamaged, match=name):
        StoredCheckpoint.open(url).verify()


def shift_ranges(position: int) -> Callable[[dict[str, bytes]], None]:
    """Give each block the range of the one after it."""

    def change(contents: dict[str, bytes]) -> None:
        blocks = json.loads(contents[INDEX])
        for block, following in itertools.pairwise(blocks):
            block[position] = following[position]
        end = blocks[-1][position]
        blocks[-1][position] = [end[0] + end[1], 0, 0]
        contents[INDEX] = json.dumps(blocks).encode()

    return change


@pytest.mark.parametrize(("position", "message"), [(1, "describe model/0000"), (2, "chunks.json")])
def test_an_index_that_names_other_bytes_is_refused(position: int, message: str) -> None:
    url = changed(shift_ranges(position), is_known=True)
    with pytest.raises(CheckpointDamaged, match=message):
        values(StoredCheckpoint.open(url), ["model/0000"])
    with pytest.raises(CheckpointDamaged):
        StoredCheckpoint.open(url).verify()


def test_an_index_that_lacks_arrays_is_found_by_a_verification() -> None:
    def change(contents: dict[str, bytes]) -> None:
        blocks = json.loads(contents[INDEX])
        blocks[-1][0].pop()
        contents[INDEX] = json.dumps(blocks).encode()

    url = changed(change, is_known=True)
    with pytest.raises(CheckpointDamaged, match=r"index.json tells of other arrays"):
        StoredCheckpoint.open(url).verify()


def test_a_range_beyond_the_object_is_refused_before_memory_is_taken_for_it() -> None:
    def change(contents: dict[str, bytes]) -> None:
        blocks = json.loads(contents[INDEX])
        blocks[-1][1][1] = 2**60
        contents[INDEX] = json.dumps(blocks).encode()

    with pytest.raises(CheckpointDamaged, match="fewer than its index tells of"):
        StoredCheckpoint.open(changed(change, is_known=True))


def test_an_object_that_is_said_to_be_huge_takes_no_memory() -> None:
    def change(contents: dict[str, bytes]) -> None:
        blocks = json.loads(contents[INDEX])
        blocks[-1][1][1] = 2**60
        contents[INDEX] = json.dumps(blocks).encode()

    url = changed(change, is_known=True)
    path = f"{ATTEMPT.stored.directory}/{MANIFEST}"
    manifest = Manifest.decode(open_storage(url).read(path), path)
    objects = tuple(
        replace(item, nbytes=2**61) if item.name == ROOT else item for item in manifest.objects
    )
    open_storage(url).write(path, [replace(manifest, objects=objects).encode()])
    with pytest.raises(CheckpointDamaged, match="in the manifest"):
        values(StoredCheckpoint.open(url), [KEYS[-1]])


def test_a_tensor_whose_name_is_that_of_the_index_is_stored_without_one() -> None:
    store("memory://named", sorted([*KEYS, "index.json/a", "index.json/b"]))
    named = StoredCheckpoint.open("memory://named")
    assert named.manifest.find(INDEX) is None
    assert values(named, ["index.json/a", "model/0042"]) == [7, 42]


def test_a_copy_of_before_the_index_is_known_for_the_same(url: str) -> None:
    target = "memory://copied-before"
    copy(StoredCheckpoint.open(url), target)
    path = f"{ATTEMPT.stored.directory}/{MANIFEST}"
    manifest = Manifest.decode(open_storage(target).read(path), path)
    objects = tuple(item for item in manifest.objects if item.name != INDEX)
    open_storage(target).write(path, [replace(manifest, objects=objects).encode()])
    assert copy(StoredCheckpoint.open(url), target) == ATTEMPT.stored


def test_compressed_cells_that_the_manifest_does_not_require_are_refused_when_needed() -> None:
    def change(contents: dict[str, bytes]) -> None:
        root = json.loads(contents[ROOT])
        nodes = root["consolidated_metadata"]["metadata"]
        node = nodes["model/0000"]
        node["chunk_grid"]["configuration"]["chunk_shape"] = [1]
        blosc = {
            "name": "blosc",
            "configuration": {
                "cname": "zstd", "clevel": 1, "shuffle": "shuffle", "typesize": 1, "blocksize": 1,
            },
        }  # fmt: skip
        node["codecs"] = [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [1],
                    "codecs": [{"name": "bytes"}, blosc, {"name": "crc32c"}],
                    "index_codecs": [
                        {"name": "bytes", "configuration": {"endian": "little"}},
                        {"name": "crc32c"},
                    ],
                    "index_location": "end",
                },
            }
        ]
        index = KeyIndex.decode(contents[INDEX], "")
        # The first block is longer now, and all that follows lies further on.
        old = contents[ROOT]
        part = index.arrays[0]
        members = {
            name: nodes[name]
            for name in json.loads(b"{%b}" % old[part.offset : part.offset + part.nbytes])
        }
        text = json.dumps(members, separators=(",", ":")).encode()[1:-1]
        more = len(text) - part.nbytes
        contents[ROOT] = old[: part.offset] + text + old[part.offset + part.nbytes :]
        arrays = [replace(p, offset=p.offset + more) for p in index.arrays]
        arrays[0] = replace(part, nbytes=len(text), crc32c=crc32c.crc32c(text))
        contents[INDEX] = replace(index, arrays=tuple(arrays)).encode()

    source = StoredCheckpoint.open(changed(change, is_known=True))
    assert source.stored_tensors["model/3999"].is_packed
    with pytest.raises(CheckpointDamaged, match="needs compressed-cells, which the manifest"):
        source.stored_tensors["model/0000"]
