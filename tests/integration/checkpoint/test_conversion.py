"""Conversions of real files: what comes out is what went in, or is left out by name."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import boto3
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint.cli.ckpt import ckpt
from keepstep.checkpoint.convert.write import (
    file_target,
    planned_folder,
    safetensors_target,
    universal,
)
from keepstep.checkpoint.convert.write.planned_folder import PlannedFile, write_folder
from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointExists,
    LayoutMismatch,
    RulesInvalid,
)
from keepstep.checkpoint.format.stored.files import FileStorage
from keepstep.checkpoint.format.stored.object_names import MANIFEST, pack_name
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.format.stored.writer import write_part
from tests.integration.checkpoint.converting import (
    Model,
    assert_equal,
    convert,
    optimizer_of,
    train,
    trained,
)


def test_training_goes_on_from_a_converted_file_as_if_nothing_had_happened(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "a.pt")
    printed = convert(tmp_path / "a.pt", tmp_path / "universal")
    assert (printed["step"], printed["left_out"]) == (3, [])
    other = Model()
    other_optimizer = optimizer_of(other)
    restored = checkpoint.load(
        str(tmp_path / "universal"), {"model": other, "optimizer": other_optimizer}
    )
    assert restored == 3
    assert train(other, other_optimizer, 4) == train(model, optimizer, 4)


def test_a_file_comes_back_bit_for_bit(tmp_path: Path) -> None:
    trained(tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "universal")
    convert(tmp_path / "universal", tmp_path / "b.pt")
    before = torch.load(tmp_path / "a.pt", weights_only=True)
    after = torch.load(tmp_path / "b.pt", weights_only=True)
    assert_equal(dict(after), before | {"model": dict(before["model"])})
    model = after["model"]
    assert model["head.weight"].data_ptr() == model["embedding.weight"].data_ptr()


def test_a_model_becomes_safetensors_and_what_is_lost_is_named(tmp_path: Path) -> None:
    model, _ = trained(tmp_path / "a.pt")
    printed = convert(tmp_path / "a.pt", tmp_path / "m.safetensors", "--dtype", "bf16")
    written = load_file(tmp_path / "m.safetensors")
    expected = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in model.state_dict().items()
        if name != "head.weight"
    }
    assert_equal(written, expected)
    lost = [line.partition(":")[0] for line in printed["left_out"]]
    assert "model/head.weight" in lost
    assert {"optim/groups", "values", "optim/embedding.weight/exp_avg"} <= set(lost)


def test_a_folder_of_several_files_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_target, "SHARD_NBYTES", 10_000)
    trained(tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "folder", "--to", "huggingface")
    index = json.loads((tmp_path / "folder" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    convert(tmp_path / "folder", tmp_path / "b.pt", "--only", "model")
    before = torch.load(tmp_path / "a.pt", weights_only=True)["model"]
    del before["head.weight"]
    assert_equal(dict(torch.load(tmp_path / "b.pt", weights_only=True)), dict(before))


@pytest.mark.parametrize("target", ["deepspeed-universal", "keepstep"])
def test_names_of_wrappers_hide_no_path_out_of_the_target(tmp_path: Path, target: str) -> None:
    """Without them such a name led anywhere that the user may write to."""
    source = tmp_path / "from"
    source.mkdir()
    trained(source / "a.pt")
    hostile = torch.load(source / "a.pt", weights_only=True)
    up = "._orig_mod../"
    hostile["model"] = {**hostile["model"], f"w{up}{up}{up}{up}evil": torch.ones(2)}
    torch.save(hostile, source / "a.pt")
    done = CliRunner().invoke(
        ckpt,
        ["convert", str(source / "a.pt"), str(tmp_path / "a" / "b" / "c"), "--to", target],
    )
    assert isinstance(done.exception, LayoutMismatch), done.output
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name]


def test_no_file_of_a_folder_is_outside_of_it(tmp_path: Path) -> None:
    files = [PlannedFile("a", (b"1",)), PlannedFile("b/../../evil", (b"2",))]
    with pytest.raises(LayoutMismatch, match=r"b/\.\./\.\./evil"):
        write_folder(str(tmp_path / "c"), files, memory_nbytes=2**20, report=lambda nbytes: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["universal", "b.pt", "b.safetensors"])
def test_nothing_is_overwritten(tmp_path: Path, target: str) -> None:
    trained(tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / target)
    model = torch.load(tmp_path / "a.pt", weights_only=True)
    model["model"]["layers.0.bias"] += 1
    torch.save(model, tmp_path / "a.pt")
    with pytest.raises(CheckpointExists):
        convert(tmp_path / "a.pt", tmp_path / target)
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_disk_that_writes_something_else_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_file = file_target.new_file

    @contextmanager
    def damaging(url: str, verify: Callable[[str], None], *, nbytes: int) -> Iterator[IO[bytes]]:
        def verify_damaged(written: str) -> None:
            with open(written, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 1]))
            verify(written)

        with new_file(url, verify_damaged, nbytes=nbytes) as file:
            yield file

    monkeypatch.setattr(planned_folder, "new_file", damaging)
    trained(tmp_path / "a.pt")
    with pytest.raises(CheckpointDamaged, match="not what was written"):
        convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_damaged_part_is_never_published_and_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "a.pt")

    def damaging(storage: FileStorage, attempt: Any, *arguments: Any, **more: Any) -> Any:
        part = write_part(storage, attempt, *arguments, **more)
        path = tmp_path / "universal" / attempt.directory / pack_name(0, 0)
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        return part

    with monkeypatch.context() as patch:
        patch.setattr(universal, "write_part", damaging)
        with pytest.raises(CheckpointDamaged):
            convert(tmp_path / "a.pt", tmp_path / "universal")
    assert not list((tmp_path / "universal").rglob(MANIFEST))
    convert(tmp_path / "a.pt", tmp_path / "universal")
    assert StoredCheckpoint.open(open_storage(str(tmp_path / "universal"))).step == 3


def test_an_interrupted_folder_goes_on_and_another_model_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_target, "SHARD_NBYTES", 10_000)
    trained(tmp_path / "a.pt")
    link = os.link

    def failing(source: Path, target: Path) -> None:
        if "00002-of" in str(target):
            raise OSError("the machine went away")
        link(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", failing)
        with pytest.raises(CheckpointError, match="went away"):
            convert(tmp_path / "a.pt", tmp_path / "folder", "--to", "huggingface")
    (first,) = (tmp_path / "folder").iterdir()
    written = first.stat().st_mtime_ns
    other = torch.load(tmp_path / "a.pt", weights_only=True)
    other["model"]["embedding.weight"].zero_()
    torch.save(other, tmp_path / "other.pt")
    with pytest.raises(CheckpointExists, match="00001-of"):
        convert(tmp_path / "other.pt", tmp_path / "folder", "--to", "huggingface")
    assert list((tmp_path / "folder").iterdir()) == [first]
    convert(tmp_path / "a.pt", tmp_path / "folder", "--to", "huggingface")
    assert first.stat().st_mtime_ns == written
    convert(tmp_path / "folder", tmp_path / "b.pt", "--only", "model")
    after = torch.load(tmp_path / "b.pt", weights_only=True)
    before = torch.load(tmp_path / "a.pt", weights_only=True)["model"]
    assert torch.equal(after["embedding.weight"], before["embedding.weight"])


@pytest.mark.parametrize("taken", ["config.json", "pytorch_model.bin", "old.safetensors"])
def test_a_folder_of_another_model_gets_no_file(tmp_path: Path, taken: str) -> None:
    llama_folder(tmp_path / "hf")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / taken).write_text("{}")
    with pytest.raises(CheckpointExists, match=taken):
        convert(tmp_path / "hf", tmp_path / "target", "--to", "huggingface")
    assert [path.name for path in (tmp_path / "target").iterdir()] == [taken]


def test_a_target_below_a_file_is_refused_in_words(tmp_path: Path) -> None:
    trained(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(tmp_path / "a.pt", tmp_path / "a.pt" / "b.pt")


@pytest.mark.parametrize("target", ["b.pt", "b.safetensors"])
def test_a_conversion_keeps_to_its_memory(tmp_path: Path, target: str) -> None:
    torch.save({"w": torch.ones(2**23, dtype=torch.float64)}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / f"first-{target}")  # Loads what is loaded once.
    tracemalloc.start()
    try:
        convert(tmp_path / "a.pt", tmp_path / target, "--memory", "32MiB", "--dtype", "bf16")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (32 + 32) * 2**20


def test_a_large_tensor_takes_little_memory(tmp_path: Path) -> None:
    values = torch.arange(12_000_000, dtype=torch.float32).reshape(3, 4_000_000)
    torch.save({"w": values}, tmp_path / "a.pt")
    tracemalloc.start()
    try:
        convert(tmp_path / "a.pt", tmp_path / "b.safetensors", "--memory", "1MiB")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.4 * values.nbytes
    assert torch.equal(load_file(tmp_path / "b.safetensors")["w"], values)


def test_too_little_memory_for_a_chunk_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"192 MiB of memory at least, 1 are given"):
        convert(tmp_path / "a.pt", tmp_path / "universal", "--memory", "1MiB")


def test_a_dry_run_prints_what_would_be_written_and_writes_nothing(tmp_path: Path) -> None:
    trained(tmp_path / "a.pt")
    printed = convert(tmp_path / "a.pt", tmp_path / "m.safetensors", "--dtype", "fp16", "--dry-run")
    assert printed["to"] == "safetensors"
    assert printed["tensors"]["model/layers.0.bias"] == {"dtype": "float16", "shape": [24]}
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize(
    ("target", "more"),
    [("m.safetensors", []), ("m.pt", ["--only", "model"]), ("m", ["--to", "huggingface"])],
)
def test_a_dry_run_names_what_the_conversion_leaves_out(
    tmp_path: Path, target: str, more: list[str]
) -> None:
    model = Model()
    url = str(tmp_path / "saved")
    checkpoint.save(url, {"model": model}, step=3, config={"heads": 2})
    dry = convert(url, tmp_path / target, *more, "--dry-run")
    done = convert(url, tmp_path / target, *more)
    assert dry["left_out"] == done["left_out"]
    lost = {line.partition(":")[0] for line in done["left_out"]}
    assert ("config" in lost) == ("config" not in dry["documents"]) == (target != "m")
    assert ("model/head.weight" in lost) == ("model/tied" not in dry["documents"])


def test_values_with_the_names_of_others_are_in_the_file_too(tmp_path: Path) -> None:
    url = str(tmp_path / "saved")
    state = {"model": nn.Linear(2, 2), "step": 7, "config": {"a": 1}}
    checkpoint.save(url, state, step=3, config={"b": 2})
    convert(url, tmp_path / "m.pt")
    written = torch.load(tmp_path / "m.pt", weights_only=True)
    assert (written["step"], written["step (2)"]) == (3, 7)
    assert (written["config"], written["config (2)"]) == ({"a": 1}, {"b": 2})


def test_too_little_memory_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    trained(tmp_path / "a.pt")
    arguments = ["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.safetensors")]
    done = CliRunner().invoke(ckpt, [*arguments, "--memory", "0"])
    assert (done.exit_code, "1MiB or more" in done.output) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_names_of_parameters_may_have_spaces(tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:]}], momentum=0.9)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    model = {"my bias": weights[1].data, "w": weights[0].data}
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    (tmp_path / "names").write_text("w\n\n my bias \n")
    printed = convert(
        tmp_path / "a.pt", tmp_path / "u", "--parameter-names", tmp_path / "names", "--dry-run"
    )
    assert "optim/my bias/momentum_buffer" in printed["tensors"]


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


def llama_folder(path: Path) -> dict[str, torch.Tensor]:
    """Write a folder as Hugging Face's Llama has it, and return its tensors."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (96, 32),
        "model.norm.weight": (32,),
    }
    for layer in range(2):
        inside = f"model.layers.{layer}"
        for part, rows in {"q": 32, "k": 16, "v": 16, "o": 32}.items():
            shapes[f"{inside}.self_attn.{part}_proj.weight"] = (rows, 32)
        for part, (rows, columns) in {
            "gate": (48, 32), "up": (48, 32), "down": (32, 48)
        }.items():  # fmt: skip
            shapes[f"{inside}.mlp.{part}_proj.weight"] = (rows, columns)
        for norm in ("input", "post_attention"):
            shapes[f"{inside}.{norm}_layernorm.weight"] = (32,)
    tensors = {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(LLAMA))
    return tensors


