"""Claims about ranks that open another tool's checkpoint together; the ranks are threads.

Each has a directory of its own: what it sees of one where somebody writes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointMissing,
    FormatUnsupported,
    RankFailed,
    RulesInvalid,
)
from keepstep.checkpoint.format.layout.location import Format, Location, split_format_prefix
from keepstep.checkpoint.ranks.fill_state import LoadOptions
from keepstep.checkpoint.ranks.foreign_load import load_foreign
from keepstep.checkpoint.ranks.shared_foreign import find_foreign_together, open_foreign_together
from tests.unit.checkpoint.thread_ranks import ThreadRanks

RANKS = 3


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> ThreadRanks:
    played = ThreadRanks(RANKS)
    played.patch(monkeypatch)
    return played


@pytest.fixture
def seen(tmp_path: Path) -> list[Path]:
    directories = [tmp_path / str(rank) for rank in range(RANKS)]
    for directory in directories:
        directory.mkdir()
    return directories


def write_folder(run: Path, step: int) -> None:
    folder = run / f"checkpoint-{step}"
    folder.mkdir()
    torch.save({"w": torch.full((2,), step)}, folder / "pytorch_model.bin")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def write_file(path: Path, step: int) -> None:
    torch.save({"model": {"w": torch.zeros(2)}, "step": step}, path)


def test_what_rank_0_does_not_find_no_rank_finds(ranks: ThreadRanks, seen: list[Path]) -> None:
    write_file(seen[1] / "a.pt", 1)
    urls = [str(directory / "a.pt") for directory in seen]
    assert ranks.run(lambda rank: find_foreign_together(urls[rank], ranks.group)) == [None] * RANKS


def test_what_rank_0_finds_all_find(ranks: ThreadRanks, seen: list[Path]) -> None:
    write_file(seen[0] / "a.pt", 1)
    urls = [str(directory / "a.pt") for directory in seen]
    found = [Location(url, Format.TORCH_SAVE, file_name="a.pt") for url in urls]
    assert ranks.run(lambda rank: find_foreign_together(urls[rank], ranks.group)) == found


@pytest.mark.parametrize("is_named", [True, False])
def test_all_open_the_step_that_rank_0_finds_latest(
    ranks: ThreadRanks, seen: list[Path], is_named: bool
) -> None:
    for directory in seen:
        write_folder(directory, 1)
    write_folder(seen[1], 2)

    def act(rank: int) -> ForeignCheckpoint:
        named = Location(str(seen[rank]), Format.TRAINER if is_named else None)
        found = None if is_named else find_foreign_together(named.url, ranks.group)
        return open_foreign_together(named, ranks.group, found)

    sources = ranks.run(act)
    assert [source.step for source in sources] == [1] * RANKS
    assert [source.url for source in sources] == [f"{path}/checkpoint-1" for path in seen]


def test_what_is_missing_on_rank_0_is_missing_on_all(ranks: ThreadRanks, seen: list[Path]) -> None:
    write_file(seen[1] / "a.pt", 1)
    named = [Location(str(path / "a.pt"), Format.TORCH_SAVE) for path in seen]
    errors = ranks.run(lambda rank: open_foreign_together(named[rank], ranks.group))
    assert [type(error) for error in errors] == [CheckpointMissing] * RANKS


def test_what_rank_0_does_not_recognize_is_unsupported_on_all(
    ranks: ThreadRanks, seen: list[Path]
) -> None:
    (seen[0] / "a.pt").write_text("no checkpoint")
    named = [Location(str(path / "a.pt")) for path in seen]
    errors = ranks.run(lambda rank: open_foreign_together(named[rank], ranks.group))
    assert [type(error) for error in errors] == [FormatUnsupported] * RANKS


def test_what_is_missing_on_another_rank_is_an_error_on_all(
    ranks: ThreadRanks, seen: list[Path]
) -> None:
    for path in (seen[0], seen[2]):
        write_file(path / "a.pt", 1)
    named = [Location(str(path / "a.pt")) for path in seen]
    errors = ranks.run(lambda rank: open_foreign_together(named[rank], ranks.group))
    assert [type(error) for error in errors] == [RankFailed, CheckpointMissing, RankFailed]


def test_ranks_that_read_different_files_all_say_so(ranks: ThreadRanks, seen: list[Path]) -> None:
    for step, path in zip((1, 1, 2), seen, strict=True):
        write_file(path / "a.pt", step)
    named = [Location(str(path / "a.pt")) for path in seen]
    errors = ranks.run(lambda rank: open_foreign_together(named[rank], ranks.group))
    assert [type(error) for error in errors] == [CheckpointDamaged] * RANKS
    assert "step 1 with 1 tensors, and rank 2 reads" in str(errors[0])


RENAME = """
[[rule]]
match = "w"
rename = "weight"
"""
SPLIT = """
[[rule]]
match = "w"
rename = ["weight", "bias"]
parts = { weight = 1, bias = 1 }
"""


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ((RENAME, None, RENAME), (RankFailed, CheckpointMissing, RankFailed)),
        ((RENAME, RENAME, SPLIT), (RulesInvalid, RulesInvalid, RulesInvalid)),
    ],
)
def test_ranks_whose_rules_differ_fail_together(
    ranks: ThreadRanks,
    seen: list[Path],
    rules: tuple[str | None, ...],
    expected: tuple[type[Exception], ...],
) -> None:
    for directory, text in zip(seen, rules, strict=True):
        write_file(directory / "a.pt", 1)
        if text is not None:
            (directory / "rules.toml").write_text(text)

    def act(rank: int) -> int:
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.ones(2))
        location = split_format_prefix(f"torch:{seen[rank]}/a.pt")
        options = LoadOptions(rules=str(seen[rank] / "rules.toml"))
        report = load_foreign(location, {"model": model}, options, ranks.group, None)
        return 0 if report is None else report.step

    assert tuple(map(type, ranks.run(act))) == expected
