"""Defines a small transformer that any layout can divide, and sequences that it can learn.

A rank's parameters have their names in the whole model, so its state moves from one layout to any
other.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import keepstep


@dataclass(frozen=True, slots=True)
class Config:
    vocabulary: int = 64
    length: int = 32
    width: int = 32
    heads: int = 4
    layers: int = 4
    experts: int = 0


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # As many heads as this rank's part of the weights has.
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return causal attention; each argument has shape (samples, heads, length, width)."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """A mixture of experts: each token goes to the one expert that the router prefers."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.up = nn.Parameter(torch.empty(config.experts, config.width, 2 * config.width))
        self.down = nn.Parameter(torch.empty(config.experts, 2 * config.width, config.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        gate, expert = self.router(tokens).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = expert.bincount(minlength=self.router.out_features)
        computed = self.dispatch(tokens[order], counts)
        return (computed[order.argsort()] * gate[:, None]).view_as(x)

    def dispatch(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Compute tokens that are ordered by expert: `counts[e]` of them for expert e."""
        parts = zip(tokens.split(counts.tolist()), self.up, self.down, strict=True)
        return torch.cat([F.gelu(part @ up) @ down for part, up, down in parts])


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = Experts(config) if config.experts else MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """The whole model, or the part of it that has these layers.

    Args:
        config: the whole model's.
        layers: numbers of the layers; None: all. The first one comes with the embeddings, the last
            one with the head.
    """

    def __init__(self, config: Config, layers: range | None = None) -> None:
        super().__init__()
        numbers = range(config.layers) if layers is None else layers
        if 0 in numbers:
            self.tokens = nn.Embedding(config.vocabulary, config.width)
            self.positions = nn.Embedding(config.length, config.width)
        # A dictionary, so that a layer's name has its number in the whole model.
        self.layers = nn.ModuleDict({str(number): Block(config) for number in numbers})
        if config.layers - 1 in numbers:
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits of tokens; a part takes the result of the part before it.

        Args:
            x: int64 of shape (samples, length).
            positions: of the tokens, in the same shape; None: from 0 on.
        """
        if hasattr(self, "tokens"):
            if positions is None:
                positions = torch.arange(x.shape[1], device=x.device).expand(x.shape)
            x = self.tokens(x) + self.positions(positions)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def initialize(model: nn.Module) -> None:
    """Initialize each parameter by its name: the values do not depend on the layout."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            value = torch.full(parameter.shape, float("norm" in name and "weight" in name))
            if parameter.dim() > 1:
                value.normal_(0.0, 0.1, generator=generator)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                # Every rank has the same full tensor, so each can cut out its own shard.
                value = distribute_tensor(
                    value.to(parameter.device), mesh, placements, src_data_rank=None
                )
            parameter.copy_(value)


class Sequences:
    """Arithmetic sequences modulo the vocabulary: inputs, and the same one token later."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        first, stride = number % 61, 1 + number % 5
        tokens = (first + stride * torch.arange(self._config.length + 1)) % self._config.vocabulary
        return tokens[:-1], tokens[1:]


def report(job: keepstep.Job, loss: torch.Tensor) -> None:
    """Print the loss of the step that the job has just completed."""
    print(f"step {job.steps}  loss {loss.item():.6f}  ranks {job.world.world_size}", flush=True)
