"""Trains a small model, saves it as users do, and converts what was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from torch import nn

from keepstep.checkpoint.cli.ckpt import ckpt


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(301, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.head = nn.Linear(24, 301, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.arange(5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.head(hidden)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    biases = [(name, value) for name, value in named.items() if value.dim() == 1]
    others = [(name, value) for name, value in named.items() if value.dim() > 1]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others}], lr=0.02)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(steps)
    losses = []
    for _ in range(steps):
        ids = torch.randint(301, (4, 9), generator=generator)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train a model, and save it as users do."""
    torch.manual_seed(0)
    model = Model()
    optimizer = optimizer_of(model)
    train(model, optimizer, 3)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2, "step": 3},
        path,
    )
    return model, optimizer


def convert(*arguments: str | Path) -> dict[str, Any]:
    """Run the command, and return what it prints."""
    done = CliRunner().invoke(
        ckpt, ["convert", *map(str, arguments), "--json"], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def assert_equal(left: object, right: object) -> None:
    assert type(left) is type(right) or isinstance(left, dict | list | tuple)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, dict) and isinstance(right, dict):
        assert left.keys() == right.keys()
        for name in left:
            assert_equal(left[name], right[name])
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        for ours, theirs in zip(left, right, strict=True):
            assert_equal(ours, theirs)
    else:
        assert left == right
