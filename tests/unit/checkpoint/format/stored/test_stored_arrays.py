"""Claims about the metadata of many tensors: a reader parses those of the tensors it needs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Box, Entry, ShardIndex
from keepstep.checkpoint.format.layout.source import BoxRequest
from keepstep.checkpoint.format.stored import stored_arrays
from keepstep.checkpoint.format.stored.chunking import StoredTensor, plan_chunks
from keepstep.checkpoint.format.stored.metadata import StoredMetadata
from keepstep.checkpoint.format.stored.object_names import CHUNKS, ROOT, Attempt, StoredStep
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.format.stored.stored_arrays import StoredArrays
from keepstep.checkpoint.format.stored.writer import publish, write_part
from keepstep.checkpoint.format.stored.zarr_metadata import array_metadata
from tests.unit.checkpoint.storage_fixtures import RecordingStorage

ATTEMPT = Attempt(StoredStep(1, 0), "x")
COUNT = 400
KEYS = [f"model/{number:03d}" for number in range(COUNT)]
WRITERS = 4


def value_of(key: str) -> int:
    return int(key[-2:])


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
    url = "memory://many"
    store(url, KEYS)
    return url


def values(source: StoredCheckpoint, keys: list[str]) -> list[int]:
    data = bytearray(len(keys))
    views = [memoryview(data)[number : number + 1] for number in range(len(keys))]
    source.read([BoxRequest(k, Box.whole((1,)), v) for k, v in zip(keys, views, strict=True)])
    return list(data)


def test_only_tensors_that_are_asked_for_are_parsed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    parse_array = stored_arrays.parse_array

    def parse(key: str, *others: Any) -> StoredTensor:
        parsed.append(key)
        return parse_array(key, *others)

    monkeypatch.setattr(stored_arrays, "parse_array", parse)
    source = StoredCheckpoint.open(open_storage(url))
    assert source.slots(()) == {}
    assert not source.may_be_renamed
    assert list(source.known_keys()) == KEYS
    assert "model/001" in source.tensors
    assert source.tensors.get("model/x") is None
    assert "model" not in source.tensors
    assert parsed == []
    assert source.tensors["model/001"] == source.tensors["model/001"]
    assert parsed == ["model/001"]
    # Cells are found by the listing of its writer, which has a quarter.
    assert values(source, ["model/234"]) == [34]
    assert len(parsed) == 1 + COUNT / WRITERS


def test_a_reader_reads_the_listings_of_the_writers_that_it_needs(
    url: str,
) -> None:
    recorder = RecordingStorage(open_storage(url))
    assert values(StoredCheckpoint.open(recorder), ["model/234"]) == [34]
    listings = [f"{writer:06d}.json" for writer in range(WRITERS)]
    assert [name for name in recorder.reads if name in listings] == [listings[2]]


def test_metadata_that_another_rank_has_read_are_not_read_again(
    url: str,
) -> None:
    metadata = StoredMetadata.read(open_storage(url), for_all_ranks=True)
    recorder = RecordingStorage(open_storage(url))
    source = StoredCheckpoint.of(recorder, metadata)
    assert values(source, ["model/000", "model/398"]) == [0, 98]
    assert not {ROOT, CHUNKS} & {*recorder.reads}


def test_a_tensor_that_needs_a_feature_that_is_not_required_is_refused_when_needed(
    url: str,
) -> None:
    source = StoredCheckpoint.open(open_storage(url))
    root = json.loads(open_storage(url).read(f"{source.directory}/{ROOT}"))
    compressed = replace(source.stored_tensors["model/000"], is_packed=False, compression="zstd")
    nodes = root["consolidated_metadata"]["metadata"]
    nodes["model/000"] = array_metadata("model/000", compressed)
    arrays = StoredArrays(json.dumps(root).encode(), (), "here")
    assert arrays["model/399"].is_packed
    with pytest.raises(CheckpointDamaged, match="needs compressed-cells, which the manifest"):
        arrays["model/000"]
    required = StoredArrays(json.dumps(root).encode(), ("compressed-cells",), "here")
    assert required["model/000"] == compressed
