"""Measures a checkpoint in a container of Azurite, which runs on this machine.

save_s, load_s    of `nbytes` in sixteen tensors; each is stored once and loaded once
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from keepstep import checkpoint
from ops.local_azurite import azurite
from ops.local_azurite import not_installed as not_installed

_TENSORS, _ROWS, _COLUMNS = 16, 1024, 3072


def measure(directory: Path, *, quick: bool) -> dict[str, Any]:
    saves, loads = [], []
    torch.manual_seed(0)
    model = {f"weight{number}": torch.randn(_ROWS, _COLUMNS) for number in range(_TENSORS)}
    directory.mkdir(exist_ok=True)
    with azurite(directory) as container:
        for step in range(1 if quick else 3):
            url = f"{container}/run{step}"
            begun_s = time.monotonic()
            checkpoint.save(url, {"model": model}, step=step)
            saved_s = time.monotonic()
            restored = {name: torch.zeros_like(value) for name, value in model.items()}
            loaded_s = time.monotonic()
            checkpoint.load(url, {"model": restored})
            loads.append(time.monotonic() - loaded_s)
            saves.append(saved_s - begun_s)
            assert all(torch.equal(restored[name], model[name]) for name in model)
    nbytes = sum(value.nbytes for value in model.values())
    return {
        "save_s": round(statistics.median(saves), 2),
        "load_s": round(statistics.median(loads), 2),
        "nbytes": nbytes,
    }
