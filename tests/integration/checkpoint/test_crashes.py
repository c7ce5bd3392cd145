"""Tests of crashes: a writer that dies at any operation leaves the previous checkpoint intact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint import api
from keepstep.checkpoint.errors import CheckpointError, CheckpointExists, CheckpointMissing
from keepstep.checkpoint.format.stored.object_names import StoredStep
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import Storage, open_storage


class Died(BaseException):
    """The process has died: nothing may catch this and continue."""


class CrashingStorage:
    """Crashes at its n-th operation: before it, in the middle of it, or after it.

    In the middle means that half of the bytes are written, under the temporary name.
    """

    def __init__(self, storage: Storage, dies_at: int, when: str) -> None:
        self.storage = storage
        self.operations = 0
        self._dies_at = dies_at
        self._when = when

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.storage, name)
        if not callable(attribute):
            return attribute

        def act(*arguments: Any, **options: Any) -> Any:
            self.operations += 1
            if self.operations > self._dies_at:
                raise Died
            if self.operations == self._dies_at:
                if self._when == "middle" and name in ("write", "create"):
                    write_half(self.storage, arguments[0], arguments[-1])
                if self._when == "after":
                    with suppress(CheckpointMissing):
                        attribute(*arguments, **options)
                raise Died
            return attribute(*arguments, **options)

        return act


def write_half(storage: Any, name: str, content: Any) -> None:
    """Leave what a killed process leaves of a file: a part of it, under a temporary name."""
    data = content if isinstance(content, bytes) else b"".join(content)
    storage.write(f"{name}.0123456789ab.unfinished", [data[: len(data) // 2]])


def state(value: float) -> dict[str, torch.Tensor]:
    return {
        "large": torch.full((700, 600), value),
        "frozen": torch.full((700, 600), 5.0),
        "small": torch.full((7,), value),
        "more": torch.full((3, 3), value).bfloat16(),
    }


@pytest.fixture(params=["files", "azure"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "files" else str(request.getfixturevalue("azure"))


@pytest.mark.parametrize("when", ["before", "middle", "after"])
def test_the_newest_checkpoint_is_intact_whenever_the_writer_dies(
    place: str, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    opened: list[CrashingStorage] = []

    def crashing(dies_at: int) -> Callable[[str], Any]:
        def open_crashing(url: str) -> Any:
            opened.append(CrashingStorage(open_storage(url), dies_at, when))
            return opened[-1]

        return open_crashing

    counted = f"{place}/count-{when}"
    checkpoint.save(counted, state(1.0), step=1)
    monkeypatch.setattr(api, "open_storage", crashing(10**9))
    checkpoint.save(counted, state(2.0), step=2)
    total = opened[-1].operations
    assert total >= 10
    committed = 0
    for dies_at in range(1, total + 1):
        root = f"{place}/{when}-{dies_at}"
        monkeypatch.setattr(api, "open_storage", open_storage)
        checkpoint.save(root, state(1.0), step=1)
        monkeypatch.setattr(api, "open_storage", crashing(dies_at))
        with pytest.raises((Died, CheckpointError)):
            checkpoint.save(root, state(2.0), step=2)
        monkeypatch.setattr(api, "open_storage", open_storage)
        filled = state(0.0)
        step = checkpoint.load(root, filled)
        assert all(
            torch.equal(filled[name], value) for name, value in state(float(step)).items()
        ), dies_at
        for stored in list_steps(open_storage(root)):
            StoredCheckpoint.open(open_storage(root), stored.step).verify()
        committed += step == 2
        # Another attempt succeeds, whether or not the crashed one left files of the same names.
        try:
            checkpoint.save(root, state(2.0), step=2)
        except CheckpointExists:
            assert step == 2
        assert list_steps(open_storage(root))[0] == StoredStep(2, 0)
        StoredCheckpoint.open(open_storage(root), 2).verify()
    # Two operations follow the one that commits: a look whether the attempt was closed, and a note
    # of the newest checkpoint.
    assert committed == (3 if when == "after" else 2)
