"""Conversions by several processes: what one writes, stopped by an error, taken up again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint.cli.ckpt import ckpt
from keepstep.checkpoint.convert.write import universal
from keepstep.checkpoint.format.stored.object_names import MANIFEST, part_name
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage


def convert(*arguments: str | Path) -> Result:
    return CliRunner().invoke(ckpt, ["convert", *map(str, arguments)])


def source(root: Path) -> Path:
    """A checkpoint of keepstep's, in which each tensor has a file of its own."""
    weights = {f"w{number}": torch.full((700, 500), float(number)) for number in range(6)}
    checkpoint.save(str(root / "source"), {"model": weights}, step=4)
    return root / "source"


def test_two_processes_write_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(universal, "PART_NBYTES", 1_500_000)
    url = source(tmp_path)
    done = convert(url, tmp_path / "a", "--workers", "2", "--rules", rules(tmp_path))
    assert done.exit_code == 0, done.output
    done = convert(url, tmp_path / "b", "--rules", rules(tmp_path))
    assert done.exit_code == 0, done.output
    written = {
        name: StoredCheckpoint.open(open_storage(str(tmp_path / name))).documents["saved/digest"]
        for name in "ab"
    }
    assert written["a"] == written["b"]
    loaded = {"x3": torch.zeros(700, 500)}
    checkpoint.load(str(tmp_path / "a"), {"model": loaded}, strict=False)
    assert (loaded["x3"] == 3).all()


def rules(root: Path) -> Path:
    path = root / "rules.toml"
    path.write_text('[[rule]]\nmatch = "w{number:int}"\nrename = "x{number}"\n')
    return path


def test_the_error_of_one_process_ends_all_and_the_rest_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(universal, "PART_NBYTES", 1_500_000)
    url = source(tmp_path)
    (path,) = url.rglob("w5/c.0.0")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = convert(url, tmp_path / "a", "--workers", "2")
    assert done.exit_code == 1
    assert "w5" in str(done.exception)
    assert isinstance(done.exception, checkpoint.CheckpointDamaged)
    assert not list((tmp_path / "a").rglob(MANIFEST))
    # What is noted is kept; beside it may be what was being written when the process was ended.
    noted = [int(path.name[:6]) for path in (tmp_path / "a").rglob("*-converted.json")]
    listings = [next((tmp_path / "a").rglob(part_name(number))) for number in noted]
    kept = {listing: listing.stat().st_ino for listing in listings}
    path.write_bytes(content)
    done = convert(url, tmp_path / "a", "--workers", "2", "--json")
    assert done.exit_code == 0, done.output
    assert {p: p.stat().st_ino for p in kept} == kept
    assert kept
    assert json.loads(done.stdout)["tensors"] == 6
    assert StoredCheckpoint.open(open_storage(str(tmp_path / "a"))).step == 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--memory", "300MiB"), "2 processes need 384 MiB"),
        (("--to", "safetensors"), "--workers above 1 is for --to keepstep, not for safetensors"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(
    tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    done = convert(tmp_path / "a.pt", tmp_path / "b", "--workers", "2", *more)
    assert message in f"{done.exception} {done.output}"
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize(
    ("wrapper", "keeps"),
    [("module.", False), ("_orig_mod.", False), ("module._orig_mod.", False), ("module.", True)],
)
def test_names_of_wrappers_are_taken_off_and_may_be_kept(
    tmp_path: Path, wrapper: str, keeps: bool
) -> None:
    model = nn.Linear(2, 3)
    parameters = [(f"{wrapper}{name}", value) for name, value in model.named_parameters()]
    optimizer = torch.optim.AdamW(parameters)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {
        "model": {name: value.data for name, value in parameters},
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, tmp_path / "a.pt")
    more = ["--keep-wrapper-names"] if keeps else []
    done = convert(tmp_path / "a.pt", tmp_path / "b.pt", *more)
    assert done.exit_code == 0, done.output
    assert ("names of wrappers off 8 tensors" in done.output) == (not keeps)
    written = torch.load(tmp_path / "b.pt", weights_only=True)
    prefix = wrapper if keeps else ""
    assert set(written["model"]) == {f"{prefix}weight", f"{prefix}bias"}
    assert written["optimizer"]["param_groups"][0]["param_names"] == [
        f"{prefix}weight", f"{prefix}bias"
    ]  # fmt: skip


def test_a_model_with_a_part_named_module_keeps_its_names(tmp_path: Path) -> None:
    torch.save({"module.w": torch.ones(2), "head": torch.ones(1)}, tmp_path / "a.pt")
    assert convert(tmp_path / "a.pt", tmp_path / "b.pt", "--only", "model").exit_code == 0
    assert set(torch.load(tmp_path / "b.pt", weights_only=True)) == {"module.w", "head"}