def test_a_model_goes_to_another_framework_and_back_by_a_preset(tmp_path: Path) -> None:
    before = llama_folder(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", "--rules", "llama:hf:megatron")
    fused = StoredCheckpoint.open(open_storage(str(tmp_path / "megatron")))
    key = "model/decoder.layers.1.self_attention.linear_qkv.weight"
    assert fused.tensors[key].shape == (64, 32)
    convert(
        tmp_path / "megatron", tmp_path / "back", "--rules", "llama:megatron:hf",
        "--to", "huggingface",
    )  # fmt: skip
    assert_equal(load_file(tmp_path / "back" / "model.safetensors"), before)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == LLAMA


def test_rules_of_a_users_own_rename_the_optimizer_too(tmp_path: Path) -> None:
    trained(tmp_path / "a.pt")
    rules = tmp_path / "mine.toml"
    rules.write_text(
        """
[[rule]]
match = "layers.{layer:int}.{leaf}"
rename = "blocks.{layer}.{leaf}"

[[rule]]
match = "{rest...}"
"""
    )
    convert(tmp_path / "a.pt", tmp_path / "b.pt", "--rules", rules)
    before = torch.load(tmp_path / "a.pt", weights_only=True)
    after = torch.load(tmp_path / "b.pt", weights_only=True)

    def renamed(name: str) -> str:
        return name.replace("layers.", "blocks.")

    assert_equal(dict(after["model"]), {renamed(n): value for n, value in before["model"].items()})
    assert_equal(after["optimizer"]["state"], before["optimizer"]["state"])
    for ours, theirs in zip(
        after["optimizer"]["param_groups"], before["optimizer"]["param_groups"], strict=True
    ):
        assert ours["param_names"] == [renamed(name) for name in theirs["param_names"]]


def test_a_check_of_rules_shows_what_no_rule_takes(tmp_path: Path) -> None:
    llama_folder(tmp_path / "hf")
    good = CliRunner().invoke(
        ckpt, ["rules", "check", str(tmp_path / "hf"), "--rules", "llama:hf:live"]
    )
    assert good.exit_code == 0, good.output
    (tmp_path / "mine.toml").write_text('[[rule]]\nmatch = "model.layers.{rest...}"\n')
    bad = CliRunner().invoke(
        ckpt, ["rules", "check", str(tmp_path / "hf"), "--rules", str(tmp_path / "mine.toml")]
    )
    assert bad.exit_code == 1
    assert bad.output.startswith(
        "no rule matches lm_head.weight\nno rule matches model.embed_tokens.weight\n"
    )


def test_a_check_of_rules_sees_tied_names(tmp_path: Path) -> None:
    trained(tmp_path / "a.pt")
    (tmp_path / "mine.toml").write_text(
        "".join(
            f'[[rule]]\nmatch = "{name}"\n'
            for name in ("seen", "embedding.weight", "layers.{rest...}")
        )
    )
    done = CliRunner().invoke(
        ckpt, ["rules", "check", str(tmp_path / "a.pt"), "--rules", str(tmp_path / "mine.toml")]
    )
    assert (done.exit_code, done.output.splitlines()[0]) == (1, "no rule matches head.weight")


def test_an_optimizer_whose_parameters_become_one_must_treat_them_alike(tmp_path: Path) -> None:
    tensors = llama_folder(tmp_path / "hf")
    first = "model.layers.0.self_attn.q_proj.weight"
    others = [name for name in tensors if name != first]
    groups = [
        {"lr": 0.1, "params": [0], "param_names": [first]},
        {"lr": 0.2, "params": list(range(1, len(tensors))), "param_names": others},
    ]
    torch.save(
        {"model": tensors, "optimizer": {"state": {}, "param_groups": groups}}, tmp_path / "a.pt"
    )
    config = tmp_path / "hf" / "config.json"
    with pytest.raises(RulesInvalid, match="would be in the optimizer's groups 0 and 1"):
        convert(
            tmp_path / "a.pt", tmp_path / "u", "--rules", "llama:hf:megatron", "--config", config
        )


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt"])
def test_an_object_has_as_many_parts_as_its_size_needs(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """S3 allows 10,000 parts, and all were of 50 MiB: 500 GB were uploaded, and then refused."""
    monkeypatch.setattr(file_target, "_LEAST_PART_NBYTES", 5 * 2**20)
    monkeypatch.setattr(file_target, "_MOST_PARTS", 2)
    torch.save({"w": torch.arange(6 * 2**20, dtype=torch.float32)}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", f"{s3}/parts/{name}")
    bucket = s3.removeprefix("s3://")
    tag: str = boto3.client("s3").head_object(Bucket=bucket, Key=f"parts/{name}")["ETag"]
    assert tag.strip('"').endswith("-2")


@pytest.mark.parametrize("nbytes", [3, 11 * 2**20])
def test_an_object_that_another_process_has_written_meanwhile_is_not_replaced(
    s3: str, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr(file_target, "_LEAST_PART_NBYTES", 5 * 2**20)
    client, bucket, key = boto3.client("s3"), s3.removeprefix("s3://"), f"meanwhile/{nbytes}"

    def write_as_another_process_does() -> None:
        with file_target.new_file(f"{s3}/{key}", nbytes=nbytes) as file:
            file.write(bytes(nbytes))
            client.put_object(Bucket=bucket, Key=key, Body=b"of another process")

    with pytest.raises(CheckpointExists, match=f"{key} exists, and is never overwritten"):
        write_as_another_process_does()
    assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == b"of another process"
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)


@pytest.mark.parametrize("store", ["s3", "azure"])
def test_a_model_goes_through_an_object_store_in_every_format(
    tmp_path: Path, request: pytest.FixtureRequest, store: str
) -> None:
    url = request.getfixturevalue(store)
    trained(tmp_path / "a.pt")
    convert(tmp_path / "a.pt", f"{url}/run")
    convert(f"{url}/run", f"{url}/m/model.safetensors")
    convert(f"{url}/m/model.safetensors", f"{url}/folder", "--to", "huggingface")
    convert(f"{url}/folder", f"{url}/file.pt", "--only", "model")
    convert(f"{url}/file.pt", tmp_path / "b.pt", "--only", "model")
    before = torch.load(tmp_path / "a.pt", weights_only=True)["model"]
    del before["head.weight"]
    assert_equal(dict(torch.load(tmp_path / "b.pt", weights_only=True)), dict(before))
    with pytest.raises(CheckpointExists):
        convert(tmp_path / "a.pt", f"{url}/m/model.safetensors")


def test_numbered_parameters_of_dcp_get_the_names_that_are_given(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "a.pt")
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["param_names"]
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=tmp_path / "dcp")
    assert any(
        line.startswith("optimizer: its parameters are numbered")
        for line in convert(tmp_path / "dcp", tmp_path / "without")["left_out"]
    )
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    (tmp_path / "names.txt").write_text("\n".join(names))
    convert(tmp_path / "dcp", tmp_path / "b.pt", "--parameter-names", tmp_path / "names.txt")
    assert_equal(
        torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"]["state"],
        optimizer.state_dict()["state"],
    )
