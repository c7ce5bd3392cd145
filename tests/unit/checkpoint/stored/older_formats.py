"""Checkpoints that earlier releases wrote, as files, and the state that they were made from."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from keepstep.checkpoint.stored.storage import open_storage

ROOT = Path(__file__).with_name("formats")


def put_format(url: str, number: int) -> None:
    """Put the checkpoint of step 30, generation 2, of an older format at a URL."""
    storage, root = open_storage(url), ROOT / str(number)
    for path in root.rglob("*"):
        if path.is_file():
            storage.write(path.relative_to(root).as_posix(), [path.read_bytes()])


def new_state() -> dict[str, object]:
    """Return the state that these checkpoints were made from, before its first step."""
    torch.manual_seed(0)
    model = nn.ModuleDict({
        "large": nn.Linear(20, 9), "small": nn.Linear(3, 2, dtype=torch.bfloat16)
    })  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "extra": torch.arange(7, dtype=torch.int64),
        "loss": 1.5,
    }


def train(state: dict[str, object]) -> None:
    """Take the step that these checkpoints were saved after."""
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
