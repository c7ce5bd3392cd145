"""Models of transformers: what `save_pretrained` wrote is read, and `from_pretrained` reads ours.

Of each model: a folder with one file and one with several, read bit for bit under the names on file
and, by the preset's rules, under those of the live module; the same logits and the same next step
of training from a conversion, from `checkpoint.load` of the folder, and from what keepstep writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from keepstep import checkpoint
from tests.convert.checkpoints import convert, documents, left_out, of_model, read
from tests.convert.checks import Checks, adam_state, assert_close, assert_equal, refused
from tests.convert.families import FAMILIES, Family, logits, state_of, train

REQUIREMENTS = ("transformers==5.23.0",)
ENVIRONMENT = "hugging_face"

# Fewer bytes than any of the models has.
_SHARD_SIZE = "30KB"


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer as scripts make it: in two groups, by names."""
    named = list(model.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [(n, p) for n, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [(n, p) for n, p in named if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    )


def on_file(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder as safetensors reads them."""
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def pretrained(folder: Path) -> nn.Module:
    """Return the model that transformers makes of a folder; it must not lack or ignore a tensor."""
    model, notes = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not notes.get(kind), f"{kind}: {sorted(map(str, notes[kind]))[:5]}"
    result: nn.Module = model
    return result


def next_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the state of a model after one more step of training."""
    train(model, optimizer, 1, first=3)
    return state_of(model)


def check_reads(checks: Checks, family: Family, model: nn.Module, folder: Path) -> None:
    """Check what is read of a folder that `save_pretrained` wrote."""
    name = f"{family.name}, {folder.name}"
    live, wanted = state_of(model), logits(model)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    with checks(f"{name}: every tensor on file is read bit for bit"):
        assert_equal(of_model(read(folder)), on_file(folder))
    with checks(f"{name}: left out is generation_config.json and nothing else"):
        assert set(left_out(folder)) <= {"generation_config.json"}, left_out(folder)
    with checks(f"{name}: its configuration is a document"):
        assert_equal(documents(folder)["config"], config)
    universal = folder.with_name(f"{folder.name}-universal")
    with checks(f"{name}: by rules every tensor is the live module's, bit for bit"):
        convert(folder, universal, "--rules", f"{family.preset}:hf:live")
        assert_equal(of_model(read(universal)), live)
    with checks(f"{name}: a loaded conversion has the same logits"):
        fresh = family.built(1)
        checkpoint.load(str(universal), {"model": fresh})
        assert_close(logits(fresh), wanted)
    if set(live) == set(on_file(folder)):
        with checks(f"{name}: loaded without a conversion it has the same logits"):
            fresh = family.built(1)
            checkpoint.load(str(folder), {"model": fresh})
            assert_close(logits(fresh), wanted)
    else:
        claim = f"{name}: loaded without a conversion its names are refused"
        with checks(claim), refused(checkpoint.LayoutMismatch):
            checkpoint.load(str(folder), {"model": family.built(1)})
    with checks(f"{name}: convert --to huggingface, and transformers has the same logits"):
        written = folder.with_name(f"{folder.name}-written")
        convert(folder, written, "--to", "huggingface")
        assert_equal(on_file(written), on_file(folder))
        assert_close(logits(pretrained(written)), wanted)
    with checks(f"{name}: convert --to safetensors, and safetensors reads the same"):
        file = folder.with_name(f"{folder.name}.safetensors")
        convert(folder, file)
        assert_equal(load_file(file), on_file(folder))
    with checks(f"{name}: convert --to torch, and the module's load_state_dict takes it"):
        file = folder.with_name(f"{folder.name}.pt")
        convert(folder, file, "--rules", f"{family.preset}:hf:live", "--only", "model")
        fresh = family.built(1)
        fresh.load_state_dict(torch.load(file, weights_only=True))
        assert_close(logits(fresh), wanted)
    with checks(f"{name}: convert --dtype bf16 rounds as transformers does"):
        written = folder.with_name(f"{folder.name}-bf16")
        convert(folder, written, "--to", "huggingface", "--dtype", "bf16")
        rounded = {
            n: t.bfloat16() if t.is_floating_point() else t for n, t in on_file(folder).items()
        }
        assert_equal(on_file(written), rounded)


def check_writes(checks: Checks, family: Family, directory: Path) -> None:
    """Check a training run's file: to the universal format, and as a folder for transformers."""
    name = f"{family.name}, a file of torch.save"
    model = family.built(0)
    optimizer = optimizer_of(model)
    train(model, optimizer, 3)
    file, config = directory / "run.pt", directory / "config.json"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, file)
    model.config.architectures = [type(model).__name__]
    config.write_text(model.config.to_json_string(use_diff=False))
    wanted = logits(model)
    with checks(f"{name}: of a training run it becomes a folder that transformers reads"):
        written = directory / "for-transformers"
        convert(
            file, written, "--to", "huggingface", "--rules", f"{family.preset}:live:hf",
            "--config", config,
        )  # fmt: skip
        (written / "config.json").write_bytes(config.read_bytes())
        assert_close(logits(pretrained(written)), wanted)
    with checks(f"{name}: the next step of training is the same"):
        convert(file, directory / "run")
        live, moments = state_of(model), adam_state(model, optimizer)
        expected = next_step(model, optimizer)
        for url in (file, directory / "run"):
            fresh = family.built(1)
            fresh_optimizer = optimizer_of(fresh)
            step = checkpoint.load(str(url), {"model": fresh, "optimizer": fresh_optimizer})
            assert step == 3, step
            assert_equal(state_of(fresh), live)
            assert_equal(adam_state(fresh, fresh_optimizer), moments)
            assert_close(next_step(fresh, fresh_optimizer), expected)


def main() -> None:
    """Check all families."""
    checks = Checks()
    for family in FAMILIES:
        with checks.all_of(family.name) as directory:
            model = family.built(0)
            for kind, size in (("one file", "1GB"), ("several files", _SHARD_SIZE)):
                folder = directory / kind.replace(" ", "-")
                model.save_pretrained(folder, max_shard_size=size)
                files = len(list(folder.glob("*.safetensors")))
                with checks(f"{family.name}: transformers wrote {kind}"):
                    assert (files == 1) == (kind == "one file"), files
                check_reads(checks, family, model, folder)
            check_writes(checks, family, directory)
    checks.finish()


if __name__ == "__main__":
    main()
