"""Makes `tests/foreign_fixtures/hugging_face`: files of transformers, Accelerate and PEFT.

Run where they are installed, as `make convert-test ONLY=transformers` installs them (tried with
transformers 5.23.0, accelerate 1.15.0 and peft 0.21.2, and torch 2.13, on CPUs):

    python -m tests.foreign_fixtures.make_hugging_face tests/foreign_fixtures

Next to every checkpoint is `expected.pt`: the live state that it was made of, under the names that
keepstep has for it. `names.json` has the configuration, and the names and shapes on file and of the
live module, of a model of every family that has a preset.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import nn

from tests.convert import accelerate as accelerate_checks
from tests.convert.checks import adam_state
from tests.convert.families import BY_NAME, FAMILIES, state_of
from tests.convert.trainer import STEPS, names_in_groups, plain, trainer_of

TINY = {
    "vocab_size": 20, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "max_position_embeddings": 16,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama-tied": TINY,
    "mixtral": {**TINY, "num_local_experts": 3, "intermediate_size": 12},
    "qwen3-moe": {**TINY, "num_experts": 3, "moe_intermediate_size": 5},
    "gpt2": {"vocab_size": 20, "n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 16},
    "gpt-neox": {
        key: size for key, size in TINY.items() if key not in ("num_key_value_heads", "head_dim")
    },
    "deepseek-v3": {
        **{key: size for key, size in TINY.items() if key != "head_dim"},
        "num_key_value_heads": 2, "q_lora_rank": 5, "kv_lora_rank": 4, "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2, "v_head_dim": 3, "n_routed_experts": 3, "moe_intermediate_size": 5,
    },
}  # fmt: skip


def as_model(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"model/{name}": tensor.contiguous() for name, tensor in state.items()}


def make_names(directory: Path) -> None:
    """Write the names and shapes of the models that `tests/convert` tries."""
    names = {}
    for family in FAMILIES:
        model = family.built(0)
        model.save_pretrained(directory / "whole")
        with safe_open(directory / "whole" / "model.safetensors", "pt") as file:
            stored = sorted(file.keys())
            on_file = {name: list(file.get_slice(name).get_shape()) for name in stored}
        names[family.name] = {
            "preset": family.preset,
            "config": json.loads((directory / "whole" / "config.json").read_text()),
            "file": on_file,
            "live": {name: list(tensor.shape) for name, tensor in state_of(model).items()},
            "lacking": sorted(family.lacking),
        }
        shutil.rmtree(directory / "whole")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in names.items())
    (directory / "names.json").write_text(f"{{\n{lines}\n}}\n")


def make_models(directory: Path) -> None:
    """Write folders of `save_pretrained`, the first one in shards."""
    for name, sizes in MODELS.items():
        model = BY_NAME[name].built(0, **sizes).bfloat16()
        folder = directory / name
        model.save_pretrained(folder, max_shard_size="1KB" if name == "llama-tied" else "1GB")
        torch.save(as_model(state_of(model)), folder.with_suffix(".expected.pt"))


def make_trainer(directory: Path) -> None:
    """Write a folder of the Trainer, of a model whose names on file are not those of the module."""
    model = BY_NAME["mixtral"].built(0, **MODELS["mixtral"])
    trainer = trainer_of(model, directory / "run", STEPS)
    trainer.train()
    optimizer = plain(trainer.optimizer)
    shutil.move(directory / "run" / f"checkpoint-{STEPS}", directory / "trainer")
    shutil.rmtree(directory / "run")
    expected = {**as_model(state_of(model)), **adam_state(model, optimizer)}
    names = names_in_groups(model, optimizer)
    torch.save({"state": expected, "names": names}, directory / "trainer.expected.pt")


def make_accelerate(directory: Path) -> None:
    """Write folders of `save_state`: with safetensors and names, and with torch's files without."""
    for kind, is_safe in (("names", True), ("groups of numbers", False)):
        accelerator = Accelerator(cpu=True)
        model = accelerate_checks.Model(0)
        optimizer = accelerate_checks.optimizer_of(model, kind)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
        accelerator.prepare(model, optimizer, schedule)
        accelerator.register_for_checkpointing(accelerate_checks.Progress())
        for number in range(STEPS):
            accelerate_checks.step(model, optimizer, number)
            schedule.step()
        folder = directory / f"accelerate-{'safetensors' if is_safe else 'bin'}"
        accelerator.save_state(str(folder), safe_serialization=is_safe)
        expected = {**as_model(state_of(model)), **adam_state(model, optimizer)}
        names = names_in_groups(model, optimizer)
        torch.save({"state": expected, "names": names}, folder.with_suffix(".expected.pt"))


def make_adapter(directory: Path) -> None:
    """Write a folder of PEFT's `save_pretrained`."""
    torch.manual_seed(0)
    base: nn.Module = BY_NAME["llama"].built(0, **TINY)
    settings = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    model = get_peft_model(base, settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    model.save_pretrained(str(directory / "peft"))
    trained = {
        name.replace(".default.", "."): parameter.detach()
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }
    torch.save(as_model(trained), directory / "peft.expected.pt")


def main() -> None:
    directory = Path(sys.argv[1]) / "hugging_face"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    make_names(directory)
    make_models(directory)
    make_trainer(directory)
    make_accelerate(directory)
    make_adapter(directory)


if __name__ == "__main__":
    main()
