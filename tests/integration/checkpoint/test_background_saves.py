"""Tests of saves that do not block, in one process: the process that writes is stopped or killed.

What a stopped process would do is held until it continues: no test measures time.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointExists,
    LayoutMismatch,
    StateChanged,
)
from keepstep.checkpoint.format.content_check import check_content
from keepstep.checkpoint.format.layout.content_digest import DIGEST, digest_document
from keepstep.checkpoint.format.stored.housekeeping import Difference, compare
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.live import state_copies
from keepstep.checkpoint.live.shared_buffer import SharedBuffer
from keepstep.checkpoint.ranks.collective_plan import agree_on_save
from keepstep.checkpoint.ranks.control_group import ControlGroup
from keepstep.checkpoint.saving import background as background_module
from keepstep.checkpoint.saving import saver as saver_module
from keepstep.checkpoint.saving.background import BackgroundSaver, SaveTask
from keepstep.checkpoint.saving.save_plan import plan_save
from tests.adaptive_timeouts import patient
from tests.integration.checkpoint.tied import Tied, trained

LIMIT_S = 60.0


@pytest.fixture
def saver() -> Iterator[checkpoint.Saver]:
    with checkpoint.Saver() as made:
        yield made


def state(value: float) -> dict[str, torch.Tensor]:
    return {
        "large": torch.full((700, 600), value),
        "small": torch.full((7,), value).bfloat16(),
        "scalar": torch.tensor(value),
        "empty": torch.empty(0, 3),
    }


def loaded(root: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the state of a checkpoint, after its bytes and its digest are compared."""
    source = StoredCheckpoint.open(open_storage(str(root)), step)
    source.verify()
    assert check_content(source)
    filled = state(-1.0)
    assert checkpoint.load(str(root), filled, step=step) == step
    return filled


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def pid_of_writer(saver: checkpoint.Saver) -> int:
    assert saver.writer_pid is not None
    return saver.writer_pid


@contextmanager
def stopped(saver: checkpoint.Saver) -> Iterator[int]:
    """Stop the process that writes; it continues at the end, if it still is there."""
    pid = pid_of_writer(saver)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)


def test_a_model_and_its_optimizer_are_saved_exactly(
    tmp_path: Path, saver: checkpoint.Saver
) -> None:
    model, optimizer = trained(0)
    handle = saver.save(str(tmp_path), {"model": model, "optimizer": optimizer, "epoch": 4}, step=3)
    handle.wait(patient(LIMIT_S))
    assert handle.done()
    assert handle.error is None
    other = Tied()
    fresh = torch.optim.AdamW(other.parameters(), lr=9.0)
    restored = {"model": other, "optimizer": fresh, "epoch": 0}
    assert checkpoint.load(str(tmp_path), restored) == 3
    assert restored["epoch"] == 4
    assert_equal(model.state_dict(), other.state_dict())
    for old, new in zip(model.parameters(), other.parameters(), strict=True):
        assert_equal(dict(optimizer.state[old]), dict(fresh.state[new]))
    assert check_content(StoredCheckpoint.open(open_storage(str(tmp_path))))


def test_states_that_are_equal_do_not_differ_by_how_they_were_saved(
    tmp_path: Path, saver: checkpoint.Saver
) -> None:
    """The digest of a save depends on its chunks and so on the ranks."""
    values = {**state(1.0), "loss": math.nan}
    checkpoint.save(str(tmp_path), values, step=1)
    saver.save(str(tmp_path), values, step=2).wait(patient(LIMIT_S))
    blocking, background = (
        StoredCheckpoint.open(open_storage(str(tmp_path)), step) for step in (1, 2)
    )
    assert background.documents.keys() == blocking.documents.keys() > {DIGEST}
    assert compare(blocking, background) == Difference((), (), {}, ())
    documents = background.documents
    of_other_ranks = replace(background, documents={**documents, DIGEST: digest_document(1)})
    with_empty = replace(background, documents={**documents, "config": {}})
    for other in (of_other_ranks, with_empty):
        assert compare(background, other).documents == ()
    with_another_loss = replace(background, documents={**documents, "values": {"loss": 1.0}})
    assert compare(background, with_another_loss).documents == ("values",)


