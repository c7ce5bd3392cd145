"""Claims about a save that goes on beside training, on one of its ranks."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.saving import background
from keepstep.checkpoint.saving.background import BackgroundSaver, Copied, SaveTask
from keepstep.checkpoint.saving.messages import WritePart
from keepstep.checkpoint.saving.writer_process import WriterProcess
from tests.adaptive_timeouts import patient

LIMIT_S = 60.0


@dataclass(frozen=True)
class Save:
    """A save of rank 1 of two that was submitted; the store is in this process."""

    background: BackgroundSaver
    store: HashStore
    copied: Future[Copied] = field(default_factory=Future)
    outcome: Future[CheckpointError | None] = field(default_factory=Future)


def submitted(directory: Path, *, rank: int = 1, peer_timeout_s: float = 0.6) -> Save:
    started = Save(BackgroundSaver(peer_timeout_s), HashStore())
    started.background.start()
    started.background.submit(
        SaveTask(
            part=WritePart(
                url=str(directory), directory=str(directory), step=1, generation=0, attempt="a"
            ),
            copied=started.copied,
            plan=b"",
            documents=b"{}",
            sends_documents=False,
            rank=rank,
            world_size=2,
            store=started.store,
            outcome=started.outcome,
        )
    )
    return started


@pytest.fixture
def save(tmp_path: Path) -> Save:
    return submitted(tmp_path)


def test_signs_of_life_are_given_while_the_rank_still_copies(save: Save) -> None:
    try:
        while save.store.add("keepstep/save/a/alive/1", 0) < 3:
            assert not wait([save.outcome], 0.05).done
    finally:
        save.copied.set_result(Copied(None, CheckpointError("the tensors were not copied")))
        error = save.outcome.result(patient(LIMIT_S))
        save.background.close(patient(LIMIT_S))
    assert str(error) == "the tensors were not copied"
    assert save.store.get("keepstep/save/a/part/1") == b"!the tensors were not copied"


def test_nothing_is_done_beside_a_copy_that_others_are_patient_for(tmp_path: Path) -> None:
    save = submitted(tmp_path, peer_timeout_s=60.0)
    try:
        assert not wait([save.outcome], 0.3).done
        assert save.store.num_keys() == 0
    finally:
        save.copied.set_result(Copied(None, CheckpointError("the tensors were not copied")))
        assert save.outcome.result(patient(LIMIT_S)) is not None
        save.background.close(LIMIT_S)


def test_the_next_save_does_not_wait_until_others_have_seen_the_outcome(tmp_path: Path) -> None:
    save = submitted(tmp_path, rank=0, peer_timeout_s=60.0)
    save.copied.set_result(Copied(None, CheckpointError("the tensors were not copied")))
    assert save.background.wait_idle(20.0)
    assert not save.store.check(["keepstep/save/a/all_seen"])
    save.store.set("keepstep/save/a/all_seen", "1")
    save.background.close(LIMIT_S)


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
    monkeypatch.setattr(WriterProcess, "write", lambda *_: never.wait())
    save.copied.set_result(Copied(None, None))
    save.background.close(0.1)
    try:
        assert "does not end" in str(save.outcome.result(0))
        assert "does not end" in caplog.text
    finally:
        never.set()
