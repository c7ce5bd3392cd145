"""A small trained model with tied weights, for tests."""

from __future__ import annotations

import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight


def trained(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tied, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Tied().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer
