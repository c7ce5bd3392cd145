"""Claims about checkpoints made to do harm: they are refused as damage, in time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import pytest

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Box, Entry, ShardIndex
from keepstep.checkpoint.format.stored import chunking
from keepstep.checkpoint.format.stored.chunking import plan_chunks
from keepstep.checkpoint.format.stored.housekeeping import copy
from keepstep.checkpoint.format.stored.manifest import Manifest, StoredObject
from keepstep.checkpoint.format.stored.object_names import (
    CHUNKS,
    DOCUMENTS,
    MANIFEST,
    ROOT,
    Attempt,
    StoredStep,
)
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.format.stored.stored_json import encode
from keepstep.checkpoint.format.stored.writer import publish, write_part
from keepstep.checkpoint.format.stored.zarr_metadata import array_metadata, parse_array
from tests.adaptive_timeouts import patient

pytestmark = pytest.mark.slow

ATTEMPT = Attempt(StoredStep(1, 0), "a")
PART = "parts/000000.json"
SHAPE = (64, 64)

Change = Callable[[Any], Any]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of one tensor in objects of its own, and one in a pack."""
    monkeypatch.setattr(chunking, "PACKED_NBYTES", 2**10)
    entries = tuple(
        Entry(
            key=key,
            dtype="float32",
            global_shape=shape,
            box=Box.whole(shape),
            byte_offset=0,
            nbytes=Box.whole(shape).size * 4,
        )
        for key, shape in (("large", SHAPE), ("small", (4,)))
    )
    plan = plan_chunks([ShardIndex(0, entries, {})])
    storage = open_storage(str(tmp_path))
    part = write_part(
        storage, ATTEMPT, plan, [0], lambda key, box: np.ones((*box.shape, 4), np.uint8), name=0
    )
    publish(storage, ATTEMPT, [part], plan.tensors, plan.chunk_parts(), {"values": {"loss": 1.0}})
    return tmp_path


def tamper(root: Path, name: str, change: Change) -> None:
    """Change an object that the manifest lists, and its checksum in the manifest."""
    path = root / ATTEMPT.directory / name
    changed = change(json.loads(path.read_bytes()))
    data = changed if isinstance(changed, bytes) else encode(changed)
    path.write_bytes(data)
    committed = root / ATTEMPT.stored.directory / MANIFEST
    manifest = Manifest.decode(committed.read_bytes(), "")
    objects = tuple(
        StoredObject(name, len(data), crc32c.crc32c(data)) if item.name == name else item
        for item in manifest.objects
    )
    committed.write_bytes(Manifest(1, 0, "a", objects).encode())


def array(key: str, **changes: Any) -> Change:
    """Change an array's metadata: `shape`, `chunk` and `cell`."""

    def change(content: Any) -> Any:
        nodes = content["consolidated_metadata"]["metadata"]
        tensor = parse_array(key, nodes[key], "")
        fields = {name: getattr(tensor, name) for name in ("dtype", "shape", "chunk", "cell")}
        made = type(tensor)(**{**fields, "is_packed": tensor.is_packed, **changes})
        nodes[key] = array_metadata(key, made)
        return content

    return change


def listing(change: Callable[[list[Any]], None]) -> Change:
    def changed(content: list[Any]) -> list[Any]:
        for item in content:
            change(item)
        return content

    return changed


def name_of_chunk(name: str) -> Change:
    return listing(lambda item: item.__setitem__(0, name) if "/c." in item[0] else None)


HUGE, ODD = 2**40, 2**40 + 1
HOSTILE: dict[str, tuple[str, Change]] = {
    "deep documents": (DOCUMENTS, lambda _: b'{"values":' + b"[" * 10**6 + b"]" * 10**6 + b"}"),
    "documents as deep as can be parsed": (DOCUMENTS, lambda _: b'{"a":' * 900 + b"1" + b"}" * 900),
    "a logical shape beyond the tensor's": (
        DOCUMENTS, lambda content: {**content, "padding": {"large": {"logical_shape": [65, 64]}}}
    ),
    "a tie to a tensor that is not there": (
        DOCUMENTS, lambda content: {**content, "model/tied": {"head": "embed"}}
    ),
    "deep root": (ROOT, lambda _: b"[" * 10**6),
    "deep part": (PART, lambda _: b"[" * 10**6),
    "huge cells": (ROOT, array("small", shape=(HUGE,), chunk=(HUGE,), cell=(HUGE,))),
    "cells beyond any array": (
        ROOT, array("small", shape=(2**62, 2**62), chunk=(2**62, 2**62), cell=(2**62, 2**62))
    ),
    "very many chunks": (ROOT, array("large", shape=(HUGE, 64))),
    "very many packed cells": (ROOT, array("small", shape=(HUGE,))),
    "very many cells in a chunk": (
        ROOT, array("large", shape=(HUGE, 64), chunk=(HUGE, 64))
    ),
    "a name with a null byte": (PART, name_of_chunk("large/c.0\0")),
    "a very long name": (PART, name_of_chunk("large/" + "c" * 300)),
    "a name above the directory": (PART, name_of_chunk("large/../../c.0")),
    "a name that is no text": (
        PART, lambda content: json.dumps(name_of_chunk("large/\ud800")(content)).encode()
    ),
    "a part that is not in the manifest": (CHUNKS, lambda _: {"large": 7, "small": 7}),
    "too few chunks": (CHUNKS, lambda _: {"large": "AAAAAAAAAAA=", "small": 0}),
    "no chunks": (CHUNKS, lambda _: {}),
    "deep chunks": (CHUNKS, lambda _: b"[" * 10**6),
    "a chunk in a place beyond the grid": (PART, name_of_chunk("large/c.7.0")),
    "a chunk in a place of another rank": (PART, name_of_chunk("large/c.0")),
    "a chunk that is listed twice": (PART, lambda content: [*content, content[0]]),
    "a chunk in a negative place": (PART, name_of_chunk("large/c.-1.0")),
    "a chunk by another spelling": (PART, name_of_chunk("large/c.00.0")),
    "an object without end": (PART, listing(lambda item: item.__setitem__(1, 2**62))),
}  # fmt: skip

