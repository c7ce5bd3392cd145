"""Values beside the shards: the first rank's are carried, and what others have is not silent."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.pickled_values import Record
from keepstep.checkpoint.convert.read.sharded_files import _local_part
from keepstep.checkpoint.errors import FormatUnsupported
from keepstep.checkpoint.format.layout.location import Format
from tests.opened_checkpoints import open_foreign


def opened(directory: Path, *states: dict[str, Any]) -> ForeignCheckpoint:
    for rank, state in enumerate(states):
        torch.save(state, directory / f"state_rank{rank}.pt")
    return open_foreign(str(directory), Format.TORCH_SHARDS)


def state_of(rank: int, parted: int) -> dict[str, Any]:
    """Return a state that is the same on all ranks but for what differs by `parted`."""
    return {
        "model": {"w": torch.ones(3)},
        "step": 5,
        "nan": float("nan"),
        "rng": {"python": random.Random(parted).getstate(), "torch": torch.full((9,), parted)},
        "numpy": np.arange(3) + parted,
        "args": argparse.Namespace(rank=parted),
        "samples": list(range(parted + 1)),
    }


def test_values_that_differ_by_rank_are_left_out_by_name(tmp_path: Path) -> None:
    source = opened(tmp_path, state_of(0, 0), state_of(1, 1))
    names = ("rng.python", "rng.torch", "numpy", "args", "samples")
    assert [(item.name, item.reason) for item in source.left_out] == [
        (f"{name} of other ranks", "ranks have different values, and the first rank's is carried")
        for name in names
    ]
    assert source.documents["values"]["samples"] == [0]


def test_values_that_are_the_same_on_all_ranks_are_carried(tmp_path: Path) -> None:
    assert opened(tmp_path, state_of(0, 2), state_of(1, 2)).left_out == ()


def test_optimizer_is_not_named_by_an_order_that_ranks_do_not_share(tmp_path: Path) -> None:
    slots = {number: {"momentum_buffer": torch.ones(number + 2)} for number in range(3)}
    optimizer = {"state": slots, "param_groups": [{"params": [0, 1, 2]}]}
    whole = {name: torch.ones(number + 2) for number, name in enumerate("abc")}
    stage = {name: whole[name] for name in "ac"}
    states = [{"model": model, "optimizer": optimizer} for model in (stage, whole)]
    assert [item.name for item in opened(tmp_path, *states).left_out] == ["optimizer"]
    assert opened(tmp_path, states[1], states[1]).left_out == ()


@pytest.mark.parametrize("axes", [Record("torch.Size"), None, 3])
def test_a_mesh_without_a_list_of_axes_is_refused(axes: object) -> None:
    layout = Record("torch.distributed._Layout", state={"axes": axes})
    mesh = Record("DeviceMesh", state={"_layout": layout, "_coordinate_on_dim": ()})
    spec = Record("DTensorSpec", state={"mesh": mesh, "placements": ()})
    value = Record("DTensor", state={"_local_tensor": None, "_spec": spec})
    with pytest.raises(FormatUnsupported, match="does not say where its shards are"):
        list(_local_part(value, (2,), "w", "a.pt"))
