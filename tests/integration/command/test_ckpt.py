"""Tests of `keepstep ckpt`, with text and with JSON output."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import crc32c
import pytest
import torch
from click.testing import CliRunner, Result

from keepstep import checkpoint
from keepstep.checkpoint.cli import ckpt as ckpt_module
from keepstep.checkpoint.format.stored.housekeeping import collect_garbage, remove
from keepstep.checkpoint.format.stored.object_names import StoredStep
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import Storage, open_storage
from keepstep.elastic.cli.main import main


@pytest.fixture
def run7(tmp_path: Path) -> Path:
    """A URL with steps 10 to 50; the third has the best loss."""
    root = tmp_path / "run7"
    for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0), (40, 2.5), (50, 2.6)):
        state = {"large": torch.full((600, 600), float(step)), "small": torch.ones(3), "loss": loss}
        checkpoint.save(str(root), state, step=step)
    return root


def keepstep(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["ckpt", *map(str, arguments)])


def json_of(*arguments: object) -> Any:
    done = keepstep(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def directory_of(root: Path, step: int) -> str:
    return str(json_of("show", root, "--step", step)["directory"])


def steps(root: Path) -> list[int]:
    return [stored["step"] for stored in json_of("ls", root)["checkpoints"]]


def test_ls_lists_checkpoints_and_show_shows_one(run7: Path) -> None:
    assert steps(run7) == [50, 40, 30, 20, 10]
    newest = json_of("ls", run7)["checkpoints"][0]
    on_disk = [path for path in (run7 / StoredStep(50, 0).directory).rglob("*") if path.is_file()]
    assert newest["objects"] == len(on_disk)
    nbytes = sum(path.stat().st_size for path in on_disk if path.name != "manifest.json")
    assert abs(newest["nbytes"] - nbytes) < 1000
    shown = json_of("show", run7, "--step", 20, "--documents")
    assert shown["tensors"]["large"] | {"chunk": None, "cell": None} == {
        "dtype": "float32", "shape": [600, 600], "packed": False, "compression": None,
        "chunk": None, "cell": None,
    }  # fmt: skip
    assert shown["documents"]["values"] == {"loss": 2.0}
    text = keepstep("show", run7).output
    assert "600 x 600" in text
    assert "step 50" in text
    assert "tensors" in keepstep("ls", run7).output


def test_listing_nothing_fails_in_json_too(tmp_path: Path) -> None:
    done = keepstep("ls", tmp_path, "--json")
    assert (done.exit_code, json.loads(done.stdout)["checkpoints"]) == (1, [])


def test_verify_names_the_damaged_checkpoint_and_fails(run7: Path) -> None:
    assert keepstep("verify", run7, "--all").exit_code == 0
    bad = run7 / directory_of(run7, 30) / "large/c.0.0"
    bad.write_bytes(bad.read_bytes()[:-8] + b"12345678")
    done = keepstep("verify", run7, "--all")
    assert done.exit_code == 1
    assert [
        line.split(":")[0] for line in done.output.splitlines() if not line.endswith("intact")
    ] == [StoredStep(30, 0).directory]


def test_a_checkpoint_of_a_newer_release_is_listed_as_such_next_to_the_others(run7: Path) -> None:
    manifest = run7 / StoredStep(30, 0).directory / "manifest.json"
    manifest.write_text(json.dumps({"format": 99}))
    listed = json_of("ls", run7)
    assert [stored["step"] for stored in listed["checkpoints"]] == [50, 40, 20, 10]
    assert (list(listed["too_new"]), listed["damaged"]) == ([StoredStep(30, 0).directory], {})
    assert "too new" in keepstep("ls", run7).output
    done = keepstep("verify", run7, "--all")
    assert done.exit_code == 1
    assert done.output.count("intact") == 4


def test_a_checkpoint_that_is_removed_after_it_was_listed_is_skipped(
    run7: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_then_remove(storage: Storage) -> tuple[StoredStep, ...]:
        listed = list_steps(storage)
        remove(storage, listed[1], now=0.0)
        return listed

    monkeypatch.setattr(ckpt_module, "list_steps", list_then_remove)
    assert steps(run7) == [50, 30, 20, 10]
    verified = json_of("verify", run7, "--all")["checkpoints"]
    assert verified == {StoredStep(step, 0).directory: None for step in (50, 20, 10)}
    lines = keepstep("ls", run7).output.splitlines()
    assert [line.split()[0] for line in lines if "kB" in line or "MB" in line] == ["50", "10"]


def test_a_checkpoint_that_is_removed_while_it_is_verified_is_not_damaged(
    run7: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = StoredCheckpoint.verify

    def remove_then_verify(source: StoredCheckpoint, *arguments: Any) -> None:
        if source.step == 30:
            remove(open_storage(str(run7)), source.stored, now=0.0)
            assert collect_garbage(open_storage(str(run7)), now=0.0, grace_s=0) == (
                source.directory,
            )
        verify(source, *arguments)

    monkeypatch.setattr(StoredCheckpoint, "verify", remove_then_verify)
    verified = json_of("verify", run7, "--all")["checkpoints"]
    assert verified == {StoredStep(step, 0).directory: None for step in (50, 40, 20, 10)}
    assert keepstep("verify", run7, "--step", 30).exit_code == 1


def test_diff_lists_the_changes(run7: Path, tmp_path: Path) -> None:
    assert keepstep("diff", run7, run7).exit_code == 0
    done = keepstep("diff", run7, run7, "--first-step", 10, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {
        "only_first": [],
        "only_second": [],
        "changed": {"large": "values: 360,000 of 360,000, by up to 40"},
        "documents": ["values"],
    }
    checkpoint.save(str(tmp_path / "other"), {"small": torch.ones(4), "new": torch.ones(1)}, step=1)
    lines = keepstep("diff", run7, tmp_path / "other").output.splitlines()
    assert lines[:3] == ["- large", "+ new", "~ small: float32 [3] -> float32 [4]"]


def test_diff_says_that_checkpoints_are_equal_and_how_much_they_are_not(tmp_path: Path) -> None:
    values = {
        "bfloat16": torch.arange(6).bfloat16(), "int64": torch.arange(6),
        "bool": torch.zeros(6, dtype=torch.bool), "nan": torch.zeros(6),
    }  # fmt: skip
    checkpoint.save(str(tmp_path / "a"), values, step=1)
    assert keepstep("diff", tmp_path / "a", tmp_path / "a").output.startswith("equal: tensors, 4")
    values["bfloat16"][2] = 4
    values["int64"][3:] += 5
    values["bool"][0] = True
    values["nan"][1:3] = torch.tensor([torch.nan, -2.5])
    checkpoint.save(str(tmp_path / "b"), values, step=1)
    done = keepstep("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert json.loads(done.stdout)["changed"] == {
        "bfloat16": "values: 1 of 6, by up to 2",
        "int64": "values: 3 of 6, by up to 5",
        "bool": "values: 1 of 6, by up to 1",
        "nan": "values: 2 of 6, by up to 2.5, some are or were NaN",
    }
    output = keepstep("diff", tmp_path / "a", tmp_path / "b").output
    assert output.splitlines()[-1].endswith("4 changed; 4 and 4 in all")


def test_ls_tells_when_a_checkpoint_was_saved_and_its_loss(run7: Path) -> None:
    listed = json_of("ls", run7)["checkpoints"]
    assert listed[0]["loss"] == 2.6
    assert abs(time.time() - datetime.fromisoformat(listed[0]["saved_at"]).timestamp()) < 3600
    header = keepstep("ls", run7).output.split()
    assert header[:5] == ["step", "generation", "saved", "at", "loss"]


def test_ls_says_what_is_where_no_checkpoint_is(tmp_path: Path) -> None:
    assert "no such file or folder" in keepstep("ls", tmp_path / "nothing").output
    (tmp_path / "notes.txt").write_text("none")
    (tmp_path / "more.txt").write_text("none")
    assert "2 files of no known format: more.txt, notes.txt" in keepstep("ls", tmp_path).output
    torch.save({"state_dict": {"w": torch.ones(2)}}, tmp_path / "last.ckpt")
    output = keepstep("ls", tmp_path).output
    assert f"as in {tmp_path}/last.ckpt" in "".join(output.splitlines())


def test_gc_says_what_it_has_done(run7: Path) -> None:
    assert "deleted 0; 5 checkpoints stay" in keepstep("gc", run7).output
    keepstep("rm", run7, "--keep-last", 3)
    assert "deleted 2; 3 checkpoints stay" in keepstep("gc", run7, "--grace", 0).output


def test_show_tells_which_tensors_are_compressed(tmp_path: Path) -> None:
    state = {"large": torch.ones(600, 600), "small": torch.ones(3)}
    checkpoint.save(str(tmp_path), state, step=1, compression="zstd")
    shown = json_of("show", tmp_path)["tensors"]
    assert {key: tensor["compression"] for key, tensor in shown.items()} == {
        "large": "zstd", "small": None
    }  # fmt: skip
    lines = keepstep("show", tmp_path).output.splitlines()
    assert ["zstd" in line for line in lines if "float32" in line] == [True, False]
    assert keepstep("verify", tmp_path).exit_code == 0


def test_a_nan_is_shown_as_json_and_equals_itself(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path), {"x": torch.ones(1), "loss": float("nan")}, step=1)
    shown = keepstep("show", tmp_path, "--documents", "--json").stdout
    assert json.loads(shown, parse_constant=pytest.fail)["documents"]["values"] == {
        "loss": {"__float__": "NaN"}
    }
    assert keepstep("show", tmp_path, "--documents").exit_code == 0
    assert keepstep("diff", tmp_path, tmp_path).exit_code == 0


def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    root = tmp_path / "[" / "bold]"
    state = {"[red]gone": torch.ones(1), "x[": {"bold]x": torch.ones(1)}}
    assert "no checkpoint at" in keepstep("ls", root).output
    checkpoint.save(str(root), state, step=1)
    done = keepstep("show", root, "--documents")
    assert done.exit_code == 0, done.output
    for name in ("[red]gone", "x[/bold]x"):
        assert name in done.output


def test_escapes_in_names_never_reach_the_terminal(tmp_path: Path) -> None:
    url, other = str(tmp_path / "a"), str(tmp_path / "b")
    checkpoint.save(url, {"x": torch.ones(1)}, step=1)
    checkpoint.save(other, {"x": torch.ones(1)}, step=1)
    opened = StoredCheckpoint.open(open_storage(other))
    root = tmp_path / "b" / opened.directory
    documents = json.dumps({"values": {}, "\x1b[2J\x07evil": 1}).encode()
    (root / "documents.json").write_bytes(documents)
    objects = tuple(
        replace(item, nbytes=len(documents), crc32c=crc32c.crc32c(documents))
        if item.name == "documents.json"
        else item
        for item in opened.manifest.objects
    )
    manifest = replace(opened.manifest, objects=objects)
    (tmp_path / "b" / opened.stored.directory / "manifest.json").write_bytes(manifest.encode())
    done = keepstep("diff", url, other)
    assert done.output.splitlines()[:-1] == ["~ document \\x1b[2J\\x07evil"]


def test_rm_removes_by_policy_and_gc_deletes_the_data_later(run7: Path) -> None:
    removed = directory_of(run7, 10)
    policy = ("--keep-last", 1, "--keep-every", 20, "--keep-best", 1, "loss", "min")
    assert json_of("rm", run7, *policy, "--dry-run")["removed"] == [StoredStep(10, 0).directory]
    assert steps(run7) == [50, 40, 30, 20, 10]
    assert keepstep("rm", run7, *policy).exit_code == 0
    assert steps(run7) == [50, 40, 30, 20]
    # A reader that has opened the checkpoint can finish.
    assert (run7 / removed / "large/c.0.0").exists()
    assert json_of("gc", run7)["deleted"] == []
    assert json_of("gc", run7, "--grace", 0)["deleted"] == [removed]
    assert not (run7 / StoredStep(10, 0).directory).exists()
    assert keepstep("rm", run7, "--step", 40, "--step", 20, "--pin", 20).exit_code == 0
    assert steps(run7) == [50, 30, 20]


def test_rm_refuses_to_keep_the_best_of_values_that_too_few_checkpoints_have(
    run7: Path,
) -> None:
    checkpoint.save(str(run7), {"small": torch.ones(3), "accuracy": 0.5}, step=60)
    policy = ("--keep-last", 1, "--keep-best")
    refused = keepstep("rm", run7, *policy, 2, "accuracy", "max")
    assert refused.exit_code != 0
    assert "numbers there: accuracy, loss" in " ".join(refused.output.split())
    assert steps(run7) == [60, 50, 40, 30, 20, 10]
    # All that have one are kept, as asked.
    assert keepstep("rm", run7, *policy, 9, "loss", "min", "--dry-run").exit_code != 0
    assert keepstep("rm", run7, *policy, 5, "loss", "min").exit_code == 0
    assert steps(run7) == [60, 50, 40, 30, 20, 10]
    assert keepstep("rm", run7, *policy, 1, "loss", "min").exit_code == 0
    assert steps(run7) == [60, 30]


@pytest.mark.parametrize("policy", [("--keep-last", 0), ("--keep-last", 1, "--keep-every", 0)])
def test_rm_refuses_to_keep_no_checkpoint(run7: Path, policy: tuple[object, ...]) -> None:
    refused = keepstep("rm", run7, *policy)
    assert (refused.exit_code, "0 is not in the range x>=1" in refused.output) == (2, True)
    assert steps(run7) == [50, 40, 30, 20, 10]


@pytest.mark.parametrize("command", [("rm", "--keep-last", 1), ("rm", "--step", 1), ("gc",)])
def test_rm_and_gc_of_a_url_without_checkpoints_fail(
    tmp_path: Path, command: tuple[object, ...]
) -> None:
    failed = keepstep(command[0], tmp_path / "mistyped", *command[1:])
    assert failed.exit_code == 1
    assert "there is no such file or folder" in " ".join(failed.output.split())


def test_gc_deletes_an_uncommitted_directory_only_after_the_grace_time(run7: Path) -> None:
    manifest = run7 / StoredStep(50, 0).directory / "manifest.json"
    content = manifest.read_bytes()
    manifest.unlink()
    assert json_of("gc", run7)["deleted"] == []
    assert json_of("gc", run7)["deleted"] == []
    # The slow writer commits now.
    manifest.write_bytes(content)
    assert json_of("gc", run7, "--grace", 0)["deleted"] == []
    assert keepstep("verify", run7, "--all").exit_code == 0


def test_cp_copies_a_checkpoint_completely_or_fails(run7: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    assert (
        json_of("cp", run7, f"file://{target}", "--step", 30)["copied"]
        == StoredStep(30, 0).directory
    )
    assert keepstep("diff", run7, target, "--first-step", 30).exit_code == 0
    assert keepstep("verify", target).exit_code == 0
    bad = run7 / directory_of(run7, 40) / "packs/000000-0000"
    bad.write_bytes(b"x" * len(bad.read_bytes()))
    done = keepstep("cp", run7, target, "--step", 40)
    assert done.exit_code == 1
    assert "is not what was written" in done.output
    assert steps(target) == [30]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "{nothing}"), "there is no checkpoint"),
        (("ls", "{nothing}"), "there is no checkpoint at"),
        (("verify", "{nothing}", "--all"), "there is no checkpoint"),
        (("show", "{run7}", "--step", "11"), "steps there: 50, 40"),
        (("rm", "{run7}"), "give either --step or --keep-last"),
        (("rm", "{run7}", "--step", "11"), "has no checkpoint of step 11"),
        (
            ("rm", "{run7}", "--keep-last", "1", "--keep-best", "x", "loss", "min"),
            "--keep-best takes a number",
        ),
        (
            ("rm", "{run7}", "--keep-last", "1", "--keep-best", "1", "eval_loss", "min"),
            "0 of 5 checkpoints have a number called 'eval_loss'",
        ),
        (
            ("rm", "{run7}", "--keep-last", "1", "--keep-best", "1", "small", "min"),
            "numbers there: loss",
        ),
        (("ls", "nonsense://host/x"), "not supported"),
    ],
)
def test_an_error_is_one_line_and_a_nonzero_status(
    run7: Path, arguments: tuple[str, ...], message: str
) -> None:
    places = {"nothing": f"{run7}/nothing", "run7": str(run7)}
    done = keepstep(*(argument.format(**places) for argument in arguments))
    assert done.exit_code != 0
    assert message in done.output
    assert "Traceback" not in done.output
