"""Checkpoints in memory, with what formats lose: ties, masters, frozen parameters, odd sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keepstep.checkpoint.convert.read.arrays import MemoryArray
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.pieces import whole
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.source import BoxRequest, Source

SHAPES = {
    "embed.weight": (11, 6),
    "norm.weight": (5,),
    "odd.weight": (7, 5),
    "bias": (3,),
    "deep.weight": (2, 3, 4),
    "scale": (),
}
# Not the order of the module, as where what is not decayed comes first.
GROUPS = (("norm.weight", "bias", "scale"), ("embed.weight", "odd.weight", "deep.weight"))


def checkpoint_of(
    *, is_tied: bool, dtype: str = "float32", values: Mapping[str, Any] | None = None
) -> ForeignCheckpoint:
    """Return the state of a run after three steps of Adam.

    Args:
        is_tied: `head.weight` is `embed.weight`; else it is a parameter of its own.
        dtype: of the module; if it is not float32, the optimizer has masters.
        values: further values by name.
    """
    random = np.random.default_rng(3)
    shapes = dict(SHAPES)
    groups = [list(group) for group in GROUPS]
    if not is_tied:
        shapes["head.weight"] = (11, 6)
        groups[1].append("head.weight")
    arrays: dict[str, np.ndarray] = {
        "model/frozen.weight": random.normal(size=(3, 11)).astype(numpy_dtype(dtype)),
        "model/norm.running_mean": random.normal(size=5).astype(numpy_dtype(dtype)),
        "model/seen": np.arange(5),
        "model/none": np.zeros((0, 4), np.float32),
        "ema/embed.weight": random.normal(size=(11, 6)),
        "rng": np.arange(7, dtype=np.uint8),
    }
    masters = {}
    for name, shape in shapes.items():
        master = np.asarray(random.normal(size=shape), np.float32)
        arrays[f"model/{name}"] = np.asarray(master.astype(numpy_dtype(dtype)))
        if dtype != "float32":
            arrays[f"optim/{name}/master_param"] = master
            masters[f"model/{name}"] = {"slot": "master_param", "dtype": "float32"}
        for slot in ("exp_avg", "exp_avg_sq"):
            arrays[f"optim/{name}/{slot}"] = np.asarray(random.normal(size=shape), np.float32)
        arrays[f"optim/{name}/step"] = np.asarray(3, np.float32)
    documents: dict[str, Any] = {
        "optim/groups": [
            {"parameters": members, "options": {"lr": lr, "betas": [0.9, 0.95], "foreach": None}}
            for members, lr in zip(groups, (0.01, 0.02), strict=True)
        ],
        "values": {"epoch": 2, "lr_scheduler/last_epoch": 3, **(values or {})},
    }
    if is_tied:
        documents["model/tied"] = {"head.weight": "embed.weight"}
    if masters:
        documents["masters"] = masters
    return ForeignCheckpoint(
        url="memory",
        format_name="memory",
        step=3,
        foreign_tensors={
            key: whole(MemoryArray(array.dtype.name, array, key)) for key, array in arrays.items()
        },
        documents=documents,
    )


def bytes_of(source: Source, key: str) -> bytes:
    """Return a tensor's elements in C order."""
    spec = source.tensors[key]
    values = bytearray(Box.whole(spec.shape).size * numpy_dtype(spec.dtype).itemsize)
    source.read([BoxRequest(key, Box.whole(spec.shape), memoryview(values))])
    return bytes(values)
