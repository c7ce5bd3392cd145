"""Presets, on files that transformers wrote: every tensor has one rule, and comes back bit by bit.

What rules make for Megatron is also computed with (`megatron_forward`): the logits must be those of
transformers' model, so that no two elements were exchanged.
"""

from __future__ import annotations

from pathlib import Path

import torch

from keepstep.checkpoint.convert.rules.presets import families, preset
from keepstep.checkpoint.errors import RulesInvalid
from tests.convert.checkpoints import convert, of_model, read, rules_check
from tests.convert.checks import Checks, assert_close, assert_equal, refused
from tests.convert.families import FAMILIES, Family, logits, tokens, train
from tests.convert.megatron_forward import MegatronModel
from tests.convert.transformers import on_file, optimizer_of

REQUIREMENTS = ("transformers==5.23.0",)
ENVIRONMENT = "hugging_face"

_LEAST_DIFFERENCE = 1e-3


def check_files(checks: Checks, family: Family, directory: Path) -> None:
    """Check the spellings of one model's files, and what Megatron would compute from them."""
    model = family.built(0)
    folder = directory / "hf"
    model.save_pretrained(folder)
    rules = preset(family.preset)
    for target in rules.spellings:
        named = f"{family.preset}:hf:{target}"
        with checks(f"{family.name}: every tensor on file is for one rule of {named}"):
            rules_check(folder, named)
        if target == "hf":
            continue
        if target in family.lacking:
            claim = f"{family.name}: {target} has no place for some, which are named"
            with checks(claim), refused(RulesInvalid, "no rule matches"):
                convert(folder, directory / target, "--rules", named)
            continue
        with checks(f"{family.name}: hf -> {target} -> hf is bit-identical"):
            convert(folder, directory / target, "--rules", named)
            back = directory / f"back-from-{target}"
            convert(
                directory / target, back, "--to", "huggingface",
                "--rules", f"{family.preset}:{target}:hf",
            )  # fmt: skip
            assert_equal(on_file(back), on_file(folder))
        with checks(f"{family.name}: every tensor of {target} is for one rule"):
            rules_check(directory / target, f"{family.preset}:{target}:hf")
    wanted = logits(model)
    if "megatron" in rules.spellings:
        with checks(f"{family.name}: from Megatron's tensors it computes the same logits"):
            tensors = of_model(read(directory / "megatron"))
            got = MegatronModel(tensors, model.config).logits(tokens(7))
            assert_close(got, wanted)
        with checks(f"{family.name}: and others if two heads are exchanged"):
            name = next(
                name for name in tensors
                if name.endswith(("linear_qkv.weight", "linear_kv_up_proj.weight"))
            )  # fmt: skip
            others = {**tensors, name: tensors[name].roll(1, dims=-2)}
            other = MegatronModel(others, model.config).logits(tokens(7))
            assert (other - wanted).abs().max() > _LEAST_DIFFERENCE


def check_training_state(checks: Checks, family: Family, directory: Path) -> None:
    """Check that the optimizer's state follows, from the live module to every spelling and back."""
    model = family.built(0)
    optimizer = optimizer_of(model)
    train(model, optimizer, 2)
    file, config = directory / "run.pt", directory / "config.json"
    config.write_text(model.config.to_json_string(use_diff=False))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    before = read(file)
    with checks(f"{family.name}: every live tensor is for one rule"):
        rules_check(file, f"{family.preset}:live:hf", "--config", config)
    for target in preset(family.preset).spellings:
        if target == "live" or target in family.lacking:
            continue
        with checks(f"{family.name}: a training run, live -> {target} -> live is bit-identical"):
            there, back = directory / f"run-{target}", directory / f"run-{target}-back"
            for source, result, rules in (
                (file, there, f"live:{target}"), (there, back, f"{target}:live"),
            ):  # fmt: skip
                convert(source, result, "--rules", f"{family.preset}:{rules}", "--config", config)
            assert_equal(read(back), before)


def main() -> None:
    """Check all families."""
    checks = Checks()
    with checks("every preset has a model here"):
        tried = {preset(family.preset).family for family in FAMILIES}
        assert tried == set(families()), set(families()) - tried
    for family in FAMILIES:
        with checks.all_of(family.name) as directory:
            check_files(checks, family, directory)
            check_training_state(checks, family, directory)
    checks.finish()


if __name__ == "__main__":
    main()