def test_save_returns_before_anything_is_written_and_later_writes_do_not_show(
    tmp_path: Path, saver: checkpoint.Saver
) -> None:
    values = state(1.0)
    saver.save(str(tmp_path), values, step=1).wait(patient(LIMIT_S))
    for tensor in values.values():
        tensor.fill_(2.0)
    with stopped(saver):
        handle = saver.save(str(tmp_path), values, step=2)
        for tensor in values.values():
            tensor.fill_(3.0)
        assert not handle.done()
        with pytest.raises(TimeoutError, match="step 2 is not stored after 0 s"):
            handle.wait(0)
        assert [stored.step for stored in list_steps(open_storage(str(tmp_path)))] == [1]
    handle.wait(patient(LIMIT_S))
    assert_equal(loaded(tmp_path, 2), state(2.0))


def test_a_second_save_waits_for_the_first(tmp_path: Path, saver: checkpoint.Saver) -> None:
    saver.save(str(tmp_path), state(1.0), step=1).wait(patient(LIMIT_S))
    first_was_done: list[bool] = []

    class Spy(dict[str, Any]):
        """Notes whether the first save is over when its tensors are looked at."""

        def items(self) -> Any:
            first_was_done.append(first.done())
            return super().items()

    with stopped(saver):
        first = saver.save(str(tmp_path), state(2.0), step=2)
        second: list[checkpoint.SaveHandle] = []
        thread = threading.Thread(
            target=lambda: second.append(saver.save(str(tmp_path), Spy(state(3.0)), step=3))
        )
        thread.start()
        assert not first_was_done
    thread.join(patient(LIMIT_S))
    second[0].wait(patient(LIMIT_S))
    assert first_was_done
    assert all(first_was_done)
    assert_equal(loaded(tmp_path, 2), state(2.0))
    assert_equal(loaded(tmp_path, 3), state(3.0))


def test_a_killed_writer_fails_its_save_and_the_next_one_has_another(
    tmp_path: Path, saver: checkpoint.Saver, caplog: pytest.LogCaptureFixture
) -> None:
    saver.save(str(tmp_path), state(1.0), step=1).wait(patient(LIMIT_S))
    with stopped(saver) as pid:
        handle = saver.save(str(tmp_path), state(2.0), step=2)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(CheckpointError, match=r"writes checkpoints ended \(signal 9"):
            handle.wait(patient(LIMIT_S))
    with caplog.at_level(logging.WARNING, "keepstep"):
        following = saver.save(str(tmp_path), state(3.0), step=3)
    following.wait(patient(LIMIT_S))
    assert "step 2 was not stored: rank 0" in str(following.previous_error)
    assert "step 2 was not stored: rank 0" in caplog.text
    assert pid_of_writer(saver) != pid
    assert saver.save(str(tmp_path), state(4.0), step=4).previous_error is None
    assert_equal(loaded(tmp_path, 3), state(3.0))
    assert 2 not in [stored.step for stored in list_steps(open_storage(str(tmp_path)))]


def test_a_tensor_written_during_the_copy_is_named(tmp_path: Path, saver: checkpoint.Saver) -> None:
    hot, ends = torch.zeros(1), threading.Event()

    def write() -> None:
        while not ends.is_set():
            hot.add_(1)

    thread = threading.Thread(target=write)
    values = {"hot": hot, "large": torch.ones(16, 2**20)}
    thread.start()
    try:
        handle = saver.save(str(tmp_path), values, step=1)
    finally:
        ends.set()
        thread.join()
    with pytest.raises(StateChanged, match="hot was written to while step 1 was being copied"):
        handle.wait(patient(LIMIT_S))
    assert list_steps(open_storage(str(tmp_path))) == ()
    saver.save(str(tmp_path), values, step=2).wait(patient(LIMIT_S))


