"""Tests of several attempts to write one checkpoint: none changes what another one wrote."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint import api
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointExists
from keepstep.checkpoint.format.stored.housekeeping import collect_garbage
from keepstep.checkpoint.format.stored.object_names import REMOVED, Attempt, StoredStep
from keepstep.checkpoint.format.stored.pruning import GRACE_S
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import Storage, open_storage
from tests.adaptive_timeouts import patient

NOW_S = 1.7e9


class ActingStorage:
    """A storage that calls a function once, before or after its first call of a method."""

    def __init__(self, storage: Storage, method: str, act: Callable[[], None], *, after: bool):
        self.storage = storage
        self._method = method
        self._act: Callable[[], None] | None = act
        self._after = after

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.storage, name)
        if name != self._method:
            return attribute

        def call(*arguments: Any, **options: Any) -> Any:
            act, self._act = self._act, None
            if act is not None and not self._after:
                act()
            try:
                return attribute(*arguments, **options)
            finally:
                if act is not None and self._after:
                    act()

        return call


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


def state(value: float) -> dict[str, torch.Tensor]:
    return {"large": torch.full((700, 600), value), "small": torch.full((7,), value)}


def assert_holds(url: str, value: float) -> None:
    StoredCheckpoint.open(open_storage(url)).verify()
    filled = state(0.0)
    checkpoint.load(url, filled)
    assert all(torch.equal(filled[name], wanted) for name, wanted in state(value).items())


@pytest.mark.parametrize("method", ["write", "flush", "create"])
def test_a_late_writer_of_the_same_step_changes_nothing_that_is_committed(
    url: str, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    is_late, is_committed = threading.Event(), threading.Event()

    def be_late() -> None:
        is_late.set()
        assert is_committed.wait(patient(60))

    storage = ActingStorage(open_storage(url), method, be_late, after=False)
    errors: list[Exception] = []

    def save_late() -> None:
        try:
            checkpoint.save(url, state(1.0), step=1)
        except CheckpointExists as error:
            errors.append(error)

    monkeypatch.setattr(api, "open_storage", lambda url: storage)
    late = threading.Thread(target=save_late)
    late.start()
    assert is_late.wait(patient(60))
    monkeypatch.setattr(api, "open_storage", open_storage)
    checkpoint.save(url, state(2.0), step=1)
    is_committed.set()
    late.join()
    assert len(errors) == 1
    assert_holds(url, 2.0)


def abandon(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what a writer leaves that dies before it commits."""

    class Died(BaseException):
        pass

    def die() -> None:
        raise Died

    dying = ActingStorage(open_storage(url), "create", die, after=False)
    with monkeypatch.context() as patch:
        patch.setattr(api, "open_storage", lambda url: dying)
        with pytest.raises(Died):
            checkpoint.save(url, state(1.0), step=1)


@pytest.mark.parametrize("grace_s", [GRACE_S, 0.0])
def test_a_step_that_is_committed_after_gc_listed_an_older_attempt_stays(
    url: str, monkeypatch: pytest.MonkeyPatch, grace_s: float
) -> None:
    abandon(url, monkeypatch)
    for hour in range(3):
        saves = hour == 2 or grace_s == 0
        act = (lambda: checkpoint.save(url, state(2.0), step=1)) if saves else (lambda: None)
        acting = ActingStorage(open_storage(url), "names", act, after=True)
        collect_garbage(acting, now=NOW_S + hour * GRACE_S, grace_s=grace_s)
        if saves:
            break
    assert_holds(url, 2.0)


def test_an_attempt_that_is_committed_between_listing_and_deleting_stays(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage collection looks for a manifest just before it is created."""

    def collect() -> None:
        collecting.start()
        assert has_listed.wait(patient(60))

    def wait_for_commit() -> None:
        has_listed.set()
        assert is_committed.wait(patient(60))

    has_listed, is_committed = threading.Event(), threading.Event()
    listing = ActingStorage(open_storage(url), "read", wait_for_commit, after=True)
    collecting = threading.Thread(
        target=lambda: collect_garbage(listing, now=NOW_S, grace_s=0), daemon=True
    )
    creating = ActingStorage(open_storage(url), "create", collect, after=False)
    monkeypatch.setattr(api, "open_storage", lambda url: creating)
    checkpoint.save(url, state(2.0), step=1)
    is_committed.set()
    collecting.join(patient(60))
    assert_holds(url, 2.0)


def test_an_attempt_that_commits_while_gc_runs_stays_or_fails(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage collection runs at every point of a save, often enough to delete what is idle."""

    def collect(hours: int) -> Callable[[], None]:
        def act() -> None:
            for hour in range(hours):
                collect_garbage(open_storage(url), now=NOW_S + hour * GRACE_S)

        return act

    committed = 0
    for step, (method, after, hours) in enumerate(
        (method, after, hours)
        for method in ("write", "flush", "create")
        for after in (False, True)
        for hours in (1, 2, 3, 26)
    ):
        storage = ActingStorage(open_storage(url), method, collect(hours), after=after)
        monkeypatch.setattr(api, "open_storage", lambda url, storage=storage: storage)
        try:
            checkpoint.save(url, state(float(step)), step=step)
            committed += 1
            StoredCheckpoint.open(open_storage(url), step).verify()
        except CheckpointDamaged:
            raise
        except CheckpointError:
            assert StoredStep(step, 0) not in list_steps(open_storage(url))
    assert 0 < committed < 24


def test_gc_deletes_abandoned_attempts_next_to_a_committed_one(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandon(url, monkeypatch)
    abandoned = {name.rpartition("/")[0] for name in open_storage(url).names()}
    checkpoint.save(url, state(2.0), step=1)
    deleted: Sequence[str] = ()
    for hour in range(3):
        assert deleted == ()
        deleted = collect_garbage(open_storage(url), now=NOW_S + hour * GRACE_S)
    assert len(deleted) == 1
    assert all(directory.startswith(deleted[0]) for directory in abandoned)
    left = [name for name in open_storage(url).names() if name.startswith(f"{deleted[0]}/")]
    assert left == [f"{deleted[0]}/{REMOVED}"]
    assert_holds(url, 2.0)


def test_nothing_next_to_a_manifest_that_cannot_be_read_is_deleted(url: str) -> None:
    checkpoint.save(url, state(1.0), step=1)
    storage = open_storage(url)
    storage.write(f"{StoredStep(1, 0).directory}/manifest.json", [b"{"])
    names = storage.names()
    assert collect_garbage(open_storage(url), now=NOW_S, grace_s=0) == ()
    assert storage.names() == names


def test_gc_deletes_files_that_were_never_finished(tmp_path: Any) -> None:
    attempt = tmp_path / Attempt(StoredStep(1, 0), "a").directory
    attempt.mkdir(parents=True)
    (attempt / "zarr.json.0123456789ab.unfinished").write_bytes(b"half")
    for hour in (0, 1, 2, 26):
        collect_garbage(open_storage(str(tmp_path)), now=NOW_S + hour * GRACE_S)
    assert list(tmp_path.iterdir()) == []
