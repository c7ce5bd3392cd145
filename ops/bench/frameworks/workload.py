"""Defines what the scripts of integrations.py train, and records each step of theirs.

The number of steps is in the model's state, so that a step is recorded where the state is, however
a framework counts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset

from ops.bench.frameworks.plan import SAMPLES
from ops.bench.frameworks.record import end_step, read

DIRECTORY = Path(sys.argv[1])
_ROWS, _WIDTH = 32, 256


class Rows(Dataset[dict[str, Any]]):
    """Samples that say their index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        return {"index": index, "rows": torch.randn(_ROWS, _WIDTH, generator=generator)}


class Model(nn.Module):
    """Learns to return its input, and counts the steps that its optimizer has made."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(
                layer
                for _ in range(2)
                for layer in (
                    nn.Linear(_WIDTH, 4 * _WIDTH),
                    nn.GELU(),
                    nn.Linear(4 * _WIDTH, _WIDTH),
                )
            )
        )
        self.register_buffer("completed", torch.zeros((), dtype=torch.int64))
        register_optimizer_step_post_hook(self._record)

    def forward(self, index: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        read.extend(index.tolist())
        return {"loss": (self.net(rows) - rows).square().mean()}

    def _record(self, *_: Any) -> None:
        self.completed += 1
        end_step(DIRECTORY, int(self.completed))
