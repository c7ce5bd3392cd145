"""Tests of `keepstep ckpt` on other tools' checkpoints: listed, shown, verified, compared."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from keepstep import checkpoint
from keepstep.checkpoint.cli import other_formats
from keepstep.checkpoint.format.layout.location import Location
from keepstep.elastic.cli.main import main

DEEPSPEED = Path(__file__).parents[2] / "foreign_fixtures" / "deepspeed"
WEIGHTS = torch.arange(4000, dtype=torch.float32).reshape(40, 100)


def keepstep(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["ckpt", *map(str, arguments)])


def json_of(*arguments: object, status: int = 0) -> Any:
    done = keepstep(*arguments, "--json")
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)


def state() -> dict[str, Any]:
    return {"model": {"w": WEIGHTS.clone(), "b": torch.ones(3)}, "step": 7}


def torch_file(root: Path) -> Path:
    torch.save(state(), root / "a.pt")
    return root / "a.pt"


def safetensors_file(root: Path) -> Path:
    save_file(state()["model"], root / "a.safetensors")
    return root / "a.safetensors"


def dcp_folder(root: Path) -> Path:
    dcp.save(state(), checkpoint_id=root / "dcp", no_dist=True)
    return root / "dcp"


def deepspeed_folder(root: Path) -> Path:
    return DEEPSPEED / "zero2_bf16_2"


@pytest.mark.parametrize(
    ("make", "form", "step"),
    [
        (torch_file, "torch", 7),
        (safetensors_file, "safetensors", 0),
        (dcp_folder, "dcp", 7),
        (deepspeed_folder, "deepspeed", 3),
    ],
)
def test_checkpoints_of_other_tools_are_listed_shown_and_verified(
    tmp_path: Path, make: Callable[[Path], Path], form: str, step: int
) -> None:
    path = make(tmp_path)
    (listed,) = json_of("ls", path)["checkpoints"]
    assert (listed["format"], listed["step"]) == (form, step)
    for url in (path, f"{form}:{path}"):
        shown = json_of("show", url, "--documents")
        skipped = {
            "deepspeed": ["expected.pt: it is next to the checkpoint's directory, not in it"]
        }
        assert (shown["format"], shown["step"]) == (form, step)
        assert shown["left_out"] == skipped.get(form, [])
        assert len(shown["tensors"]) == listed["tensors"]
    if form != "deepspeed":
        weight = {"dtype": "float32", "shape": [40, 100], "pieces": 1}
        assert shown["tensors"]["model/w"] == weight
    verified = json_of("verify", path, "--from", form)
    (checked,) = verified["checked"].values()
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    # A folder of DeepSpeed has its pointer next to it, and the fixture what it should hold.
    of_checkpoint = [f for f in files if f.name not in ("latest", "expected.pt")]
    assert checked["nbytes"] == sum(file.stat().st_size for file in of_checkpoint)
    assert (checked["checked_nbytes"] > 0) == (form != "safetensors")
    text = keepstep("show", path).output
    assert "float32" in text
    assert f"step {step}" in text
    assert form in keepstep("ls", path).output
    assert "no damage found" in keepstep("verify", path).output


def flip(path: Path, content: bytes) -> None:
    """Change a bit of these bytes in a file."""
    data = path.read_bytes()
    at = data.index(content)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


@pytest.mark.parametrize(
    ("make", "file_name"), [(torch_file, "a.pt"), (dcp_folder, "__0_0.distcp")]
)
def test_verify_finds_a_changed_bit_where_there_are_checksums(
    tmp_path: Path, make: Callable[[Path], Path], file_name: str
) -> None:
    path = make(tmp_path)
    flip(path if path.is_file() else path / file_name, WEIGHTS[7].numpy().tobytes())
    (error,) = json_of("verify", path, status=1)["checkpoints"].values()
    assert file_name in error
    assert "do not match their checksum" in error


@pytest.mark.parametrize(
    ("make", "file_name"), [(torch_file, "a.pt"), (dcp_folder, "__0_0.distcp")]
)
@pytest.mark.parametrize("target", ["run", "b.safetensors"])
def test_conversion_of_a_changed_bit_is_refused_by_its_entry_before_anything_is_written(
    tmp_path: Path, make: Callable[[Path], Path], file_name: str, target: str
) -> None:
    path = make(tmp_path)
    flip(path if path.is_file() else path / file_name, WEIGHTS[7].numpy().tobytes())
    done = keepstep("convert", path, tmp_path / "written" / target)
    assert done.exit_code == 1
    assert re.search(rf"{file_name}: the 16000 bytes of \S+/data/\d do not match", done.output)
    assert not (tmp_path / "written").exists()


def test_part_that_is_not_converted_may_be_damaged(tmp_path: Path) -> None:
    slots = {"momentum": WEIGHTS + 0.5}
    torch.save({"model": {"w": WEIGHTS}, "ema": slots}, tmp_path / "a.pt")
    flip(tmp_path / "a.pt", slots["momentum"][7].numpy().tobytes())
    assert keepstep("convert", tmp_path / "a.pt", tmp_path / "whole").exit_code == 1
    converted = json_of("convert", tmp_path / "a.pt", tmp_path / "model", "--only", "model")
    assert (converted["checked_nbytes"], converted["unchecked_nbytes"]) == (WEIGHTS.nbytes, 0)


def test_conversion_of_trusted_code_compares_checksums_before_it_runs(tmp_path: Path) -> None:
    flip(torch_file(tmp_path), WEIGHTS[7].numpy().tobytes())
    done = keepstep("convert", tmp_path / "a.pt", tmp_path / "b", "--trust")
    assert done.exit_code == 1
    assert "do not match their checksum" in done.output


def test_damage_to_numbers_and_to_the_pickle_is_found_when_a_file_is_opened(tmp_path: Path) -> None:
    value = {"model": {"w": WEIGHTS}, "step": torch.tensor(1234567), "note": "as it was"}
    for content in (value["step"].numpy().tobytes(), b"as it was"):
        torch.save(value, tmp_path / "a.pt")
        flip(tmp_path / "a.pt", content)
        shown = keepstep("show", tmp_path / "a.pt")
        assert shown.exit_code == 1
        assert "do not match their checksum" in shown.output


@pytest.mark.parametrize("kind", ["safetensors", "Orbax", "not computed", "before 1.6"])
def test_conversion_says_how_much_has_no_checksum(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.pt"
    if kind == "safetensors":
        path = safetensors_file(tmp_path)
    elif kind == "Orbax":
        path = DEEPSPEED.parent / "orbax" / "ocdbt"
    elif kind == "before 1.6":
        torch.save(state(), path, _use_new_zipfile_serialization=False)
    else:
        torch.serialization.set_crc32_options(False)
        try:
            torch_file(tmp_path)
        finally:
            torch.serialization.set_crc32_options(True)
    done = keepstep("convert", path, tmp_path / "run")
    assert done.exit_code == 0
    nbytes = "14.2 kB" if kind == "Orbax" else "16.0 kB"
    assert f"{nbytes} of the tensors in {path} have no checksums" in done.output


def test_verify_says_what_has_no_checksum(tmp_path: Path) -> None:
    path = safetensors_file(tmp_path)
    flip(path, WEIGHTS[7].numpy().tobytes())
    (checked,) = json_of("verify", path)["checked"].values()
    assert (checked["nbytes"], checked["checked_nbytes"]) == (path.stat().st_size, 0)
    path.write_bytes(path.read_bytes()[:-1])
    assert keepstep("verify", path).exit_code == 1


def test_checksums_that_were_not_computed_are_not_compared(tmp_path: Path) -> None:
    assert keepstep("convert", torch_file(tmp_path), tmp_path / "b.pt").exit_code == 0
    (checked,) = json_of("verify", tmp_path / "b.pt")["checked"].values()
    assert 0 < checked["checked_nbytes"] < checked["nbytes"] - WEIGHTS.nbytes


def test_all_checkpoints_of_a_folder_are_listed_and_verified(tmp_path: Path) -> None:
    trainer_folders(tmp_path, 5, 10)
    listed = json_of("ls", tmp_path)["checkpoints"]
    assert [(each["directory"], each["step"]) for each in listed] == [
        ("checkpoint-10/", 10), ("checkpoint-5/", 5)
    ]  # fmt: skip
    assert set(json_of("verify", tmp_path)["checkpoints"]) == {"checkpoint-10"}
    (tmp_path / "checkpoint-5" / "model.safetensors").write_bytes(b"\x10")
    assert list(json_of("ls", tmp_path)["damaged"]) == ["checkpoint-5"]
    results = json_of("verify", tmp_path, "--all", status=1)["checkpoints"]
    assert [name for name, error in results.items() if error] == ["checkpoint-5"]


def trainer_folders(root: Path, *steps: int) -> list[Path]:
    folders = [root / f"checkpoint-{step}" for step in steps]
    for folder, step in zip(folders, steps, strict=True):
        folder.mkdir()
        save_file({"w": torch.full((3,), float(step))}, folder / "model.safetensors")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folders


def test_what_cannot_be_read_or_lacks_a_file_does_not_end_the_verification_of_the_others(
    tmp_path: Path,
) -> None:
    unsupported, _, incomplete = trainer_folders(tmp_path, 15, 10, 5)
    for folder in (unsupported, incomplete):
        (folder / "model.safetensors").unlink()
    (unsupported / "pytorch_model.bin").write_bytes(b"no file of torch.save")
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (incomplete / "model.safetensors.index.json").write_text(json.dumps(index))
    verified = json_of("verify", tmp_path, "--all", status=1)
    assert verified["checkpoints"].keys() == {"checkpoint-10", "checkpoint-5"}
    assert verified["checkpoints"]["checkpoint-10"] is None
    assert "copy all of its files" in verified["checkpoints"]["checkpoint-5"]
    assert list(verified["unsupported"]) == ["checkpoint-15"]
    listed = json_of("ls", tmp_path)
    assert [each["directory"] for each in listed["checkpoints"]] == ["checkpoint-10/"]
    assert list(listed["unsupported"]) == ["checkpoint-15"]
    assert list(listed["damaged"]) == ["checkpoint-5"]
    assert "checkpoint-15: not read: " in keepstep("verify", tmp_path, "--all").output


def test_a_folder_that_is_removed_after_it_was_listed_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = trainer_folders(tmp_path, 10, 5)

    def all_foreign(url: str) -> tuple[Location, ...]:
        found = original(url)
        shutil.rmtree(tmp_path / found[-1].directory)
        return found

    original = other_formats.all_foreign
    monkeypatch.setattr(other_formats, "all_foreign", all_foreign)
    verified = json_of("verify", tmp_path, "--all")
    assert verified["checkpoints"] == {first.name: None}
    assert not second.exists()
    # The one that is left is now removed before it is opened.
    listed = json_of("ls", tmp_path, status=1)
    assert listed == {"checkpoints": [], "damaged": {}, "unsupported": {}}


def test_diff_compares_different_formats_by_values(tmp_path: Path) -> None:
    path = torch_file(tmp_path)
    assert keepstep("convert", path, tmp_path / "run").exit_code == 0
    assert keepstep("diff", path, tmp_path / "run").exit_code == 0
    assert keepstep("diff", f"dcp:{dcp_folder(tmp_path)}", tmp_path / "run").exit_code == 0
    assert keepstep("diff", DEEPSPEED / "zero2_bf16_2", DEEPSPEED / "zero2_bf16_2_universal"
                    ).exit_code == 0  # fmt: skip
    flip(path, WEIGHTS[7].numpy().tobytes())
    difference = json_of("diff", path, tmp_path / "run", status=1)
    assert difference == {
        "only_first": [], "only_second": [], "documents": [],
        "changed": {"model/w": "values: 1 of 4,000, by up to 6.1e-05"},
    }  # fmt: skip


def test_diff_sees_tied_names_and_follows_rules(tmp_path: Path) -> None:
    tied = {"old.w": WEIGHTS, "old.head": WEIGHTS}
    torch.save(tied, tmp_path / "a.pt")
    save_file({"new.w": WEIGHTS, "new.head": WEIGHTS.clone()}, tmp_path / "b.safetensors")
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nmatch = "old.{rest...}"\nrename = "new.{rest...}"\n')
    difference = json_of(
        "diff", tmp_path / "a.pt", tmp_path / "b.safetensors", "--rules", rules, status=1
    )
    assert difference == {
        "only_first": [], "only_second": [], "changed": {}, "documents": ["model/tied"]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "torch:{path}", "--from", "dcp"), "given as torch and as dcp"),
        (("show", "{path}", "--step", "3"), "URL of the step itself"),
        (("verify", "{path}", "--content"), "no other tool's checkpoint has a digest"),
        (("ls", "megatron-lm:{path}"), "readable checkpoint"),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    path = safetensors_file(tmp_path)
    done = keepstep(*(argument.format(path=path) for argument in arguments))
    assert done.exit_code != 0
    assert message in done.output.replace("\n", " ")


def test_what_a_conversion_leaves_out_of_a_part_is_one_line(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    run = tmp_path / "run"
    checkpoint.save(str(run), {"model": model, "optimizer": optimizer}, step=1)
    done = keepstep("convert", run, tmp_path / "hf", "--to", "huggingface", "--only", "model")
    assert done.exit_code == 0, done.output
    left_out = [line for line in done.output.splitlines() if line.startswith("left out")]
    assert len(left_out) < 6, left_out
    assert "has no config.json" in done.output
    listed = json_of("convert", run, tmp_path / "other", "--to", "huggingface", "--only", "model")
    count = sum(line.startswith("optim/") for line in listed["left_out"])
    assert count >= 120
    assert f"left out: optim/...: {count} names, which --json lists: only the model" in done.output


def test_a_folder_of_hugging_face_keeps_its_configuration_and_tokenizer(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    save_file({"w": torch.ones(2)}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "llama"}')
    for name in ("tokenizer.json", "merges.txt", "training.log"):
        (source / name).write_bytes(f"{name} \xff".encode("latin-1"))
    done = keepstep("convert", source, target, "--to", "huggingface")
    assert done.exit_code == 0, done.output
    assert "config.json" not in done.output
    assert [line for line in done.output.splitlines() if line.startswith("left out")] == [
        "left out: training.log: this file has no weights that the index names"
    ]
    for name in ("tokenizer.json", "merges.txt"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert not (target / "training.log").exists()
