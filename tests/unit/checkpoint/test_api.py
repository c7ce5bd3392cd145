"""Claims about loads by all ranks: what they take a checkpoint for, and how they agree."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointMissing, LayoutMismatch
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
    # The metadata (5), what is to be filled (2), wants (3), readers (3), sizes and pieces of one
    # round, sizes of a round that has none, the end.
    assert len(played.collectives) == 17 * 3


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
    played = ThreadRanks(3)
    played.patch(monkeypatch)
    for where, text in (
        (url, "there is no checkpoint of step 3 (steps there: 2, 1)"),
        (str(tmp_path / "none"), "there is no checkpoint of step 3 (steps there: none)"),
    ):
        results = played.run(
            lambda _, where=where: checkpoint.load(where, {"a": torch.zeros(3, 2)}, step=3)
        )
        assert [type(result) for result in results] == [CheckpointMissing] * 3
        assert {str(result) for result in results} == {f"{where}: {text}"}
    state = {"a": torch.zeros(3, 2)}
    assert played.run(lambda _: checkpoint.load(url, dict(state), step=1)) == [1, 1, 1]