def test_versions_tell_what_was_written_since(tmp_path: Path, saver: checkpoint.Saver) -> None:
    values = state(1.0)
    handle = saver.save(str(tmp_path), values, step=1)
    values["small"].zero_()
    changed = [name for name, tensor in values.items() if tensor._version != handle.versions[name]]
    assert changed == ["small"]


def test_the_plan_is_made_again_only_when_the_layout_changes(
    tmp_path: Path, saver: checkpoint.Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []

    def counting(rank: int, *arguments: Any) -> Any:
        planned.append(rank)
        return plan_save(rank, *arguments)

    monkeypatch.setattr(saver_module, "plan_save", counting)
    for step in (1, 2):
        saver.save(str(tmp_path), state(float(step)), step=step).wait(patient(LIMIT_S))
    assert len(planned) == 1
    grown = {**state(3.0), "more": torch.full((1000, 1000), 3.0)}
    saver.save(str(tmp_path), grown, step=3).wait(patient(LIMIT_S))
    assert len(planned) == 2
    reordered = dict(reversed(list(state(4.0).items())))
    saver.save(str(tmp_path), reordered, step=4).wait(patient(LIMIT_S))
    assert len(planned) == 3
    for step in (1, 2, 4):
        assert_equal(loaded(tmp_path, step), state(float(step)))
    more = {"more": torch.zeros(1000, 1000)}
    checkpoint.load(str(tmp_path), more, step=3, strict=False)
    assert bool((more["more"] == 3.0).all())


@pytest.mark.parametrize("is_last_plan_followed", [True, False])
def test_tensors_are_copied_before_ranks_agree_and_again_if_they_plan_anew(
    tmp_path: Path,
    saver: checkpoint.Saver,
    monkeypatch: pytest.MonkeyPatch,
    is_last_plan_followed: bool,
) -> None:
    values = state(1.0)
    saver.save(str(tmp_path), values, step=1).wait(patient(LIMIT_S))
    ended: list[Future[None]] = []
    events: list[str] = []
    begin_copy, submit = SharedBuffer.begin_copy, BackgroundSaver.submit

    def begin_and_note(*arguments: Any) -> Future[None]:
        events.append("copy")
        ended.append(begin_copy(*arguments))
        return ended[-1]

    def submit_and_note(background: BackgroundSaver, task: SaveTask) -> None:
        events.append("submit")
        submit(background, task)

    def agree(*arguments: Any, begin: Callable[..., None], **options: Any) -> Any:
        def begin_and_change(*captured: Any) -> None:
            begin(*captured)
            ended[0].result(patient(LIMIT_S))
            for tensor in values.values():
                # Not noticed, so that what is stored tells when it was copied.
                tensor.data.fill_(3.0)

        return agree_on_save(*arguments, begin=begin_and_change, **options)

    monkeypatch.setattr(SharedBuffer, "begin_copy", begin_and_note)
    monkeypatch.setattr(BackgroundSaver, "submit", submit_and_note)
    monkeypatch.setattr(saver_module, "agree_on_save", agree)
    if not is_last_plan_followed:
        share = ControlGroup.run_and_share

        def share_with_a_rank_that_has_no_plan(*arguments: Any) -> tuple[Any, list[Any]]:
            own, (shared,) = share(*arguments)
            is_plan = isinstance(shared, list) and len(shared) > 2
            return own, [shared, [shared[0], None, *shared[2:]]] if is_plan else [shared]

        monkeypatch.setattr(ControlGroup, "run_and_share", share_with_a_rank_that_has_no_plan)
    for tensor in values.values():
        tensor.fill_(2.0)
    saver.save(str(tmp_path), values, step=2).wait(patient(LIMIT_S))
    assert_equal(loaded(tmp_path, 2), state(2.0 if is_last_plan_followed else 3.0))
    assert events == (["copy", "submit"] if is_last_plan_followed else ["copy", "submit", "copy"])


@pytest.mark.parametrize("is_last_plan_followed", [True, False])
def test_a_save_whose_copy_takes_long_is_submitted_meanwhile_so_that_it_sends_heartbeats(
    tmp_path: Path,
    saver: checkpoint.Saver,
    monkeypatch: pytest.MonkeyPatch,
    is_last_plan_followed: bool,
) -> None:
    """Once, also if it has failed before the copy ends."""
    if is_last_plan_followed:
        saver.save(str(tmp_path), state(0.0), step=0).wait(patient(LIMIT_S))
    submitted, is_submitted = [], threading.Event()
    submit, copy = BackgroundSaver.submit, state_copies.copy_tensors

    def note(background: BackgroundSaver, task: SaveTask) -> None:
        submit(background, task)
        submitted.append(task)
        is_submitted.set()

    def copy_late(*arguments: Any) -> None:
        assert is_submitted.wait(patient(LIMIT_S))
        assert submitted[0].outcome.result(patient(LIMIT_S)) is not None
        assert saver._background.wait_idle(patient(LIMIT_S))
        copy(*arguments)

    def fail(*_: object) -> None:
        raise CheckpointError("a rank is gone")

    monkeypatch.setattr(BackgroundSaver, "submit", note)
    monkeypatch.setattr(background_module, "commit_together", fail)
    monkeypatch.setattr(state_copies, "copy_tensors", copy_late)
    handle = saver.save(str(tmp_path), state(1.0), step=1)
    with pytest.raises(CheckpointError, match="a rank is gone"):
        handle.wait(patient(LIMIT_S))
    assert [task.part.step for task in submitted] == [1]


def mapped_nbytes(pid: int | None) -> int:
    """Return how much shared memory a process maps that has no name."""
    if pid is None:
        return 0
    maps = psutil.Process(pid).memory_maps(grouped=False)
    return sum(region.rss for region in maps if "memfd" in region.path)


def test_a_state_that_grows_needs_memory_for_one_buffer_and_not_for_the_last_one_too(
    tmp_path: Path, saver: checkpoint.Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer kept the last one, so no save was possible any more where memory had sufficed."""
    values = [torch.full((size, 1000), float(size)) for size in (2000, 3000)]
    budget_nbytes = values[1].nbytes + 2**20
    monkeypatch.setattr(
        saver_module,
        "available_nbytes",
        lambda: budget_nbytes - mapped_nbytes(saver.writer_pid),
    )
    for step, tensor in enumerate(values):
        saver.save(str(tmp_path), {"x": tensor}, step=step).wait(patient(LIMIT_S))
        found = {"x": torch.zeros_like(tensor)}
        checkpoint.load(str(tmp_path), found, step=step)
        assert torch.equal(found["x"], tensor)


def test_errors_have_their_own_classes(tmp_path: Path, saver: checkpoint.Saver) -> None:
    saver.save(str(tmp_path), state(1.0), step=1).wait(patient(LIMIT_S))
    again = saver.save(str(tmp_path), state(2.0), step=1)
    with pytest.raises(CheckpointExists, match="step 1 of generation 0 is committed already"):
        again.wait(patient(LIMIT_S))
    with pytest.raises(LayoutMismatch, match="odd"):
        saver.save(str(tmp_path), {"odd": object()}, step=2)
    following = saver.save(str(tmp_path), state(3.0), step=3)
    assert "step 1 was not stored" in str(following.previous_error)
    following.wait(patient(LIMIT_S))


def test_a_closed_saver_has_finished_and_left_no_process(tmp_path: Path) -> None:
    saver = checkpoint.Saver()
    handle = saver.save(str(tmp_path), state(1.0), step=1)
    pid = pid_of_writer(saver)
    saver.close()
    assert handle.done()
    assert handle.error is None
    assert not psutil.pid_exists(pid)
    with pytest.raises(CheckpointError, match="closed"):
        saver.save(str(tmp_path), state(1.0), step=2)


def test_a_writer_that_never_ends_is_given_up_at_close(tmp_path: Path) -> None:
    saver = checkpoint.Saver(close_timeout_s=0.1)
    saver.save(str(tmp_path), state(1.0), step=1).wait(patient(LIMIT_S))
    with stopped(saver) as pid:
        handle = saver.save(str(tmp_path), state(2.0), step=2)
        saver.close()
    assert "signal 9" in str(handle.error)
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("block", [True, False])
def test_other_content_than_memory_had_is_found(
    tmp_path: Path, saver: checkpoint.Saver, block: bool
) -> None:
    for step in (1, 2):
        if block:
            checkpoint.save(str(tmp_path), state(float(step)), step=step)
        else:
            saver.save(str(tmp_path), state(float(step)), step=step).wait(patient(LIMIT_S))
    first, second = (StoredCheckpoint.open(open_storage(str(tmp_path)), step) for step in (1, 2))
    exchanged = replace(first, documents={**first.documents, DIGEST: second.documents[DIGEST]})
    exchanged.verify()
    with pytest.raises(CheckpointDamaged, match="not what was in memory when step 1 was saved"):
        check_content(exchanged)
    documents = {name: content for name, content in first.documents.items() if name != DIGEST}
    assert not check_content(replace(first, documents=documents))


def test_blocking_and_background_saves_of_one_state_have_one_digest(
    tmp_path: Path, saver: checkpoint.Saver
) -> None:
    checkpoint.save(str(tmp_path), state(1.0), step=1)
    saver.save(str(tmp_path), state(1.0), step=2).wait(patient(LIMIT_S))
    first, second = (StoredCheckpoint.open(open_storage(str(tmp_path)), step) for step in (1, 2))
    assert check_content(first)
    assert first.documents[DIGEST] == second.documents[DIGEST]


SCRIPT = """
import os, signal, sys, torch
from keepstep import checkpoint
from keepstep.checkpoint.saving.process_saver import PROCESS_SAVER

values = {"x": torch.ones(700, 600)}
checkpoint.save(sys.argv[1], values, step=1, block=False).wait()
pid = PROCESS_SAVER.current.writer_pid
os.kill(pid, signal.SIGSTOP)
handle = checkpoint.save(sys.argv[1], values, step=2, block=False)
assert not handle.done()
print(pid, flush=True)
"""


def test_the_interpreters_exit_finishes_the_save_in_progress(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert [stored.step for stored in list_steps(open_storage(str(tmp_path)))] == [1]
        os.kill(pid, signal.SIGCONT)
        assert process.wait(patient(LIMIT_S)) == 0
    assert [stored.step for stored in list_steps(open_storage(str(tmp_path)))] == [2, 1]
    assert not psutil.pid_exists(pid)


def run_script(script: str, directory: Path) -> str:
    """Run a script that ends well; return what it has told on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_failure_of_the_last_save_is_told_when_the_interpreter_exits(tmp_path: Path) -> None:
    script = (
        "import sys, torch\n"
        "from keepstep import checkpoint\n"
        "checkpoint.save(sys.argv[1], {'x': torch.ones(3)}, step=1)\n"
        "checkpoint.save(sys.argv[1], {'x': torch.zeros(3)}, step=1, block=False)\n"
    )
    told = run_script(script, tmp_path)
    assert "step 1 was not stored: " in told


def test_a_blocking_save_waits_for_the_save_in_progress(tmp_path: Path) -> None:
    script = (
        "import sys, torch\n"
        "from keepstep import checkpoint\n"
        "first = checkpoint.save(sys.argv[1], {'x': torch.ones(3)}, step=1, block=False)\n"
        "checkpoint.save(sys.argv[1], {'x': torch.ones(3)}, step=2)\n"
        "assert first.done() and first.error is None\n"
        "checkpoint.save(sys.argv[1], {'x': torch.ones(3)}, step=1, block=False)\n"
        "checkpoint.save(sys.argv[1], {'x': torch.ones(3)}, step=3)\n"
    )
    told = run_script(script, tmp_path)
    assert "step 1 was not stored: rank 0: " in told
    assert [stored.step for stored in list_steps(open_storage(str(tmp_path)))] == [3, 2, 1]
