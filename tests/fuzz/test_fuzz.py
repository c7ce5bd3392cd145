"""A few changes of every format and message; `python -m tests.fuzz` makes as many as there is time.

The changes are the same in every run. What a longer run finds becomes a test of its own.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fuzz import worker
from tests.fuzz.decoders import decoders
from tests.fuzz.mutations import mutated
from tests.fuzz.run import cases_of, run
from tests.fuzz.seeds import SEEDS, write_seeds

CASES = 6
MORE_CASES = 24
"""Changes of keepstep's own format, which also adapt a changed object's checksums."""


def test_changed_files_and_messages_are_read_or_refused(tmp_path: Path) -> None:
    seeds = write_seeds(tmp_path / "seeds")
    names = [*seeds, *decoders()]
    own = [name for name in seeds if name.startswith("keepstep")]
    cases = itertools.chain(cases_of(names, 0, CASES), cases_of(own, 1, MORE_CASES))
    outcomes = run(cases, seeds, tmp_path / "kept", workers=1)
    assert outcomes.findings == []
    assert set(outcomes.counts) == set(names)
    assert all(
        sum(counts.values()) == CASES + (MORE_CASES if name in own else 0)
        for name, counts in outcomes.counts.items()
    )
    # Neither are changes without effect, nor is everything refused.
    for result in ("read", "refused"):
        assert sum(counts[result] for counts in outcomes.counts.values()) > len(names)


def act_badly(guard: SimpleNamespace) -> str:
    guard.events.append("os.system")
    return "read"


def take_memory(_: SimpleNamespace) -> str:
    # Mapped memory: what this process has freed before it would use again without a new peak.
    with mmap.mmap(-1, 2**24) as memory:
        memory[:] = bytes(2**24)
    return "read"


def take_time(_: SimpleNamespace) -> str:
    for _number in range(10**5):
        pass
    return "read"


@pytest.mark.parametrize(
    ("act", "result"),
    [
        (lambda _: "read", "read"),
        (lambda _: [][0], "raised"),
        (act_badly, "acted"),
        (take_memory, "memory"),
        (take_time, "slow"),
    ],
)
def test_whatever_else_comes_of_a_case_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, act: Callable[[Any], str], result: str
) -> None:
    guard = SimpleNamespace(events=[], watch=lambda _: None)
    if act is take_memory:
        monkeypatch.setattr(worker, "_MOST_NBYTES", 2**22)
    if act is take_time:
        monkeypatch.setattr(worker, "_MOST_SECONDS", 0.0)
    entries = {"decoder": SimpleNamespace(enter=lambda _: act(guard))}
    outcome = worker._outcome("decoder", "0", {}, entries, guard, tmp_path)  # type: ignore[arg-type]
    assert outcome["result"] == result
    assert (outcome["error"] is None) == (result == "read")


def test_changes_follow_from_the_seed_and_every_kind_of_file_is_changed(tmp_path: Path) -> None:
    SEEDS["orbax, manager"](tmp_path)
    files = {
        path.relative_to(tmp_path).as_posix(): path.read_bytes()
        for path in sorted(tmp_path.rglob("*"))
        if path.is_file()
    }
    first, again = ([mutated(files, Random(f"{n}")) for n in range(300)] for _ in range(2))
    assert first == again
    touched = {name.rpartition("/")[2] for changes in first for name in changes}
    assert {"manifest.ocdbt", "_METADATA", "metadata", "_CHECKPOINT_METADATA"} <= touched
