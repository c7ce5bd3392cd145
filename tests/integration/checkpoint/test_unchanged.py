"""Tests of tensors that have not changed since the last checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from keepstep import checkpoint
from keepstep.checkpoint.stored.object_names import StoredStep


def test_frozen_weights_are_linked_and_survive_the_removal_of_older_checkpoints(
    tmp_path: Path,
) -> None:
    frozen, tuned = torch.randn(600, 1000), torch.randn(600, 1000)
    inodes = {}
    for step in (1, 2, 3):
        tuned.add_(1)
        checkpoint.save(str(tmp_path), {"frozen": frozen, "tuned": tuned}, step=step)
        for name in ("frozen", "tuned"):
            (chunk,) = (tmp_path / StoredStep(step, 0).directory).glob(f"*/{name}/c.*")
            inodes[name, step] = chunk.stat().st_ino
    assert len({inodes["frozen", step] for step in (1, 2, 3)}) == 1
    assert len({inodes["tuned", step] for step in (1, 2, 3)}) == 3
    shutil.rmtree(tmp_path / StoredStep(1, 0).directory)
    into = {"frozen": torch.zeros(600, 1000), "tuned": torch.zeros(600, 1000)}
    assert checkpoint.load(str(tmp_path), into) == 3
    assert torch.equal(into["frozen"], frozen)
    assert torch.equal(into["tuned"], tuned)


def test_a_chunk_that_is_damaged_in_the_last_checkpoint_is_written_again(tmp_path: Path) -> None:
    frozen = torch.randn(600, 1000)
    checkpoint.save(str(tmp_path), {"frozen": frozen}, step=1)
    (chunk,) = (tmp_path / StoredStep(1, 0).directory).glob("*/frozen/c.*")
    data = bytearray(chunk.read_bytes())
    data[1000] ^= 1
    chunk.write_bytes(data)
    checkpoint.save(str(tmp_path), {"frozen": frozen}, step=2)
    into = {"frozen": torch.zeros(600, 1000)}
    checkpoint.load(str(tmp_path), into, step=2)
    assert torch.equal(into["frozen"], frozen)
