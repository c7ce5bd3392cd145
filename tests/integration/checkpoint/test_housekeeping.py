"""Removing, collecting and copying, while others write: what is whole or becoming so is left alone."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint.errors import CheckpointExists
from keepstep.checkpoint.layout.boxes import Box, Entry, ShardIndex
from keepstep.checkpoint.stored import housekeeping
from keepstep.checkpoint.stored.chunking import plan_chunks
from keepstep.checkpoint.stored.format import REMOVED, StoredStep
from keepstep.checkpoint.stored.housekeeping import collect_garbage, copy, remove
from keepstep.checkpoint.stored.pruning import GRACE_S
from keepstep.checkpoint.stored.reader import StoredCheckpoint
from keepstep.checkpoint.stored.storage import Storage, open_storage
from keepstep.checkpoint.stored.writer import publish, write_part

NOW_S = 1.7e9
STEP = StoredStep(1, 0)
MARK = f"{STEP.directory}/{REMOVED}"


class ResumedStorage:
    """A storage in which a writer takes to a directory again right after it was listed."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    def names(self) -> Sequence[str]:
        names = self.storage.names()
        self.storage.delete(MARK)
        return names


class ToldStorage:
    """A storage that notes how many bytes each read was said to bring, and how many it brought."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.reads: dict[str, tuple[int, int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    def read(self, name: str, nbytes: int = 0) -> bytes:
        data = self.storage.read(name)
        self.reads[name] = (nbytes, len(data))
        return data


@pytest.fixture
def url() -> str:
    """Where step 1 was stored, and removed an hour ago."""
    url = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(url, {"x": torch.ones(4)}, step=1)
    remove(url, STEP, now=NOW_S - GRACE_S)
    return url


def test_a_removed_step_that_is_being_written_again_is_not_collected(url: str) -> None:
    storage = open_storage(url)
    entry = Entry(
        key="x",
        dtype="uint8",
        global_shape=(4,),
        box=Box.whole((4,)),
        byte_offset=0,
        nbytes=4,
    )
    plan = plan_chunks([ShardIndex(0, (entry,), {})])
    part = write_part(
        storage, STEP, plan, [0], lambda key, box: np.full((4, 1), 7, np.uint8), name=0
    )
    assert collect_garbage(url, now=NOW_S) == ()
    publish(storage, STEP, [part], plan.tensors, {})
    filled = {"x": torch.zeros(4, dtype=torch.uint8)}
    assert checkpoint.load(url, filled) == 1
    assert filled["x"].tolist() == [7] * 4


def test_a_removed_step_that_is_being_copied_to_is_not_collected(url: str) -> None:
    source = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(source, {"x": torch.ones(4)}, step=1)
    collected = []
    copy(
        StoredCheckpoint.open(source),
        url,
        lambda nbytes: collected.append(collect_garbage(url, now=NOW_S)),
    )
    assert collected == [()]
    StoredCheckpoint.open(url).verify()


def test_a_mark_that_a_writer_takes_away_meanwhile_is_as_none(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "open_storage", lambda url: ResumedStorage(open_storage(url)))
    assert collect_garbage(url, now=NOW_S) == ()


def test_copying_never_harms_another_checkpoint_of_the_step() -> None:
    one, other = (f"memory://{uuid.uuid4().hex}" for _ in range(2))
    checkpoint.save(one, {"x": torch.ones(4)}, step=1)
    checkpoint.save(other, {"x": torch.zeros(4)}, step=1)
    with pytest.raises(CheckpointExists, match="never overwritten"):
        copy(StoredCheckpoint.open(one), other)
    filled = {"x": torch.ones(4)}
    checkpoint.load(other, filled)
    assert filled["x"].tolist() == [0] * 4


def test_a_copy_can_be_repeated() -> None:
    one, other = (f"memory://{uuid.uuid4().hex}" for _ in range(2))
    checkpoint.save(one, {"x": torch.ones(4)}, step=1)
    for _ in range(2):
        assert copy(StoredCheckpoint.open(one), other) == STEP
    StoredCheckpoint.open(other).verify()


@pytest.mark.parametrize("mark", [b"", b'{"at_s": ', b"[]", b'{"at_s": null}'])
def test_a_mark_that_was_cut_short_is_made_anew(url: str, mark: bytes) -> None:
    open_storage(url).write(MARK, [mark])
    assert collect_garbage(url, now=NOW_S) == ()
    assert collect_garbage(url, now=NOW_S + GRACE_S) == (STEP.directory,)
    assert open_storage(url).names() == []


def test_a_copy_says_how_much_each_read_brings_so_that_a_slow_one_is_given_the_time() -> None:
    urls = [f"memory://{uuid.uuid4().hex}" for _ in range(2)]
    checkpoint.save(urls[0], {"small": torch.ones(4), "large": torch.ones(700, 500)}, step=1)
    told = ToldStorage(open_storage(urls[0]))
    copy(replace(StoredCheckpoint.open(urls[0]), storage=told), urls[1])
    assert len(told.reads) >= 5
    assert all(said == had for said, had in told.reads.values()), told.reads
