"""`keepstep ckpt` as people and scripts use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from keepstep import checkpoint
from keepstep.checkpoint.stored.format import StoredStep
from keepstep.elastic.cli.main import main


@pytest.fixture
def run7(tmp_path: Path) -> Path:
    """Steps 10 to 50, the third with the best loss."""
    root = tmp_path / "run7"
    for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0), (40, 2.5), (50, 2.6)):
        state = {"large": torch.full((600, 600), float(step)), "small": torch.ones(3), "loss": loss}
        checkpoint.save(str(root), state, step=step)
    return root


def keepstep(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["ckpt", *map(str, arguments)])


def answer(*arguments: object) -> Any:
    done = keepstep(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def steps(root: Path) -> list[int]:
    return [one["step"] for one in answer("ls", root)["checkpoints"]]


def test_ls_and_show_tell_what_is_there(run7: Path) -> None:
    assert steps(run7) == [50, 40, 30, 20, 10]
    newest = answer("ls", run7)["checkpoints"][0]
    on_disk = [path for path in (run7 / StoredStep(50, 0).directory).rglob("*") if path.is_file()]
    assert newest["objects"] == len(on_disk)
    own = sum(path.stat().st_size for path in on_disk if path.name not in ("manifest.json",))
    assert abs(newest["nbytes"] - own) < 1000
    shown = answer("show", run7, "--step", 20, "--documents")
    assert shown["tensors"]["large"] | {"chunk": None, "cell": None} == {
        "dtype": "float32", "shape": [600, 600], "packed": False, "chunk": None, "cell": None,
    }  # fmt: skip
    assert shown["documents"]["values"] == {"loss": 2.0}
    text = keepstep("show", run7).output
    assert "600 x 600" in text
    assert "step 50" in text
    assert "tensors" in keepstep("ls", run7).output


def test_verify_names_the_damaged_one_and_fails(run7: Path) -> None:
    assert keepstep("verify", run7, "--all").exit_code == 0
    bad = run7 / StoredStep(30, 0).directory / "large/c.0.0"
    bad.write_bytes(bad.read_bytes()[:-8] + b"12345678")
    done = keepstep("verify", run7, "--all")
    assert done.exit_code == 1
    assert [
        line.split(":")[0] for line in done.output.splitlines() if not line.endswith("intact")
    ] == [StoredStep(30, 0).directory]


def test_diff_tells_what_changed(run7: Path, tmp_path: Path) -> None:
    assert keepstep("diff", run7, run7).exit_code == 0
    done = keepstep("diff", run7, run7, "--first-step", 10, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {
        "only_first": [], "only_second": [], "changed": {"large": "values"}, "documents": ["values"],
    }  # fmt: skip
    checkpoint.save(str(tmp_path / "other"), {"small": torch.ones(4), "new": torch.ones(1)}, step=1)
    lines = keepstep("diff", run7, tmp_path / "other").output.splitlines()
    assert lines[:3] == ["- large", "+ new", "~ small: float32 [3] -> float32 [4]"]


def test_rm_keeps_what_the_policy_keeps_and_gc_deletes_the_rest_later(run7: Path) -> None:
    policy = ("--keep-last", 1, "--keep-every", 20, "--keep-best", 1, "loss", "min")
    assert answer("rm", run7, *policy, "--dry-run")["removed"] == [StoredStep(10, 0).directory]
    assert steps(run7) == [50, 40, 30, 20, 10]
    assert keepstep("rm", run7, *policy).exit_code == 0
    assert steps(run7) == [50, 40, 30, 20]
    # A reader that has opened it can finish.
    assert (run7 / StoredStep(10, 0).directory / "large/c.0.0").exists()
    assert answer("gc", run7)["deleted"] == []
    assert answer("gc", run7, "--grace", 0)["deleted"] == [StoredStep(10, 0).directory]
    assert not (run7 / StoredStep(10, 0).directory).exists()
    assert keepstep("rm", run7, "--step", 40, "--step", 20, "--pin", 20).exit_code == 0
    assert steps(run7) == [50, 30, 20]


def test_gc_leaves_an_attempt_alone_until_it_has_been_one_for_long(run7: Path) -> None:
    manifest = run7 / StoredStep(50, 0).directory / "manifest.json"
    kept = manifest.read_bytes()
    manifest.unlink()
    assert answer("gc", run7)["deleted"] == []
    assert answer("gc", run7)["deleted"] == []
    # Its writer was only slow.
    manifest.write_bytes(kept)
    assert answer("gc", run7, "--grace", 0)["deleted"] == []
    assert keepstep("verify", run7, "--all").exit_code == 0


def test_cp_copies_whole_checkpoints_only(run7: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    assert (
        answer("cp", run7, f"file://{target}", "--step", 30)["copied"]
        == StoredStep(30, 0).directory
    )
    assert keepstep("diff", run7, target, "--first-step", 30).exit_code == 0
    assert keepstep("verify", target).exit_code == 0
    bad = run7 / StoredStep(40, 0).directory / "packs/000000-0000"
    bad.write_bytes(b"x" * len(bad.read_bytes()))
    done = keepstep("cp", run7, target, "--step", 40)
    assert done.exit_code == 1
    assert "is not what was written" in done.output
    assert steps(target) == [30]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "{nothing}"), "there is no checkpoint"),
        (("show", "{run7}", "--step", "11"), "steps there: 50, 40"),
        (("rm", "{run7}"), "give either --step or --keep-last"),
        (("rm", "{run7}", "--step", "11"), "has no checkpoint of step 11"),
        (
            ("rm", "{run7}", "--keep-last", "1", "--keep-best", "x", "loss", "min"),
            "--keep-best takes a number",
        ),
        (("ls", "ftp://host/x"), "not supported"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_a_status(
    run7: Path, arguments: tuple[str, ...], said: str
) -> None:
    places = {"nothing": f"{run7}/nothing", "run7": str(run7)}
    done = keepstep(*(argument.format(**places) for argument in arguments))
    assert done.exit_code != 0
    assert said in done.output
    assert "Traceback" not in done.output
