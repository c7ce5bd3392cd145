"""Defines the optimizers that optimizer_sweep.py resumes: how to make each, and how to step it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

CLASSES = 3

Step = Callable[[nn.Module, Any, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One optimizer: its name, how it is made for a model, and how it does a step."""

    name: str
    make: Callable[[nn.Module], Optimizer]
    step: Step


class Network(nn.Module):
    """A model with parameters of one, two and four dimensions, and with two of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(1, 4, 3)
        self.hidden = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.middle = nn.Linear(8, 8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.hidden(torch.tanh(self.features(images)).flatten(1)))
        out: torch.Tensor = self.out(torch.tanh(self.middle(self.norm(hidden))))
        return out


class Lookup(nn.Module):
    """A model whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, CLASSES, sparse=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table((images[:, 0, 0, 0].abs() * 7).long() % 20)
        return out


class Adapted(nn.Module):
    """A model with a low-rank adapter, named as PEFT names it."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_A = nn.Linear(16, 4, bias=False)
        self.lora_B = nn.Linear(4, CLASSES, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lora_B(self.lora_A(images.flatten(1)))
        return out


class Matrices(nn.Module):
    """A model of matrices alone."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(16, 8, bias=False)
        self.middle = nn.Linear(8, 8, bias=False)
        self.out = nn.Linear(8, CLASSES, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.hidden(images.flatten(1)))))
        out: torch.Tensor = self.out(hidden)
        return out


MODELS: Mapping[str, type[nn.Module]] = {
    "SparseAdam": Lookup,
    "LoRARite": Adapted,
    **dict.fromkeys(("AdaLOMO", "Alice", "DeMo", "SpectralSphere"), Matrices),
}
"""The models of optimizers that do not take every shape."""


def model_of(name: str) -> nn.Module:
    """Return a new model of the kind that an optimizer is made for."""
    return MODELS.get(name, Network)()


def _loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(images), labels)


def _plain(model: nn.Module, optimizer: Any, images: torch.Tensor, labels: torch.Tensor) -> None:
    optimizer.zero_grad()
    _loss(model, images, labels).backward()
    optimizer.step()


def _twice_differentiable(
    model: nn.Module, optimizer: Any, images: torch.Tensor, labels: torch.Tensor
) -> None:
    optimizer.zero_grad()
    _loss(model, images, labels).backward(create_graph=True)
    optimizer.step()
    # The graphs of these gradients refer to themselves.
    for parameter in model.parameters():
        parameter.grad = None


def _with_closure(
    model: nn.Module, optimizer: Any, images: torch.Tensor, labels: torch.Tensor
) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model, images, labels)
        loss.backward()
        return loss

    closure()
    optimizer.step(closure)


def _with_loss(
    model: nn.Module, optimizer: Any, images: torch.Tensor, labels: torch.Tensor
) -> None:
    optimizer.zero_grad()
    loss = _loss(model, images, labels)
    loss.backward()
    optimizer.step(lambda: loss.item())


def _surrogate_gap(
    model: nn.Module, optimizer: Any, images: torch.Tensor, labels: torch.Tensor
) -> None:
    optimizer.set_closure(nn.functional.cross_entropy, images, labels)
    optimizer.step()


def _of_two_tasks(
    model: nn.Module, optimizer: Any, images: torch.Tensor, labels: torch.Tensor
) -> None:
    optimizer.zero_grad()
    optimizer.pc_backward([_loss(model, images, labels), model(images).pow(2).mean()])
    optimizer.step()


def _within_backward(
    model: nn.Module, optimizer: Any, images: torch.Tensor, labels: torch.Tensor
) -> None:
    optimizer.zero_grad()
    optimizer.fused_backward(_loss(model, images, labels), lr=1e-3)


def _mixed_precision(
    model: nn.Module, optimizer: Any, images: torch.Tensor, labels: torch.Tensor
) -> None:
    optimizer.zero_grad()
    optimizer.backward(_loss(model, images, labels))
    optimizer.step()


STEPS: Mapping[str, Step] = {
    "AdaHessian": _twice_differentiable,
    "SophiaH": _twice_differentiable,
    "LBFGS": _with_closure,
    "SAM": _with_closure,
    "WSAM": _with_closure,
    "BSAM": _with_closure,
    "LookSAM": _with_closure,
    "FriendlySAM": _with_closure,
    "AliG": _with_loss,
    "GSAM": _surrogate_gap,
    "PCGrad": _of_two_tasks,
    "LOMO": _within_backward,
    "AdaLOMO": _within_backward,
    "SafeFP16Optimizer": _mixed_precision,
}

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "Ranger21": {"num_iterations": 8},
    "BSAM": {"num_data": 100},
    "LookSAM": {"k": 3},
    "Lookahead": {"k": 3},
    "AliG": {"max_lr": 0.1},
    "AdaShift": {"keep_num": 2},
    "TRAC": {"s_prev": 0.1},
    "SPAM": {"density": 0.5, "update_proj_gap": 3},
    "StableSPAM": {"update_proj_gap": 3},
    "SOAP": {"precondition_frequency": 3},
    "Shampoo": {"preconditioning_compute_steps": 2},
    "ScalableShampoo": {"start_preconditioning_step": 2, "preconditioning_compute_steps": 2},
}
"""Options without which an optimizer cannot be made, or would do nothing rare in eight steps."""


