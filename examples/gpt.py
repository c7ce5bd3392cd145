"""Defines a small byte-level GPT that is built on the meta device and sharded without memory."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(frozen=True, slots=True)
class GPTConfig:
    vocabulary: int = 256
    context: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.norm_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(
            batch, length, 3, self.heads, width // self.heads
        )
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self._drop(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self._drop(self.down(F.gelu(self.up(self.norm_mlp(x)))))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the mean cross-entropy of a batch.

        Args:
            batch: inputs and targets, each int64 of shape (samples, length).
        """
        inputs, targets = batch
        x = self.tokens(inputs) + self.positions(
            torch.arange(inputs.shape[1], device=inputs.device)
        )
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def initialize(model: nn.Module, seed: int = 0) -> None:
    """Initialize the parameters, each with its own generator.

    The values do not depend on the sharding or on the order of parameters.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
            value = torch.empty(parameter.shape)
            if parameter.dim() > 1:
                value.normal_(0.0, 0.02, generator=generator)
            else:
                value.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            if isinstance(parameter, DTensor):
                # Every rank has the same full tensor, so each can cut out its own shard.
                value = distribute_tensor(
                    value.to(parameter.device),
                    parameter.device_mesh,
                    parameter.placements,
                    src_data_rank=None,
                )
            parameter.copy_(value)
