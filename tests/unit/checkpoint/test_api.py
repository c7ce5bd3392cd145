"""Claims about loads by all ranks: what they take a checkpoint for, and how they agree."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMissing,
    FormatUnsupported,
    LayoutMismatch,
)
from keepstep.checkpoint.ranks import fill_state
from tests.unit.checkpoint.thread_ranks import ThreadRanks


def test_names_of_other_stages_count_for_what_a_checkpoints_names_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(url, {"model": nn.ModuleDict({"module": nn.Linear(1, 1)})}, step=1)
    checkpoint.load(url, {"model": nn.Linear(1, 1)})

    def of_all_ranks(names: Iterable[str], _: object) -> set[str]:
        return {*names, "module.weight", "module.bias"}

    monkeypatch.setattr(fill_state, "union_of_all_ranks", of_all_ranks)
    with pytest.raises(LayoutMismatch, match="model/weight, model/bias: missing in the source"):
        checkpoint.load(url, {"model": nn.Linear(1, 1)})


def stored(url: str, *steps: int) -> str:
    for step in steps:
        checkpoint.save(url, {"a": torch.full((3, 2), float(step)), "step": step}, step=step)
    return url


def test_a_load_by_all_ranks_takes_few_collectives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each costs a millisecond or more among processes, as much as reading megabytes."""
    url = stored(str(tmp_path), 1)
    played = ThreadRanks(3)
    played.patch(monkeypatch)
    states = [{"a": torch.zeros(3, 2), "step": 0} for _ in range(3)]
    assert played.run(lambda rank: checkpoint.load(url, states[rank])) == [1, 1, 1]
    assert all(torch.equal(state["a"], torch.ones(3, 2)) for state in states)
    assert [state["step"] for state in states] == [1, 1, 1]
    # The arguments, the metadata (2), what is to be filled, wants, readers, sizes and pieces of one
    # round, sizes of a round that has none, the end.
    assert len(played.collectives) == 10 * 3


def test_a_damaged_checkpoint_names_fallback_where_there_are_older_ones(tmp_path: Path) -> None:
    url = stored(str(tmp_path), 1, 2)
    for count, remedy in (1, "; older checkpoints there: 1; fallback=True loads the"), (0, None):
        manifest = max(tmp_path.rglob("manifest.json"))
        manifest.write_bytes(b"?")
        with pytest.raises(CheckpointDamaged) as raised:
            checkpoint.load(url, {"a": torch.zeros(3, 2)}, step=None if count else 1)
        assert remedy is None or remedy in str(raised.value)
        assert ("fallback=True" in str(raised.value)) == bool(count)
        manifest.unlink()


def test_a_file_of_no_known_format_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "run.txt").write_text("no checkpoint")
    with pytest.raises(FormatUnsupported, match="no checkpoint was recognized"):
        checkpoint.load(tmp_path / "run.txt", {"a": torch.zeros(3, 2)})


def test_names_to_resize_that_the_state_does_not_have_are_refused(tmp_path: Path) -> None:
    state = {"a": torch.zeros(3, 2)}
    with pytest.raises(LayoutMismatch, match="resize names nosuch, which the state does not have"):
        checkpoint.load(stored(str(tmp_path), 1), state, resize=["a", "nosuch"])
    assert not state["a"].any()


def test_names_to_resize_given_as_one_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"give names, as resize=\['a'\]"):
        checkpoint.load(stored(str(tmp_path), 1), {"a": torch.zeros(3, 2)}, resize="a")


@pytest.mark.parametrize("leaf", ["documents.json", "manifest.json"])
def test_metadata_that_rank_0_finds_damaged_is_so_for_all_and_all_fall_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, leaf: str
) -> None:
    url = stored(str(tmp_path), 1, 2)
    damaged = max(tmp_path.rglob(leaf))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    played = ThreadRanks(3)
    played.patch(monkeypatch)
    states = [{"a": torch.zeros(3, 2)} for _ in range(3)]
    results = played.run(lambda rank: checkpoint.load(url, states[rank]))
    assert [type(result) for result in results] == [CheckpointDamaged] * 3
    assert played.run(lambda rank: checkpoint.load(url, states[rank], fallback=True)) == [1, 1, 1]
    assert all(torch.equal(state["a"], torch.ones(3, 2)) for state in states)


