"""What zarr-python is told when it reads a packed array that is not as it was written: never made-up values."""

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
from keepstep.checkpoint.stored.format import MANIFEST, ROOT, StoredStep, chunk_name

KEY = "model/w"
PACK = "packs/000000-0000"


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
    """As if it were an array of plain chunks, with another codec behind ours."""
    edit(root, lambda nodes: nodes[KEY]["codecs"].append({"name": "crc32c"}))
    chunk = root / chunk_name(KEY, (0,))
    chunk.parent.mkdir(parents=True)
    chunk.write_bytes(bytes(4))  # Nothing, and the checksum of nothing.


def edit(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((root / ROOT).read_text())
    change(content["consolidated_metadata"]["metadata"])
    (root / ROOT).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (flip, f"{PACK}: what it holds of {KEY} was changed; load an older step"),
        (cut, f"{PACK}: what it holds of {KEY} was changed; load an older step"),
        (lambda root: (root / PACK).unlink(), f"{PACK} is gone; load an older step"),
        (lambda root: (root / MANIFEST).unlink(), f"{MANIFEST} is gone; load an older step"),
        (rename, f"model/v/c.0 is not a chunk of {KEY}; was the array moved?"),
        (enlarge, f"{KEY}/c.[0-9]+: no listing has this chunk; load an older step"),
        (add_codec, f"{KEY}: a packed chunk is no object of its own; .* no codec added"),
    ],
)
def test_an_array_that_is_not_as_it_was_written_is_refused(
    tmp_path: Path, harm: Callable[[Path], None], said: str
) -> None:
    checkpoint.save(str(tmp_path), {"model": {"w": torch.arange(6.0)}}, step=1)
    root = tmp_path / StoredStep(1, 0).directory
    harm(root)
    array = next(
        node
        for _, node in zarr.open_group(str(root), mode="r").members(None)
        if isinstance(node, zarr.Array)
    )
    with pytest.raises(CheckpointError, match=said):
        array[:]
