"""Accelerate's `save_state`: with safetensors and without, of a tied model with a frozen part."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from keepstep import checkpoint
from tests.convert.checkpoints import convert, documents, left_out, read
from tests.convert.checks import Checks, adam_state, assert_close, assert_equal

REQUIREMENTS = ("accelerate==1.15.0", "safetensors")
ENVIRONMENT = "hugging_face"

STEPS = 3


class Model(nn.Module):
    """Tied weights, a frozen layer, a buffer, odd sizes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(31, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(11))
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 31, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.arange(5) + seed)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        result: torch.Tensor = self.head(self.frozen(hidden))
        return result


class Progress:
    """An object that Accelerate saves as well."""

    def __init__(self) -> None:
        self.best = 0.25

    def state_dict(self) -> dict[str, float]:
        """Return what to save."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take what was saved."""
        self.best = state["best"]


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Return an optimizer that has names, or numbers, of one group or of two."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if kind == "names":
        return torch.optim.AdamW(named, lr=0.01)
    parameters = [p for _, p in named]
    if kind == "numbers":
        return torch.optim.AdamW(parameters, lr=0.01)
    biases = [p for p in parameters if p.dim() == 1]
    others = [p for p in parameters if p.dim() > 1]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others}], lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Do one step of training."""
    ids = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()


def check(checks: Checks, directory: Path, kind: str, is_safe: bool) -> None:
    """Save a run's state with Accelerate, and check what is read of it."""
    name = f"optimizer with {kind}, {'safetensors' if is_safe else 'pytorch_model.bin'}"
    accelerator = Accelerator(cpu=True)
    model = Model(0)
    optimizer = optimizer_of(model, kind)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    prepared, prepared_optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.register_for_checkpointing(Progress())
    for number in range(STEPS):
        step(prepared, prepared_optimizer, number)
        schedule.step()
    folder = directory / "state"
    accelerator.save_state(str(folder), safe_serialization=is_safe)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ordered = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    # Each tied name of the module is there once, under whichever name the file has.
    with checks(f"{name}: every tensor and moment is the live one, bit for bit"):
        got = {
            key: tensor
            for key, tensor in read(folder, ordered).items()
            if key.startswith(("model/", "optim/"))
        }
        live = {f"model/{key}": tensor for key, tensor in model.state_dict().items()}
        (stored,) = {"model/embedding.weight", "model/head.weight"} & set(got)
        del live[({"model/embedding.weight", "model/head.weight"} - {stored}).pop()]
        assert_equal(got, {**live, **adam_state(model, optimizer)})
    with checks(f"{name}: left out is the optimizer, if nothing says its names"):
        lost = left_out(folder)
        assert set(lost) == (set() if kind == "names" else {"optimizer.bin"}), lost
        assert set(left_out(folder, ordered)) == set(), left_out(folder, ordered)
    with checks(f"{name}: scheduler, random states and objects are carried"):
        values = documents(folder)["values"]
        assert values["scheduler/last_epoch"] == STEPS, values
        assert values["custom_checkpoint_0/best"] == 0.25, values
        saved = torch.load(folder / "random_states_0.pkl", weights_only=False)
        tensors = read(folder)
        assert_equal(tensors["random_states_0/torch_manual_seed"], saved["torch_manual_seed"])
    with checks(f"{name}: training goes on as it would have, and as Accelerate's own"):
        (directory / "names.txt").write_text("\n".join(ordered))
        convert(folder, directory / "run", "--parameter-names", directory / "names.txt")
        fresh = Model(1)
        fresh_optimizer = optimizer_of(fresh, kind)
        checkpoint.load(str(directory / "run"), {"model": fresh, "optimizer": fresh_optimizer})
        assert_equal(fresh.state_dict(), model.state_dict())
        assert_equal(adam_state(fresh, fresh_optimizer), adam_state(model, optimizer))
        theirs = Model(2)
        their_optimizer = optimizer_of(theirs, kind)
        other = Accelerator(cpu=True)
        their_schedule = torch.optim.lr_scheduler.StepLR(their_optimizer, step_size=100)
        wrapped, wrapped_optimizer, _ = other.prepare(theirs, their_optimizer, their_schedule)
        other.register_for_checkpointing(Progress())
        other.load_state(str(folder))
        for trained, trainer in (
            (model, optimizer), (fresh, fresh_optimizer), (wrapped, wrapped_optimizer),
        ):  # fmt: skip
            step(trained, trainer, STEPS)
        assert_close(fresh.state_dict(), model.state_dict())
        assert_close(theirs.state_dict(), model.state_dict())
    with checks(f"{name}: loaded without a conversion too, numbers in the order here"):
        fresh = Model(1)
        fresh_optimizer = optimizer_of(fresh, kind)
        checkpoint.load(str(folder), {"model": fresh, "optimizer": fresh_optimizer})
        step(fresh, fresh_optimizer, STEPS)
        assert_close(fresh.state_dict(), model.state_dict())


def main() -> None:
    """Check optimizers with names and without, in both kinds of files."""
    checks = Checks()
    for kind in ("names", "numbers", "groups of numbers"):
        for is_safe in (True, False):
            with checks.all_of(kind) as directory:
                check(checks, directory, kind, is_safe)
    checks.finish()


if __name__ == "__main__":
    main()
