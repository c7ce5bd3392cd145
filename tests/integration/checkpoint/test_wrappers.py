"""Tests of modules that wrap a model: its checkpoint does not depend on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from keepstep import checkpoint
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.live.capture import LiveStateReader
from tests.ranks import act_in_groups, run_ranks


class Model(nn.Module):
    """Has a buffer, a tied parameter, and a module whose own name is a wrapper's."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(5, 7)
        self.module = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 5, bias=False)
        self.tied = nn.Linear(7, 5, bias=False)
        self.tied.weight = self.head.weight


def wrapped(kind: str, seed: int) -> nn.Module:
    model: nn.Module = Model(seed)
    if "checkpoint" in kind:
        model.up = checkpoint_wrapper(model.up)
    if "inner" in kind:
        model.head = DistributedDataParallel(model.head)
    if "ddp" in kind:
        model = DistributedDataParallel(model)
    if "compile" in kind:
        model = torch.compile(model, backend="eager")
    return model


KINDS = ("ddp", "compile", "checkpoint", "inner", "compile ddp checkpoint")


def stepped(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Return an optimizer that has done a step, the same whatever the wrapper."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    return optimizer


def check_equal(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    expected = Model(0)
    expected_optimizer = stepped(expected, lr=0.1)
    for got, want in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(got, want)
        for slot, value in expected_optimizer.state[want].items():
            assert torch.equal(optimizer.state[got][slot], value), slot
    assert optimizer.param_groups[0]["lr"] == 0.1


def run(rank: int, root: str) -> None:
    def act() -> None:
        for kind in KINDS:
            model = wrapped(kind, 0)
            state = {"model": model, "optimizer": stepped(model, lr=0.1)}
            checkpoint.save(f"{root}/{kind}", state, step=1)
            model = wrapped(kind, 1)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
            checkpoint.load(f"{root}/bare", {"model": model, "optimizer": optimizer})
            check_equal(model, optimizer)
            # What was found once is not looked for again at every step of a job.
            reader = LiveStateReader(model, [optimizer])
            reader.capture()
            assert reader._scanned is not None
            assert reader._scanned.is_current

    act_in_groups(rank, root, (2, act))


def saved_state(source: StoredCheckpoint) -> dict[str, Any]:
    """Return a checkpoint's documents but for where it comes from: two ranks, here."""
    return {name: value for name, value in source.documents.items() if name != "provenance"}


def test_wrapped_models_are_saved_and_loaded_as_the_bare_one(tmp_path: Path) -> None:
    model = Model(0)
    state = {"model": model, "optimizer": stepped(model, lr=0.1)}
    checkpoint.save(f"{tmp_path}/bare", state, step=1)
    run_ranks(run, args=(str(tmp_path),), nprocs=2)
    bare = StoredCheckpoint.open(open_storage(f"{tmp_path}/bare"))
    for kind in KINDS:
        stored = StoredCheckpoint.open(open_storage(f"{tmp_path}/{kind}"))
        assert stored.stored_tensors.keys() == bare.stored_tensors.keys(), kind
        assert saved_state(stored) == saved_state(bare), kind
        model = Model(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        checkpoint.load(f"{tmp_path}/{kind}", {"model": model, "optimizer": optimizer})
        check_equal(model, optimizer)


class Parallel(nn.Module):
    """Names tensors as the release before stored them for `DistributedDataParallel`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Model(0)


@pytest.mark.parametrize("load_wrapped", [False, True])
def test_a_checkpoint_with_names_of_a_wrapper_loads(tmp_path: Path, load_wrapped: bool) -> None:
    saved = Parallel()
    state = {"model": saved, "optimizer": stepped(saved, lr=0.1)}
    checkpoint.save(str(tmp_path), state, step=1)
    model = torch.compile(Model(1), backend="eager") if load_wrapped else Model(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    checkpoint.load(str(tmp_path), {"model": model, "optimizer": optimizer})
    check_equal(model, optimizer)
    same = Parallel()
    same_optimizer = torch.optim.AdamW(same.parameters(), lr=1.0)
    checkpoint.load(str(tmp_path), {"model": same, "optimizer": same_optimizer})
    check_equal(same, same_optimizer)
