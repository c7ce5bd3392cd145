"""A checkpoint of the format, as files that are never changed, and the state that it holds.

It has all kinds of objects although it is small: the sizes in `chunking` that decide about chunks,
cells and packs were made smaller for it, which readers must not notice. It has two writers, which
had the halves of the rows, and compresses bfloat16.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import torch
from torch import nn

from keepstep.checkpoint import Descriptions, Part, PartTable
from keepstep.checkpoint.format.stored.storage import open_storage

ROOT = Path(__file__).with_name("golden")

QKV = PartTable(0, (Part("q", 16), Part("k", 4, 2), Part("v", 4, 2)), groups=2)
VOCABULARY = 10
DESCRIPTIONS = Descriptions(parts={"qkv.*": QKV}, padding={"embed.weight": (VOCABULARY, 6)})
"""Descriptions of the tensors of `described_state`."""


def put_golden(url: str) -> None:
    """Put the checkpoint, of step 30 and generation 2, at a URL."""
    storage = open_storage(url)
    for path in ROOT.rglob("*"):
        if path.is_file():
            storage.write(path.relative_to(ROOT).as_posix(), [path.read_bytes()])


class DescribedModel(nn.Module):
    """A model with fused parts, and an embedding that may be padded and tied to the head."""

    def __init__(self, *, rows: int, is_tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 6)
        self.qkv = nn.Linear(6, QKV.extent)
        self.large = nn.Linear(32, 40, bias=False)
        self.half = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
        self.head = nn.Linear(6, rows, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


def described_state(
    offset: int, *, rows: int = VOCABULARY + 2, is_tied: bool = True
) -> dict[str, object]:
    """Return the state that was saved if `offset` is 0, or one like it.

    Its numbers are exact in every data type and need no generator, whose numbers may change with
    PyTorch.
    """
    model = DescribedModel(rows=rows, is_tied=is_tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 + offset)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    slots = [optimizer.state[parameter] for parameter in model.parameters()]
    tensors = chain(model.parameters(), *(slot.values() for slot in slots))
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            values = torch.arange(tensor.numel()) * 37 + 11 * number + offset
            tensor.copy_((values % 251 / 8).reshape(tensor.shape))
    return {
        "model": model,
        "optimizer": optimizer,
        "extra": torch.arange(7, dtype=torch.int64) + offset,
        "progress": {"loss": 1.5 + offset, "best": float("inf") if offset == 0 else 0.0},
    }
