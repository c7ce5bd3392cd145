"""Conversions that are interrupted, repeated, removed, or run twice at once."""

from __future__ import annotations

import itertools
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.checkpoint.convert.write import conversion, universal
from keepstep.checkpoint.errors import CheckpointError, CheckpointExists
from keepstep.checkpoint.format.stored import housekeeping
from keepstep.checkpoint.format.stored.files import FileStorage
from keepstep.checkpoint.format.stored.pruning import GRACE_S
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.integration.checkpoint.converting import assert_equal, convert, trained


def end_before(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, directory: Path) -> None:
    """Begin a conversion that ends where it would call a function."""

    def refuse(*arguments: object, **more: object) -> None:
        raise CheckpointError("the machine went away")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, refuse)
        with pytest.raises(CheckpointError, match="went away"):
            convert(directory / "a.pt", directory / "universal")


def test_an_interrupted_conversion_goes_on_and_writes_only_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(universal, "PART_NBYTES", 20_000)
    trained(tmp_path / "a.pt")
    written: list[str] = []
    write = FileStorage.write

    def failing(storage: FileStorage, name: str, pieces: Any) -> None:
        if len(written) == 6:
            raise CheckpointError("the disk is full")
        written.append(name)
        write(storage, name, pieces)

    with monkeypatch.context() as patch:
        patch.setattr(FileStorage, "write", failing)
        with pytest.raises(CheckpointError, match="the disk is full"):
            convert(tmp_path / "a.pt", tmp_path / "universal")
    noted = [name for name in written if name.endswith("-converted.json")]
    assert noted

    again: list[str] = []

    def counted(storage: FileStorage, name: str, pieces: Any) -> None:
        again.append(name)
        write(storage, name, pieces)

    with monkeypatch.context() as patch:
        patch.setattr(FileStorage, "write", counted)
        convert(tmp_path / "a.pt", tmp_path / "universal")
    assert not set(noted) & set(again)
    assert not list((tmp_path / "universal").rglob("*-converted.json"))
    convert(tmp_path / "universal", tmp_path / "b.pt")
    assert_equal(
        torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"],
        torch.load(tmp_path / "a.pt", weights_only=True)["optimizer"],
    )


def test_a_source_that_changed_after_an_interruption_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(universal, "PART_NBYTES", 20_000)
    trained(tmp_path / "a.pt")
    end_before(monkeypatch, universal, "commit", tmp_path)
    changed = torch.load(tmp_path / "a.pt", weights_only=True)
    changed["model"]["layers.1.weight"][3, 3] += 1
    torch.save(changed, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "universal")
    convert(tmp_path / "universal", tmp_path / "b.pt")
    after = torch.load(tmp_path / "b.pt", weights_only=True)
    assert_equal(after["model"]["layers.1.weight"], changed["model"]["layers.1.weight"])


@pytest.mark.parametrize("former", [None, "former"])
def test_a_conversion_into_other_tensors_takes_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, former: str | None
) -> None:
    """Arrays of the interrupted one, under the former names, were in the committed checkpoint."""
    monkeypatch.setattr(universal, "PART_NBYTES", 1_500_000)
    weights = {f"w{number}": torch.full((700, 500), float(number)) for number in range(3)}
    torch.save(weights, tmp_path / "a.pt")
    write = universal.UniversalParts.write

    def ended(parts: universal.UniversalParts, number: int, report: Any) -> None:
        if number == 1:
            raise CheckpointError("the machine went away")
        write(parts, number, report)

    rules = ["--rules", tmp_path / "rules.toml"]
    write_rule(tmp_path, former or "w")
    with monkeypatch.context() as patch:
        patch.setattr(universal.UniversalParts, "write", ended)
        with pytest.raises(CheckpointError, match="went away"):
            convert(tmp_path / "a.pt", tmp_path / "universal", *(rules if former else ()))
    interrupted = arrays_in(tmp_path / "universal")
    assert interrupted == {f"model/{former or 'w'}0"}
    write_rule(tmp_path, "x")
    convert(tmp_path / "a.pt", tmp_path / "universal", *rules)
    stored = StoredCheckpoint.open(open_storage(str(tmp_path / "universal")))
    assert set(stored.tensors) == {"model/x0", "model/x1", "model/x2"}
    assert arrays_in(tmp_path / "universal" / stored.directory) == set(stored.tensors)


def write_rule(directory: Path, name: str) -> None:
    rule = f'[[rule]]\nmatch = "w{{number:int}}"\nrename = "{name}{{number}}"\n'
    (directory / "rules.toml").write_text(rule)


