"""Tests of zarr-python on damaged packed arrays: reads raise errors, never return wrong values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr

from keepstep import checkpoint
from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.stored.object_names import ROOT, chunk_name
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage

KEY = "model/w"
PACK = "packs/000000-0000"
PART = "parts/000000.json"


def flip(root: Path) -> None:
    data = (root / PACK).read_bytes()
    (root / PACK).write_bytes(bytes([data[0] ^ 1]) + data[1:])


def cut(root: Path) -> None:
    data = (root / PACK).read_bytes()
    (root / PACK).write_bytes(data[:-1])


def rename(root: Path) -> None:
    edit(root, lambda nodes: nodes.update({"model/v": nodes.pop(KEY)}))


def enlarge(root: Path) -> None:
    edit(root, lambda nodes: nodes[KEY].update(shape=[60]))


def add_codec(root: Path) -> None:
    """Add a codec after the packed one, so that zarr reads chunks as objects."""
    edit(root, lambda nodes: nodes[KEY]["codecs"].append({"name": "crc32c"}))
    chunk = root / chunk_name(KEY, (0,))
    chunk.parent.mkdir(parents=True)
    chunk.write_bytes(bytes(4))  # No data, and the checksum of no data.


def edit(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((root / ROOT).read_text())
    change(content["consolidated_metadata"]["metadata"])
    (root / ROOT).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, f"{PACK}: the data of {KEY} was changed; load an older step"),
        (cut, f"{PACK}: the data of {KEY} was changed; load an older step"),
        (lambda root: (root / PACK).unlink(), f"{PACK} is missing; load an older step"),
        (lambda root: (root / PART).unlink(), f"{PART} is missing; load an older step"),
        (rename, f"model/v/c.0 is not a chunk of {KEY}; was the array moved?"),
        (enlarge, f"{KEY}/c.[0-9]+: no listing has this chunk; load an older step"),
        (add_codec, f"{KEY}: a packed chunk is not an object of its own; .* no codec added"),
    ],
)
def test_a_damaged_packed_array_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    checkpoint.save(str(tmp_path), {"model": {"w": torch.arange(6.0)}}, step=1)
    root = tmp_path / StoredCheckpoint.open(open_storage(str(tmp_path))).directory
    damage(root)
    array = next(
        node
        for _, node in zarr.open_group(str(root), mode="r").members(None)
        if isinstance(node, zarr.Array)
    )
    with pytest.raises(CheckpointError, match=message):
        array[:]
