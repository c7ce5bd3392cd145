"""Lightning's `.ckpt` of a real `Trainer.fit`: one optimizer, and two that are stepped by hand."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from keepstep import checkpoint
from tests.convert.checkpoints import convert, documents, left_out, of_model, read
from tests.convert.checks import Checks, adam_state, assert_close, assert_equal

REQUIREMENTS = ("lightning==2.6.6",)

STEPS = 3


class Net(nn.Module):
    """Tied weights and odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 31, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        result: torch.Tensor = self.head(self.middle(self.embedding(ids)).tanh())
        return result


class Module(lightning.LightningModule):
    """A module as users write it.

    Args:
        kind: of optimizer: `numbers` and `names` are one group, `groups` are two; `several` are
            two optimizers.
        is_tied: with a head that is the embedding, which a state_dict has twice.
    """

    def __init__(self, kind: str, is_tied: bool) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = kind != "several"
        # No two parameters have one shape: else numbers in the optimizer's state have no names.
        self.net = Net() if is_tied else nn.Sequential(nn.Embedding(31, 6), nn.Linear(6, 33))
        self.kind = kind

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        result: torch.Tensor = self.net(ids)
        return result

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor | None:
        """Return the loss of a batch; with several optimizers step them."""
        (ids,) = batch
        loss = nn.functional.cross_entropy(self(ids).flatten(0, 1), ids.flatten())
        if self.automatic_optimization:
            return loss
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        """Return the optimizers, and a schedule of the learning rate where there is one."""
        named = list(self.named_parameters())
        matrices = [p for _, p in named if p.dim() > 1]
        biases = [p for _, p in named if p.dim() == 1]
        if self.kind == "several":
            return [torch.optim.AdamW(matrices, lr=0.01), torch.optim.SGD(biases, 0.1, 0.9)]
        given = {
            "names": named,
            "numbers": [p for _, p in named],
            "groups": [{"params": biases, "weight_decay": 0.0}, {"params": matrices}],
        }[self.kind]
        optimizer = torch.optim.AdamW(given, lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)]


def fitted(
    kind: str, is_tied: bool, directory: Path, has_callback: bool = True
) -> tuple[Module, list[torch.optim.Optimizer]]:
    """Train a module for some steps, and save it.

    Args:
        kind: of optimizer, as for `Module`.
        is_tied: as for `Module`.
        directory: where to save it as `last.ckpt`.
        has_callback: with the callback that notes where it has saved what.
    """
    torch.manual_seed(0)
    module = Module(kind, is_tied)
    ids = torch.randint(31, (8 * STEPS, 9), generator=torch.Generator().manual_seed(1))
    trainer = lightning.Trainer(
        default_root_dir=str(directory), max_epochs=1, accelerator="cpu", devices=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=has_callback,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(ids), batch_size=8))
    trainer.save_checkpoint(directory / "last.ckpt")
    return module, list(trainer.optimizers)


def step(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Do one more step of training, without Lightning."""
    ids = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(9))
    for optimizer in optimizers:
        optimizer.zero_grad()
    nn.functional.cross_entropy(module(ids).flatten(0, 1), ids.flatten()).backward()
    for optimizer in optimizers:
        optimizer.step()


def check(checks: Checks, kind: str, is_tied: bool, directory: Path) -> None:
    """Check one kind of optimizer, and what is read of the file that Lightning wrote."""
    name = f"{kind}, {'tied' if is_tied else 'untied'}"
    module, optimizers = fitted(kind, is_tied, directory)
    file = directory / "last.ckpt"
    by_id = {id(parameter): name for name, parameter in module.named_parameters()}
    ordered = [
        by_id[id(p)] for optimizer in optimizers for g in optimizer.param_groups
        for p in g["params"]
    ]  # fmt: skip
    names = ordered if kind in ("groups", "several") else None
    moments = {k: t for optimizer in optimizers for k, t in adam_state(module, optimizer).items()}
    live = {key: tensor for key, tensor in module.state_dict().items() if "head" not in key}
    with checks(f"{name}: every tensor and moment is the live one, bit for bit"):
        tensors = read(file, names)
        assert_equal(of_model(tensors), live)
        state = {key: tensor for key, tensor in tensors.items() if key.startswith("optim/")}
        assert_equal(state, moments)
    with checks(f"{name}: nothing is left out but an optimizer whose names are not known"):
        # One group of all parameters, in the module's order, has names; others have none.
        without_names = {"groups": 1, "several": 2}.get(kind, 0)
        expected = {f"optimizer_states.{number}" for number in range(without_names)}
        assert set(left_out(file)) == expected, left_out(file)
        assert set(left_out(file, ordered)) == set(), left_out(file, ordered)
    with checks(f"{name}: ties, counters, loops and hyperparameters are carried"):
        found = documents(file)
        ties = {"net.head.weight": "net.embedding.weight"} if is_tied else {}
        assert found.get("model/tied", {}) == ties, found.get("model/tied")
        values = found["values"]
        assert (values["global_step"], values["hyper_parameters/kind"]) == (
            STEPS * len(optimizers), kind,
        )  # fmt: skip
        if kind != "several":
            assert values["lr_schedulers"][0]["last_epoch"] == 1, values["lr_schedulers"]
    with checks(f"{name}: training goes on as it would have"):
        (directory / "names.txt").write_text("\n".join(ordered))
        convert(file, directory / "run", "--parameter-names", directory / "names.txt")
        fresh = Module(kind, is_tied)
        configured = fresh.configure_optimizers()
        fresh_optimizers = configured if kind == "several" else configured[0]
        state = {f"optimizer{n}": o for n, o in enumerate(fresh_optimizers)}
        checkpoint.load(str(directory / "run"), {"model": fresh, **state})
        assert_equal(fresh.state_dict(), module.state_dict())
        step(module, optimizers)
        step(fresh, fresh_optimizers)
        assert_close(fresh.state_dict(), module.state_dict())


def main() -> None:
    """Check all kinds of optimizers."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    checks = Checks()
    for kind in ("names", "numbers", "groups", "several"):
        for is_tied in (False, True):
            with checks.all_of(kind) as directory:
                check(checks, kind, is_tied, directory)
    checks.finish()


if __name__ == "__main__":
    main()
