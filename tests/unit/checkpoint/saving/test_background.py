"""Claims about a save that goes on beside training, on one of its ranks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.ranks.control_group import ControlGroup
from keepstep.checkpoint.saving import background
from keepstep.checkpoint.saving.background import BackgroundSaver, Copied, SaveTask
from keepstep.checkpoint.saving.messages import WritePart
from keepstep.checkpoint.saving.writer_process import WriterProcess

LIMIT_S = 60.0


@dataclass(frozen=True)
class Save:
    """A save of one rank that was submitted."""

    background: BackgroundSaver
    copied: Future[Copied] = field(default_factory=Future)
    outcome: Future[CheckpointError | None] = field(default_factory=Future)


def submitted(
    directory: Path, group: ControlGroup | None = None, *, peer_timeout_s: float = 0.6
) -> Save:
    started = Save(BackgroundSaver(peer_timeout_s))
    started.background.start()
    started.background.submit(
        SaveTask(
            part=WritePart(
                url=str(directory), directory=str(directory), step=1, generation=0, attempt="a"
            ),
            copied=started.copied,
            plan=b"",
            documents=b"{}",
            group=group or ControlGroup(),
            outcome=started.outcome,
        )
    )
    return started


@pytest.fixture
def save(tmp_path: Path) -> Save:
    return submitted(tmp_path)


class Rank1OfTwo:
    """A group in which the other rank says what this one does; heartbeats are noted."""

    def __init__(self) -> None:
        self.signs: list[int] = []

    def rank(self) -> int:
        return 1

    def send(self, tensors: Sequence[torch.Tensor], *_: int) -> Self:
        self.signs.append(int(tensors[0]))
        return self

    def recv(self, *_: object) -> Self:
        return self

    def allgather(self, gathered: Sequence[Sequence[Any]], sent: Sequence[Any]) -> Self:
        for buffer in gathered[0]:
            buffer.copy_(sent[0])
        return self

    def wait(self, *_: timedelta) -> None:
        pass


def test_signs_of_life_are_given_while_the_rank_still_copies(tmp_path: Path) -> None:
    rank = Rank1OfTwo()
    save = submitted(tmp_path, ControlGroup(rank, range(2)))
    try:
        while len(rank.signs) < 3:
            assert not wait([save.outcome], 0.05).done
    finally:
        save.background.close(0.0)
    assert "given up on this rank" in str(save.outcome.result(0))


def test_nothing_is_done_beside_a_copy_that_others_are_patient_for(tmp_path: Path) -> None:
    rank = Rank1OfTwo()
    save = submitted(tmp_path, ControlGroup(rank, range(2)), peer_timeout_s=60.0)
    try:
        assert not wait([save.outcome], 0.3).done
        assert rank.signs == []
    finally:
        save.copied.set_result(Copied(None, CheckpointError("the tensors were not copied")))
        save.background.close(0.0)


def test_a_save_that_takes_too_long_is_given_up_when_its_owner_closes(save: Save) -> None:
    save.background.close(0.0)
    assert "given up on this rank" in str(save.outcome.result(0))
    assert save.background.writer_pid is None


def test_a_save_that_cannot_be_ended_does_not_hold_up_its_owner(
    save: Save, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one whose process the kernel does not end, because its file system does not answer."""
    never = threading.Event()
    monkeypatch.setattr(background, "_END_S", 0.1)
    monkeypatch.setattr(WriterProcess, "use_plan", lambda *_: None)
    monkeypatch.setattr(WriterProcess, "reply", lambda *_: never.wait())
    save.copied.set_result(Copied(None, None))
    save.background.close(0.1)
    try:
        assert "does not end" in str(save.outcome.result(0))
        assert "does not end" in caplog.text
    finally:
        never.set()
