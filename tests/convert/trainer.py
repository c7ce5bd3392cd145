"""Hugging Face's Trainer: `checkpoint-N` of a real run of it.

Its optimizer numbers parameters by groups, decayed ones first, and the names are not on file: they
are passed. Then the moments are those of the live optimizer by name, and training goes on as the
Trainer's own run did.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from keepstep import checkpoint
from tests.convert.checkpoints import convert, documents, left_out, of_model, read
from tests.convert.checks import Checks, adam_state, assert_close, assert_equal
from tests.convert.families import FAMILIES, Family, logits, state_of, tokens
from tests.convert.transformers import on_file

REQUIREMENTS = ("transformers==5.23.0", "accelerate==1.15.0")
ENVIRONMENT = "hugging_face"

STEPS = 3
_WITHOUT_COUNTERPART = "training_args"


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences, of which each is its own label."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = tokens(200 + number, self._vocabulary)[0]
        return {"input_ids": ids, "labels": ids}


def trainer_of(model: nn.Module, directory: Path, steps: int) -> Trainer:
    """Return a Trainer that saves at its last step, in the order of the data set."""
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=steps,
        save_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        weight_decay=0.1,
        lr_scheduler_type="linear",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        logging_steps=1,
    )
    sequences = Sequences(model.config.vocab_size)
    return Trainer(model=model, args=arguments, train_dataset=sequences)


def names_in_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of an optimizer's parameters in the order of its groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that Accelerate has wrapped."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    result: torch.optim.Optimizer = optimizer
    return result


def trained(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what of a checkpoint's tensors are the model's and the optimizer's."""
    return {k: tensor for k, tensor in tensors.items() if k.startswith(("model/", "optim/"))}


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return a model's state after one more step, by an optimizer without a schedule."""
    optimizer.zero_grad()
    ids = tokens(300)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return state_of(model)


def check(checks: Checks, family: Family, directory: Path) -> None:
    """Train a model with the Trainer, and check what is read of its folder."""
    model = family.built(0)
    trainer = trainer_of(model, directory / "run", STEPS)
    trainer.train()
    optimizer = plain(trainer.optimizer)
    folder = directory / "run" / f"checkpoint-{STEPS}"
    names = names_in_groups(model, optimizer)
    live, moments = state_of(model), adam_state(model, optimizer)
    trained_live = {**{f"model/{name}": tensor for name, tensor in live.items()}, **moments}
    (directory / "names.txt").write_text("\n".join(names))
    with checks(f"{family.name}: the latest of the run's folders is read, of its step"):
        assert documents(directory / "run")["trainer_state"]["global_step"] == STEPS
        assert convert(folder, directory / "none", "--dry-run")["step"] == STEPS
    with checks(f"{family.name}: every tensor on file is read bit for bit"):
        assert_equal(of_model(read(folder)), on_file(folder))
    with checks(f"{family.name}: without names the optimizer is left out, and arguments"):
        lost = left_out(folder)
        assert set(lost) == {"optimizer.pt", _WITHOUT_COUNTERPART}, lost
        assert "pass their names in the order of the optimizer's groups" in lost["optimizer.pt"]
    with checks(f"{family.name}: with names nothing but the arguments is left out"):
        assert set(left_out(folder, names)) == {_WITHOUT_COUNTERPART}, left_out(folder, names)
    with checks(f"{family.name}: scheduler, random states and the log are carried"):
        values = documents(folder)["values"]
        assert values["scheduler/last_epoch"] == STEPS, values["scheduler/last_epoch"]
        written = json.loads((folder / "trainer_state.json").read_text())
        assert_equal(documents(folder)["trainer_state"], written)
        saved = torch.load(folder / "rng_state.pth", weights_only=False)
        assert_equal(read(folder)["rng_state/cpu"], saved["cpu"])
        assert_equal(values["rng_state/python"][1], list(saved["python"][1]))
    if set(on_file(folder)) != set(live):
        # The optimizer has the live module's names, and the weights those on file.
        with checks(f"{family.name}: by rules every tensor and moment is the live one"):
            convert(
                folder, directory / "live", "--rules", f"{family.preset}:hf:live",
                "--parameter-names", directory / "names.txt",
            )  # fmt: skip
            assert_equal(trained(read(directory / "live")), trained_live)
        return
    with checks(f"{family.name}: every tensor and moment is the live one, bit for bit"):
        assert_equal(trained(read(folder, names)), trained_live)
    universal = directory / "universal"
    with checks(f"{family.name}: the groups have their options"):
        convert(folder, universal, "--parameter-names", directory / "names.txt")
        groups = documents(universal)["optim/groups"]
        for ours, theirs in zip(groups, optimizer.param_groups, strict=True):
            assert ours["options"]["weight_decay"] == theirs["weight_decay"]
            assert len(ours["parameters"]) == len(theirs["params"])
    wanted = logits(model)
    with checks(f"{family.name}: loaded without a conversion it has the same logits"):
        fresh = family.built(1)
        assert checkpoint.load(str(folder), {"model": fresh}) == STEPS
        assert_close(logits(fresh), wanted)
    with checks(f"{family.name}: training goes on as it would have"):
        fresh = family.built(1)
        fresh_optimizer = plain(trainer_of(fresh, directory / "other", STEPS).create_optimizer())
        checkpoint.load(str(universal), {"model": fresh, "optimizer": fresh_optimizer})
        assert_equal(state_of(fresh), live)
        assert_equal(adam_state(fresh, fresh_optimizer), moments)
        model.train()
        fresh.train()
        assert_close(one_step(fresh, fresh_optimizer), one_step(model, optimizer))


def main() -> None:
    """Check a tied model, one of experts, and one whose names on file are others."""
    checks = Checks()
    for family in FAMILIES:
        if family.name in ("llama-tied", "qwen3", "gpt2", "mixtral", "gpt-neox"):
            with checks.all_of(family.name) as directory:
                check(checks, family, directory)
    checks.finish()


if __name__ == "__main__":
    main()