# Prints for each way to read the error's class, and its first words.
READ = """
import resource, sys
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.source import BoxRequest
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))
for how in sys.argv[2:]:
    try:
        source = StoredCheckpoint.open(open_storage(sys.argv[1]))
        if how == "verify":
            source.verify()
        else:
            for key, spec in source.tensors.items():
                box = Box((0,) * len(spec.shape), tuple(min(n, 4) for n in spec.shape))
                source.read([BoxRequest(key, box, memoryview(bytearray(box.size * 4)))])
            assert source.documents["values"] == {"loss": 1.0}, "other documents"
        print("read")
    except Exception as error:
        print(type(error).__name__, " ".join(str(error)[:200].split()))
"""


def outcomes(root: Path, *ways: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", READ, str(root), *ways],
        capture_output=True, text=True, timeout=patient(120), check=True,
    )  # fmt: skip
    found = done.stdout.splitlines()
    assert len(found) == len(ways)
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_checkpoint_is_refused_as_damaged(root: Path, name: str) -> None:
    target, change = HOSTILE[name]
    tamper(root, target, change)
    found = outcomes(root, "verify", "read")
    assert any(text.startswith("CheckpointDamaged") for text in found)
    for text in found:
        # What a reader does not use it need not notice.
        assert text.startswith(("CheckpointDamaged", "read", "AssertionError other documents")), (
            text
        )


def test_cells_of_any_size_that_the_listing_confirms_are_refused(root: Path) -> None:
    tamper(root, ROOT, array("small", shape=(HUGE,), chunk=(HUGE,), cell=(HUGE,)))
    size = 4 * HUGE + 4
    tamper(root, PART, listing(lambda item: "/c." in item[0] or item.__setitem__(1, size)))
    for text in outcomes(root, "verify", "read"):
        assert text.startswith("CheckpointDamaged"), text


def test_the_untouched_checkpoint_is_read(root: Path) -> None:
    tamper(root, ROOT, lambda content: content)
    tamper(root, PART, lambda content: content)
    assert outcomes(root, "verify", "read") == ["read", "read"]


@pytest.mark.parametrize("name", [MANIFEST, f"attempt-a/{ROOT}", "attempt-a/large/c.0.0"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "sparse"])
def test_what_is_no_regular_file_is_refused_as_damaged(root: Path, name: str, kind: str) -> None:
    path = root / ATTEMPT.stored.directory / name
    if kind == "sparse":
        with path.open("ab") as file:
            file.truncate(2**40)
    else:
        path.unlink()
        {
            "pipe": lambda: os.mkfifo(path),
            "device": lambda: path.symlink_to("/dev/zero"),
            "directory": path.mkdir,
        }[kind]()
    if (kind, name) in (("pipe", MANIFEST), ("device", MANIFEST), ("directory", MANIFEST)):
        # A directory is a checkpoint if its manifest is a file.
        assert outcomes(root, "verify")[0].startswith("CheckpointMissing")
        return
    assert outcomes(root, "verify")[0].startswith(("CheckpointDamaged", "CheckpointError"))


def test_an_unknown_object_of_a_manifest_is_refused(root: Path) -> None:
    committed = root / ATTEMPT.stored.directory / MANIFEST
    committed.write_bytes(Manifest(1, 0, "a", (StoredObject("a\0b", 1, 1),)).encode())
    with pytest.raises(CheckpointDamaged, match="not an object's entry"):
        StoredCheckpoint.open(open_storage(str(root)))


def test_a_chunk_that_no_part_lists_is_not_copied_as_one_of_the_first(root: Path) -> None:
    tamper(root, PART, lambda content: content[1:])
    with pytest.raises(CheckpointDamaged, match="large needs 1 chunks and the listings have 0"):
        copy(StoredCheckpoint.open(open_storage(str(root))), open_storage(f"{root}/copy"))