def arrays_in(directory: Path) -> set[str]:
    """Return the arrays of the model that have chunks on the disk."""
    return {f"model/{path.parent.name}" for path in directory.rglob("model/*/c.*")}


class Clock(datetime):
    """Each time it is asked, a minute has passed."""

    asked = 0

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        cls.asked += 1
        return datetime(2026, 1, 1, 0, cls.asked, tzinfo=tz)


def test_a_conversion_that_ended_after_its_commit_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaced a document of the committed checkpoint, which was damaged from then on."""
    trained(tmp_path / "a.pt")
    monkeypatch.setattr(conversion, "datetime", Clock)
    end_before(monkeypatch, universal._Notes, "delete", tmp_path)
    StoredCheckpoint.open(open_storage(str(tmp_path / "universal"))).verify()
    convert(tmp_path / "a.pt", tmp_path / "universal")
    StoredCheckpoint.open(open_storage(str(tmp_path / "universal"))).verify()
    left = [path for path in (tmp_path / "universal").rglob("*") if "parts" in path.parts]
    assert not [path.name for path in left if path.name.endswith(("ed.json", "saved-at.json"))]


def test_two_conversions_of_the_same_commit_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower one replaced a document of what the faster one had committed."""
    trained(tmp_path / "a.pt")
    monkeypatch.setattr(conversion, "datetime", Clock)
    commit = universal.commit
    started: list[str] = []

    def overtaken(*arguments: Any) -> None:
        if not started:
            started.append("the other one")
            convert(tmp_path / "a.pt", tmp_path / "universal")
        commit(*arguments)

    monkeypatch.setattr(universal, "commit", overtaken)
    convert(tmp_path / "a.pt", tmp_path / "universal")
    StoredCheckpoint.open(open_storage(str(tmp_path / "universal"))).verify()


def test_a_note_that_another_conversion_has_just_deleted_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two looks at it the other one has committed this attempt, and tidied up."""
    trained(tmp_path / "a.pt")
    monkeypatch.setattr(conversion, "datetime", Clock)
    create, overtaken = FileStorage.create, [""]

    def create_late(storage: FileStorage, name: str, data: bytes) -> None:
        if overtaken and name.endswith("saved-at.json"):
            overtaken.clear()
            convert(tmp_path / "a.pt", tmp_path / "universal")
            raise CheckpointExists("it was there")
        create(storage, name, data)

    monkeypatch.setattr(FileStorage, "create", create_late)
    convert(tmp_path / "a.pt", tmp_path / "universal")
    StoredCheckpoint.open(open_storage(str(tmp_path / "universal"))).verify()


def test_a_removed_conversion_can_be_repeated(tmp_path: Path) -> None:
    """Everything was read and written, and then refused, as often as it was tried."""
    trained(tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "universal")
    url = str(tmp_path / "universal")
    housekeeping.remove(open_storage(url), StoredCheckpoint.open(open_storage(url)).stored, now=1.0)
    convert(tmp_path / "a.pt", tmp_path / "universal")
    StoredCheckpoint.open(open_storage(url)).verify()


def test_a_conversion_that_was_given_up_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "a.pt")
    url = str(tmp_path / "universal")
    end_before(monkeypatch, universal, "commit", tmp_path)
    for hour in (0, 1):
        housekeeping.collect_garbage(open_storage(url), now=1.0 + hour * GRACE_S)
    convert(tmp_path / "a.pt", tmp_path / "universal")
    StoredCheckpoint.open(open_storage(url)).verify()


def test_parts_that_are_checked_keep_garbage_collection_from_giving_them_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(universal, "PART_NBYTES", 20_000)
    trained(tmp_path / "a.pt")
    url, hours = str(tmp_path / "universal"), itertools.count()
    write, check = universal.UniversalParts.write, universal.UniversalParts.check

    def written_slowly(parts: universal.UniversalParts, number: int, report: Any) -> None:
        write(parts, number, report)
        housekeeping.collect_garbage(open_storage(url), now=1.0 + next(hours) * GRACE_S)

    def slowly(parts: universal.UniversalParts, number: int, report: Any) -> None:
        check(parts, number, report)
        housekeeping.collect_garbage(open_storage(url), now=1.0 + next(hours) * GRACE_S)

    end_before(monkeypatch, universal, "commit", tmp_path)
    housekeeping.collect_garbage(open_storage(url), now=0.5)
    monkeypatch.setattr(universal.UniversalParts, "check", slowly)
    monkeypatch.setattr(universal.UniversalParts, "write", written_slowly)
    convert(tmp_path / "a.pt", tmp_path / "universal")
    assert len(list((tmp_path / "universal").glob("*/attempt-*"))) == 1
    StoredCheckpoint.open(open_storage(url)).verify()
