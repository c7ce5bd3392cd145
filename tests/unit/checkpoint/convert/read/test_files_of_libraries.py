"""Real files of transformers, Accelerate, PEFT, Lightning and torchtitan, bit for bit.

`tests/foreign_fixtures/make_*.py` made them, and noted the live state that they were made of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.checkpoint.convert.write.opened import Checkpoint
from keepstep.checkpoint.convert.write.rules_given import apply_naming_rules
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.source import BoxRequest
from tests.integration.checkpoint.foreign_reads import assert_same, bytes_of
from tests.opened_checkpoints import open_any, open_foreign
from tests.unit.checkpoint.convert.read.written import tensor_of

FIXTURES = Path(__file__).parents[4] / "foreign_fixtures"
HUGGING_FACE = FIXTURES / "hugging_face"
WITHOUT_NAMES = (
    "its parameters are numbered, and nothing in the checkpoint says which is which; pass their "
    "names in the order of the optimizer's groups (keepstep ckpt convert --parameter-names), or "
    "save an optimizer of model.named_parameters()"
)
MODELS = {
    "llama-tied": "llama",
    "mixtral": "mixtral",
    "qwen3-moe": "qwen3_moe",
    "gpt2": "gpt2",
    "gpt-neox": "gpt_neox",
    "deepseek-v3": "deepseek_v3",
}


def expected_of(path: Path) -> dict[str, Any]:
    expected: dict[str, Any] = torch.load(path.with_name(f"{path.name}.expected.pt"))
    return expected


def assert_holds(opened: Checkpoint, expected: Mapping[str, torch.Tensor]) -> None:
    """Check that the model and the optimizer are these, bit for bit."""
    source = opened.source
    trained = {key for key in source.tensors if key.startswith(("model/", "optim/"))}
    assert trained == set(expected)
    for key, tensor in expected.items():
        spec = source.tensors[key]
        assert (spec.dtype, spec.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape)), key
        content = bytearray(tensor.numel() * numpy_dtype(spec.dtype).itemsize)
        source.read([BoxRequest(key, Box.whole(spec.shape), memoryview(content))])
        assert bytes(content) == bytes_of(tensor), key


@pytest.mark.parametrize("name", MODELS)
def test_folder_of_transformers_is_the_live_module_by_the_presets_rules(name: str) -> None:
    folder = HUGGING_FACE / name
    opened = open_any(str(folder))
    config = json.loads((folder / "config.json").read_text())
    assert opened.source.documents["config"] == config
    assert [item.name for item in opened.left_out] == ["generation_config.json"]
    live = apply_naming_rules(opened, f"{MODELS[name]}:hf:live", config)
    assert_holds(live, expected_of(folder))


def test_folder_in_shards_has_its_tied_head() -> None:
    folder = HUGGING_FACE / "llama-tied"
    assert len(list(folder.glob("*.safetensors"))) > 1
    source = open_foreign(str(folder))
    assert source.documents["model/tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    for key, tensor in expected_of(folder).items():
        assert_same(source, key, tensor)


def test_folder_of_the_trainer_is_read() -> None:
    folder = HUGGING_FACE / "trainer"
    expected = expected_of(folder)
    opened = open_any(str(folder), parameter_names=expected["names"])
    assert opened.source.step == 3
    config = opened.source.documents["config"]
    # The weights have other names on file than the optimizer's parameters have.
    assert_holds(apply_naming_rules(opened, "mixtral:hf:live", config), expected["state"])
    assert [item.name for item in opened.left_out] == ["training_args"]
    saved = torch.load(folder / "rng_state.pth", weights_only=False)
    source = open_foreign(str(folder))
    assert_same(source, "rng_state/cpu", saved["cpu"])
    assert tensor_of(source, "rng_state/numpy/1").tolist() == saved["numpy"][1].tolist()
    values = source.documents["values"]
    assert values["rng_state/python"][1] == list(saved["python"][1])
    assert values["scheduler/last_epoch"] == 3
    state = json.loads((folder / "trainer_state.json").read_text())
    assert source.documents["trainer_state"] == state
    assert {item.name: item.reason for item in source.left_out} == {
        "optimizer.pt": WITHOUT_NAMES,
        "training_args": "it has an object of transformers.training_args.TrainingArguments, which "
        "JSON has not",
    }


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_folder_of_accelerate_is_read(kind: str) -> None:
    folder = HUGGING_FACE / f"accelerate-{kind}"
    expected = expected_of(folder)
    # One optimizer was made of named parameters, the other one numbers them.
    names = expected["names"] if kind == "bin" else None
    opened = open_any(str(folder), parameter_names=names)
    assert_holds(opened, expected["state"])
    assert opened.left_out == ()
    values = opened.source.documents["values"]
    assert values["scheduler/last_epoch"] == 3
    assert values["custom_checkpoint_0/best"] == 0.25
    saved = torch.load(folder / "random_states_0.pkl", weights_only=False)
    source = open_foreign(str(folder))
    assert_same(source, "random_states_0/torch_manual_seed", saved["torch_manual_seed"])
    lost = {item.name: item.reason for item in source.left_out}
    assert lost == ({"optimizer.bin": WITHOUT_NAMES} if kind == "bin" else {})


def test_adapter_is_read() -> None:
    folder = HUGGING_FACE / "peft"
    opened = open_any(str(folder))
    assert_holds(opened, expected_of(folder))
    assert opened.source.documents["adapter_config"]["r"] == 2
    assert [item.name for item in opened.left_out] == ["README.md"]


@pytest.mark.parametrize("kind", ["groups", "several"])
def test_file_of_lightning_is_read(kind: str) -> None:
    file = FIXTURES / "lightning" / f"{kind}.ckpt"
    expected = torch.load(file.with_suffix(".expected.pt"))
    opened = open_any(str(file), parameter_names=expected["names"])
    assert (opened.format_name, opened.left_out) == ("Lightning", ())
    assert_holds(opened, expected["state"])
    documents = opened.source.documents
    assert documents["model/tied"] == {"net.head.weight": "net.embedding.weight"}
    assert documents["values"]["hyper_parameters/kind"] == kind
    assert documents["values"]["global_step"] == opened.source.step
    groups = [name for group in documents["optim/groups"] for name in group["parameters"]]
    assert groups == expected["names"]
    lost = [item.name for item in open_foreign(str(file)).left_out]
    assert lost == [f"optimizer_states.{n}" for n in range(2 if kind == "several" else 1)]


def test_checkpoint_of_torchtitan_is_read_and_respelled() -> None:
    expected = torch.load(FIXTURES / "torchtitan" / "expected.pt")
    opened = open_any(str(FIXTURES / "torchtitan" / "checkpoint"))
    assert (opened.format_name, opened.source.step, opened.left_out) == ("torchtitan", 3, ())
    assert_holds(opened, expected["state"])
    values = opened.source.documents["values"]
    assert values["train_state/ntokens_seen"] == 99
    assert values["lr_scheduler/last_epoch"] == 3
    # q, k and v are one in the optimizer's state, and three in Hugging Face's names.
    hub = apply_naming_rules(opened, "llama:torchtitan:hf", expected["config"])
    steps = {key: torch.tensor(3.0) for key in hub.source.tensors if key.endswith("/step")}
    assert_holds(hub, {**expected["hub"], **steps})
    assert hub.left_out == ()
