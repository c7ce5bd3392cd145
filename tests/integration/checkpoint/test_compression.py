"""Compressed checkpoints of several ranks, blocking and not, and by way of DCP."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from keepstep import checkpoint
from keepstep.checkpoint.dcp import Reader, Writer
from keepstep.checkpoint.format.content_check import check_content
from keepstep.checkpoint.format.stored.housekeeping import compare, summarize
from keepstep.checkpoint.format.stored.manifest import COMPRESSED_CELLS
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.adaptive_timeouts import patient
from tests.ranks import run_ranks

PLAIN, COMPRESSED, IN_BACKGROUND = 1, 2, 3


def state(seed: int, axis: int | None = None) -> dict[str, torch.Tensor]:
    """Return tensors of 4 MiB, 3 MiB and some bytes, sharded if there are ranks."""
    torch.manual_seed(seed)
    whole = {
        "weight": torch.randn(1024, 1024) * 0.02,
        "half": (torch.randn(1001, 1536) * 0.02).bfloat16(),
        "small": torch.randn(8, 8),
    }
    if axis is None:
        return whole
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(tensor, mesh, [Shard(axis)]) for name, tensor in whole.items()}


def run(rank: int, root: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{root}/s", 2), rank=rank, world_size=2)
    url, saved = f"{root}/run", state(0, 0)
    with pytest.raises(ValueError, match=r"compression='gzip': give 'zstd', or None"):
        checkpoint.save(url, saved, step=PLAIN, compression="gzip")  # type: ignore[call-overload]
    # Each save has another plan than the one before it.
    checkpoint.save(url, saved, step=PLAIN)
    checkpoint.save(url, saved, step=COMPRESSED, compression="zstd")
    handle = checkpoint.save(url, saved, step=IN_BACKGROUND, compression="zstd", block=False)
    handle.wait(patient(60))
    expected = state(0)
    for step in (PLAIN, COMPRESSED, IN_BACKGROUND):
        loaded = state(step, 1)
        checkpoint.load(url, loaded, step=step)
        for name, tensor in loaded.items():
            assert torch.equal(tensor.full_tensor(), expected[name])
    dist.barrier()
    os._exit(0)


def test_two_ranks_save_compressed_and_load_in_another_layout(tmp_path: Path) -> None:
    run_ranks(run, args=(str(tmp_path),), nprocs=2)
    url = str(tmp_path / "run")
    opened = {step: StoredCheckpoint.open(open_storage(url), step) for step in range(1, 4)}
    plain = opened[PLAIN]
    assert plain.manifest.required == ()
    for step in (COMPRESSED, IN_BACKGROUND):
        source = opened[step]
        source.verify()
        assert source.manifest.required == (COMPRESSED_CELLS,)
        assert {key: t.compression for key, t in source.stored_tensors.items()} == {
            "weight": "zstd", "half": "zstd", "small": None
        }  # fmt: skip
        assert summarize(source).nbytes < 0.85 * summarize(plain).nbytes
        assert compare(plain, source).changed == {}
    assert check_content(opened[IN_BACKGROUND])


def test_dcp_saves_compressed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"compression='lz4': give 'zstd', or None"):
        Writer(tmp_path, step=1, compression="lz4")  # type: ignore[arg-type]
    dcp.save(state(0), storage_writer=Writer(tmp_path, step=1, compression="zstd"))
    assert StoredCheckpoint.open(open_storage(str(tmp_path))).manifest.required == (
        COMPRESSED_CELLS,
    )
    loaded = state(1)
    dcp.load(loaded, storage_reader=Reader(tmp_path))
    for name, tensor in state(0).items():
        assert torch.equal(loaded[name], tensor)
