"""Claims about stored bytes that were changed anywhere: a checkpoint is read as it was, or refused.

Checksums find what happens by itself. Here whoever changed an object has also adapted every
checksum of it, so that what reads the object has to find that it makes no sense.
"""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep import checkpoint
from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.stored.reader import StoredCheckpoint
from keepstep.checkpoint.stored.stored_json import encode

MANIFEST = "manifest.json"

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@pytest.fixture(scope="module", params=[None, "zstd"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fuzz") / "saved"
    # Less than 1 MiB is not compressed.
    extent = 300 if request.param is None else 520
    state = {
        "large": np.arange(extent * extent, dtype=np.float32).reshape(extent, extent),
        "small": np.ones(3, np.float32),
        "loss": 1.0,
    }
    checkpoint.save(str(root), _as_tensors(state), step=1, compression=request.param)
    return root


def _as_tensors(state: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {
        key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for key, value in state.items()
    }


def read(root: Path) -> None:
    """Read all that a checkpoint has, in bounded memory, or be refused."""
    tracemalloc.start()
    try:
        source = StoredCheckpoint.open(str(root))
        assert source.documents is not None
        source.verify()
    except CheckpointError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 64 * 2**20


def changed(saved: Path, place: int, change: Any) -> Path:
    """Return a copy in which one object was changed."""
    root = saved.with_name("changed")
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(saved, root)
    names = sorted(
        path.relative_to(root) for path in root.rglob("*") if path.is_file() and path.stat().st_size
    )
    path = root / names[place % len(names)]
    path.write_bytes(change(path.read_bytes()))
    return root


@given(st.integers(0, 99), st.integers(0, 10**6), st.binary(max_size=20), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_bytes_changed_anywhere_are_refused_or_of_no_consequence(
    saved: Path, place: int, at: int, data: bytes, cuts: bool
) -> None:
    def change(content: bytes) -> bytes:
        start = at % len(content)
        return content[:start] + data + (b"" if cuts else content[start + len(data) :])

    read(changed(saved, place, change))


def replaced(value: Any, path: int, new: Any) -> Any:
    """Return JSON in which one value, chosen by a number, is another."""
    if path % 5 == 0 or not isinstance(value, dict | list) or not value:
        return new
    if isinstance(value, list):
        at = path // 5 % len(value)
        return [*value[:at], replaced(value[at], path // 7, new), *value[at + 1 :]]
    key = sorted(value)[path // 5 % len(value)]
    return {**value, key: replaced(value[key], path // 7, new)}


@given(st.integers(0, 99), st.integers(0, 10**9), JSON)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
def test_document_with_any_value_in_any_place_is_refused_or_read(
    saved: Path, place: int, path: int, new: Any
) -> None:
    def change(content: bytes) -> bytes:
        try:
            return json.dumps(replaced(json.loads(content), path, new)).encode()
        except ValueError:
            return content

    root = changed(saved, place, change)
    _adapt_checksums(root)
    read(root)


def _adapt_checksums(root: Path) -> None:
    """Let manifests list sizes and checksums of the objects as they are now."""
    for manifest in root.rglob(MANIFEST):
        try:
            content = json.loads(manifest.read_bytes())
            for entry in content["objects"]:
                matching = [path for path in root.rglob(Path(entry[0]).name) if path.is_file()]
                for path in matching:
                    if str(path).endswith(entry[0]):
                        data = path.read_bytes()
                        entry[1:] = [len(data), crc32c.crc32c(data)]
            if content.pop("crc32c", None) is not None:
                content["crc32c"] = crc32c.crc32c(encode(content))
        except (ValueError, TypeError, LookupError, AttributeError):
            continue
        manifest.write_bytes(json.dumps(content).encode())