def test_a_step_that_is_missing_is_so_for_all_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = stored(str(tmp_path / "some"), 1, 2)
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes.txt").touch()
    played = ThreadRanks(3)
    played.patch(monkeypatch)
    for where, text in (
        (url, "there is no checkpoint of step 3 (steps there: 2, 1)"),
        (str(tmp_path / "none"), "there is no checkpoint of step 3 (steps there: none)"),
        (
            str(tmp_path / "others"),
            "there is no checkpoint of step 3 (steps there: none; notes.txt is there, and no "
            "complete checkpoint of a known format)",
        ),
    ):
        results = played.run(
            lambda _, where=where: checkpoint.load(where, {"a": torch.zeros(3, 2)}, step=3)
        )
        assert [type(result) for result in results] == [CheckpointMissing] * 3
        assert {str(result) for result in results} == {f"{where}: {text}"}
    state = {"a": torch.zeros(3, 2)}
    assert played.run(lambda _: checkpoint.load(url, dict(state), step=1)) == [1, 1, 1]


@pytest.mark.parametrize("step", [True, "5", 1.5, np.True_, torch.tensor(1.5)])
@pytest.mark.parametrize("argument", ["step", "generation"])
def test_a_step_that_is_no_integer_is_refused_before_anything_is_written(
    tmp_path: Path, argument: str, step: Any
) -> None:
    numbers: dict[str, Any] = {"step": 1, argument: step}
    url, message = str(tmp_path / "run"), f"{argument}={step!r} is no integer"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        checkpoint.save(url, {"a": torch.zeros(3)}, **numbers)
    with checkpoint.Saver() as saver, pytest.raises(CheckpointError, match=re.escape(message)):
        saver.save(url, {"a": torch.zeros(3)}, **numbers)
    assert not (tmp_path / "run").exists()
    if argument == "step":
        with pytest.raises(CheckpointError, match=re.escape(message)):
            checkpoint.load(stored(url, 1), {"a": torch.zeros(3, 2)}, step=step)


@pytest.mark.parametrize(
    "numbers", [{"step": -1}, {"step": 10**8}, {"step": 1, "generation": 10**6}]
)
def test_a_step_that_no_name_can_hold_is_refused(tmp_path: Path, numbers: dict[str, int]) -> None:
    message = "is out of the format's range; give a step from 0 to 99,999,999"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(tmp_path / "run", {"a": torch.zeros(3)}, **numbers)
    assert not (tmp_path / "run").exists()


def test_integers_of_other_libraries_and_paths_of_pathlib_are_taken(tmp_path: Path) -> None:
    numbers: list[Any] = [np.int64(7), torch.tensor(8)]
    state = {"a": torch.zeros(3, 2)}
    for step in numbers:
        checkpoint.save(tmp_path, state, step=step, generation=step)
        assert checkpoint.load(tmp_path, state, step=step) == int(step)
    with checkpoint.Saver() as saver:
        handle = saver.save(tmp_path, state, step=np.int64(9))  # type: ignore[arg-type]
        handle.wait()
    assert (handle.url, handle.step) == (str(tmp_path), 9)
    assert checkpoint.load(tmp_path, state) == 9


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", 'the URL is empty; for the current directory write "."'),
        ("~/run", "~/run: ~ is not expanded here; write the whole path, or ./~/run"),
        (None, "None is no URL; give a str, or a path"),
        (b"run", "b'run' is no URL"),
        (Path("s3://bucket/run"), "has one slash where a URL has two, for pathlib leaves out"),
    ],
)
def test_a_url_that_names_no_place_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"a": torch.zeros(3)}
    with checkpoint.Saver() as saver:
        for refused in (
            lambda: checkpoint.save(url, state, step=1),
            lambda: saver.save(url, state, step=1),
            lambda: checkpoint.load(url, state),
        ):
            with pytest.raises(CheckpointError, match=re.escape(message)):
                refused()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "others", "first"),
    [
        ("step", 1, 2),
        ("strict", False, True),
        ("convert", True, False),
        ("fallback", True, False),
        ("rules", "given", "none"),
    ],
)
def test_ranks_that_load_with_different_arguments_all_raise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, others: Any, first: Any
) -> None:
    url = stored(str(tmp_path), 1, 2)
    played = ThreadRanks(3)
    played.patch(monkeypatch)

    def load(rank: int) -> int:
        given: dict[str, Any] = {option: others if rank else first}
        if given == {"rules": "none"}:
            given = {"rules": None}
        return checkpoint.load(url, {"a": torch.zeros(3, 2)}, **given)

    for result in played.run(load):
        assert isinstance(result, CheckpointError)
        assert str(result) == (
            f"rank 1 gives {option}={others!r}, and rank 0 {option}={first!r}; all ranks load one "
            "checkpoint together"
        )


def test_ranks_that_load_from_different_urls_all_raise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    urls = [stored(str(tmp_path / name), 1) for name in "abc"]
    played = ThreadRanks(3)
    played.patch(monkeypatch)
    results = played.run(lambda rank: checkpoint.load(urls[rank], {"a": torch.zeros(3, 2)}))
    message = f"rank 1 gives url={urls[1]!r}, and rank 0 url={urls[0]!r}"
    assert all(isinstance(each, CheckpointError) and message in str(each) for each in results)
