"""Other software reads a checkpoint where keepstep is not installed, as FORMAT.md promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from keepstep import checkpoint
from keepstep.checkpoint.format.stored.chunking import PACKED_NBYTES
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.adaptive_timeouts import patient
from tests.ranks import run_ranks

READERS = ("tensorstore", "xarray", "zarr")
WRITERS = (1, 4)
SAVED = {"1": (1, None), "4": (4, None), "1 compressed": (1, "zstd"), "4 compressed": (4, "zstd")}
"""How many ranks save, and how they compress."""

LARGE = {
    "model/weight": ((1000, 701), "float32"),
    "model/count": ((500, 701), "int64"),
    "weight16": ((2000, 701), "bfloat16"),
}

BEGIN = """
import importlib.metadata, sys
sys.path.append(sys.argv[1])
root, bare = sys.argv[2:]

try:
    import keepstep
except ModuleNotFoundError:
    pass
else:
    sys.exit(f"{keepstep} can be imported")
installed = list(importlib.metadata.distributions())
assert "zarr" in {package.name for package in installed}
points = [point for package in installed for point in package.entry_points]
assert not [point for point in points if "keepstep" in point.value], points

import numpy

WEIGHT, COUNT, HALF = (1000, 701), (500, 701), (2000, 701)

def expected(shape, dtype):
    return (numpy.arange(numpy.prod(shape)) % 251).reshape(shape).astype(dtype)

def middle(shape):
    # Over the edge of two chunks, where there are several.
    return slice(shape[0] // 2 - 1, shape[0] // 2 + 2)
"""

ZARR = """
import zarr
group = zarr.open_group(root, mode="r", use_consolidated=False)
for name, shape, dtype in (("weight", WEIGHT, "float32"), ("count", COUNT, "int64")):
    array = zarr.open_array(f"{root}/model/{name}", mode="r")
    assert (array.shape, array.dtype) == (shape, dtype), array
    assert (array[...] == expected(shape, dtype)).all()
    part = middle(shape), slice(5, 9)
    assert (group[f"model/{name}"][part] == expected(shape, dtype)[part]).all()
packed = "keepstep.packed"
refused = {root: packed, f"{bare}/packed": packed, f"{root}/weight16": "bfloat16"}
for path, reason in refused.items():
    try:
        opened = zarr.open(path, mode="r")
    except Exception as error:
        assert reason in str(error), (path, error)
    else:
        sys.exit(f"{opened} was opened")
"""

TENSORSTORE = """
import ml_dtypes, tensorstore

def open(path):
    return tensorstore.open({"driver": "zarr3", "kvstore": f"file://{path}/"}).result()

for name, shape, dtype in (
    ("model/weight", WEIGHT, "float32"),
    ("model/count", COUNT, "int64"),
    ("weight16", HALF, ml_dtypes.bfloat16),
):
    array = open(f"{root}/{name}")
    assert (array.shape, array.dtype.numpy_dtype) == (shape, dtype), array
    assert (array.read().result() == expected(shape, dtype)).all()
    part = middle(shape), slice(5, 9)
    assert (array[part].read().result() == expected(shape, dtype)[part]).all()
try:
    opened = open(f"{bare}/packed")
except ValueError as error:
    assert "keepstep.packed" in str(error), error
else:
    sys.exit(f"{opened} was opened")
"""

XARRAY = """
import xarray
model = xarray.open_zarr(f"{root}/model", consolidated=False, chunks=None)
assert dict(model.sizes) == {"weight.0": 1000, "weight.1": 701, "count.0": 500, "count.1": 701}
assert set(model) == {"weight", "count"}, model
for name, shape, dtype in (("weight", WEIGHT, "float32"), ("count", COUNT, "int64")):
    values = expected(shape, dtype)
    part = model[name].isel({f"{name}.0": middle(shape)})
    assert part.dtype == dtype
    assert (part.values == values[middle(shape)]).all()
    assert (model[name].values == values).all()
try:
    opened = xarray.open_zarr(root, group="model", chunks=None)
except Exception as error:
    assert "keepstep.packed" in str(error), error
else:
    sys.exit(f"{opened} was opened")
"""


def values(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 251).reshape(shape).to(getattr(torch, dtype))


def save(rank: int, url: str, writers: int, compression: Literal["zstd"] | None) -> None:
    """Save the large tensors in as many slices as there are writers, and a small one."""
    large = {name: values(shape, dtype) for name, (shape, dtype) in LARGE.items()}
    if writers > 1:
        store = dist.FileStore(f"{url}-store", writers)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=writers)
        mesh = init_device_mesh("cpu", (writers,))
        large = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in large.items()}
    model = {
        name.removeprefix("model/"): t for name, t in large.items() if name.startswith("model/")
    }
    model["small"] = torch.arange(7.0)
    state = {"model": model, "weight16": large["weight16"]}
    checkpoint.save(url, state, step=1, compression=compression)
    if writers > 1:
        dist.barrier()
        # Threads of gloo may abort an interpreter that exits normally.
        os._exit(0)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the readers and what they need, by links into this environment."""
    place = tmp_path_factory.mktemp("packages")
    waiting, found = list(READERS), set[str]()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            if not (place / top).exists():
                (place / top).symlink_to(Path(str(installed.locate_file(top))))
        needed = map(Requirement, installed.requires or ())
        waiting += [
            item.name for item in needed if not item.marker or item.marker.evaluate({"extra": ""})
        ]
    return place


@pytest.fixture(scope="module", params=SAVED)
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that some ranks have written."""
    url = tmp_path_factory.mktemp("saved") / "run"
    writers, compression = SAVED[request.param]
    if writers == 1:
        save(0, str(url), 1, compression)
    else:
        run_ranks(save, args=(str(url), writers, compression), nprocs=writers)
    directory = url / StoredCheckpoint.open(open_storage(str(url))).directory
    for name in LARGE:
        codecs = (directory / name / "zarr.json").read_text()
        assert ('"blosc"' in codecs) == (compression is not None)
    return directory


@pytest.mark.parametrize(
    "reader", [ZARR, TENSORSTORE, XARRAY], ids=["zarr", "tensorstore", "xarray"]
)
def test_large_tensors_are_read_and_packed_ones_refused(
    reader: str, root: Path, packages: Path, tmp_path: Path
) -> None:
    # Without its own directory a packed array is not found at all.
    nodes = json.loads((root / "zarr.json").read_text())["consolidated_metadata"]["metadata"]
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "zarr.json").write_text(json.dumps(nodes["model/small"]))
    # Isolated, and without the site-packages of this environment.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", BEGIN + reader, packages, root, tmp_path],
        capture_output=True, text=True, cwd=tmp_path, timeout=patient(120), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("root", ["1", "4"], indirect=True)
def test_shards_below_a_mebibyte_make_chunks_of_one(root: Path) -> None:
    for name, (shape, dtype) in LARGE.items():
        nbytes = values(shape, dtype).nbytes
        assert nbytes >= PACKED_NBYTES > nbytes / max(WRITERS)
        chunks = [path for path in (root / name).iterdir() if path.name != "zarr.json"]
        assert chunks
        assert min(path.stat().st_size for path in chunks) >= PACKED_NBYTES