def _over_parameters(kind: type[Optimizer], model: nn.Module) -> Optimizer:
    made: Any = kind
    optimizer: Optimizer = made(model.parameters(), **OPTIONS.get(kind.__name__, {}))
    return optimizer


def _by_use(kind: type[Optimizer], model: nn.Module) -> Optimizer:
    """Make an optimizer that treats matrices otherwise than the other parameters."""
    parameters = list(model.parameters())
    made: Any = kind
    optimizer: Optimizer = made([
        {"params": [p for p in parameters if p.dim() >= 2], "use_muon": True},
        {"params": [p for p in parameters if p.dim() < 2], "use_muon": False},
    ])  # fmt: skip
    return optimizer


def _low_rank(kind: type[Optimizer], model: nn.Module) -> Optimizer:
    """Make an optimizer that projects the gradients of matrices to few dimensions."""
    parameters = list(model.parameters())
    made: Any = kind
    low_rank = {"rank": 2, "update_proj_gap": 3, "scale": 1.0, "projection_type": "std"}
    optimizer: Optimizer = made([
        {"params": [p for p in parameters if p.dim() == 2], **low_rank},
        {"params": [p for p in parameters if p.dim() != 2], "rank": None},
    ])  # fmt: skip
    return optimizer


def _around_adam(kind: type[Optimizer], model: nn.Module) -> Optimizer:
    """Make an optimizer around another one."""
    made: Any = kind
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer: Optimizer = made(inner, **OPTIONS.get(kind.__name__, {}))
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


def _sharpness_aware(kind: type[Optimizer], model: nn.Module) -> Optimizer:
    """Make an optimizer that takes the class of the one that it is made around."""
    made: Any = kind
    options: dict[str, Any] = {"lr": 0.01, **OPTIONS.get(kind.__name__, {})}
    if "model" in inspect.signature(kind).parameters:
        options["model"] = model
    optimizer: Optimizer = made(
        params=model.parameters(), base_optimizer=torch.optim.AdamW, **options
    )
    return optimizer


def _surrogate(kind: type[Optimizer], model: nn.Module) -> Optimizer:
    from pytorch_optimizer.lr_scheduler import LinearScheduler, ProportionScheduler  # type: ignore

    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    rates = LinearScheduler(inner, max_lr=0.01, t_max=100)
    sharpness = ProportionScheduler(rates, max_lr=0.01, max_value=2.0)
    made: Any = kind
    optimizer: Optimizer = made(
        params=model.parameters(), base_optimizer=inner, model=model, rho_scheduler=sharpness
    )
    return optimizer


def _of_model(kind: type[Optimizer], model: nn.Module) -> Optimizer:
    made: Any = kind
    optimizer: Optimizer = made(model)
    return optimizer


def _schedule_free(kind: type[Optimizer], model: nn.Module) -> Optimizer:
    optimizer: Any = _over_parameters(kind, model)
    optimizer.train()
    made: Optimizer = optimizer
    return made


def _of_matrices(kind: type[Optimizer], model: nn.Module) -> Optimizer:
    """Make an optimizer of the model's matrices alone, which is all that it takes."""
    made: Any = kind
    optimizer: Optimizer = made([p for p in model.parameters() if p.dim() == 2])
    return optimizer


_MAKERS: Mapping[str, Callable[[type[Optimizer], nn.Module], Optimizer]] = {
    **dict.fromkeys(
        ("Muon", "AdaMuon", "AdaGO", "NorMuon", "MuonClip", "DistributedMuon"), _by_use
    ),
    **dict.fromkeys(("GaLore", "APOLLO", "Fira", "Conda"), _low_rank),
    **dict.fromkeys(
        ("Lookahead", "TRAC", "OrthoGrad", "PCGrad", "ScheduleFreeWrapper", "Magma",
         "SafeFP16Optimizer"), _around_adam,
    ),
    **dict.fromkeys(("SAM", "WSAM", "LookSAM", "FriendlySAM"), _sharpness_aware),
    **dict.fromkeys(("LOMO", "AdaLOMO", "AdamMini"), _of_model),
    **dict.fromkeys(
        ("ScheduleFreeSGD", "ScheduleFreeAdamW", "ScheduleFreeRAdam"), _schedule_free
    ),
    "GSAM": _surrogate,
}  # fmt: skip


def cases(module: ModuleType, prefix: str) -> list[Case]:
    """Return a case for each class of optimizers that a module exports."""
    found = {
        name: kind
        for name, kind in vars(module).items()
        if inspect.isclass(kind)
        and issubclass(kind, Optimizer)
        and kind is not Optimizer
        and not name.startswith("_")
        and not inspect.isabstract(kind)
        and kind.__name__ == name
        and name != "BaseOptimizer"
    }
    made = []
    for name, kind in sorted(found.items()):
        make = _MAKERS.get(name, _over_parameters)
        if module is torch.optim:
            make = _of_matrices if name == "Muon" else _over_parameters
        made.append(Case(f"{prefix}.{name}", partial(make, kind), STEPS.get(name, _plain)))
    return made
