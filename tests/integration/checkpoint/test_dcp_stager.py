"""Tests of the stager for `dcp.async_save`, between real processes, and what it keeps of a state.

Each save is written while training changes the tensors, and while the next one begins.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from keepstep import checkpoint
from keepstep.checkpoint import dcp_stager
from keepstep.checkpoint.dcp import Reader, Writer
from keepstep.checkpoint.dcp_stager import Stager
from keepstep.checkpoint.errors import CheckpointError
from tests.ranks import act_in_groups, run_ranks

SAVES = 4
WIDTH = 512


def trained(number: int) -> dict[str, Any]:
    """Return the state of a model under FSDP2, the same at each call."""
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = (parameter.detach() * 0.5).contiguous()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state, "epoch": number}


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from tensors(item, f"{path}.{name}".removeprefix("."))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def values(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: local(tensor).clone() for name, tensor in tensors(state)}


def save_and_train(root: str, where: AsyncCheckpointerType) -> None:
    """Save without waiting for the saves before, each in a group of its own, and change all."""
    state, stager = trained(0), Stager()
    groups = [dist.new_group() for _ in range(SAVES)]
    in_turn = where == AsyncCheckpointerType.PROCESS
    expected, uploads = [], []
    for step, group in enumerate(groups):
        state["epoch"] = step
        expected.append(values(state))
        uploads.append(
            dcp.async_save(
                state,
                storage_writer=Writer(f"{root}/run", step=step),
                process_group=groups[0] if in_turn else group,
                async_checkpointer_type=where,
                async_stager=stager,
            )
        )
        for _, tensor in tensors(state):
            local(tensor).add_(1)
        if in_turn:
            uploads[-1].result()
    for upload in uploads:
        upload.result()
    stager.close()
    dist.barrier()
    for step, saved in enumerate(expected):
        loaded = trained(1)
        dcp.load(loaded, storage_reader=Reader(f"{root}/run", step=step))
        assert loaded["epoch"] == step
        check_equal(saved, values(loaded))
        flat = dict(tensors(trained(2)))
        checkpoint.load(f"{root}/run", flat, step=step)
        check_equal(saved, {name: local(tensor) for name, tensor in flat.items()})


def check_equal(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def run(rank: int, root: str, where: AsyncCheckpointerType) -> None:
    act_in_groups(rank, root, (2, partial(save_and_train, root, where)))


@pytest.mark.parametrize("where", AsyncCheckpointerType, ids=lambda where: where.value)
def test_what_training_changes_after_async_save_returned_is_not_in_the_checkpoint(
    where: AsyncCheckpointerType, tmp_path: Path
) -> None:
    run_ranks(run, args=(str(tmp_path), where), nprocs=2)


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


def odd_state() -> dict[str, Any]:
    weight = torch.arange(6.0).reshape(2, 3)
    return {
        "plain": weight,
        "tied": weight.detach(),
        "transposed": weight.t(),
        "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "expanded": torch.ones(1).expand(3),
        "packed": torch.arange(8, dtype=torch.uint8).view(2, 4).view(torch.float4_e2m1fn_x2),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 4),
        "sparse": torch.eye(3).to_sparse(),
        "parameter": nn.Parameter(torch.ones(2)),
        "deep": [{"list": (torch.full((2,), 5.0), "text", None)}, Pair(torch.ones(1), 2)],
        "number": 4,
    }


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return [value]
    return [leaf for item in value for leaf in leaves(item)]


def test_every_kind_of_value_is_copied_as_it_is() -> None:
    state = odd_state()
    expected = odd_state()
    staged = Stager().stage(state)
    for name in ("plain", "conjugated", "scalar", "parameter"):
        state[name].detach().zero_()
    state["packed"].view(torch.uint8).zero_()
    state["sparse"].zero_()
    state["deep"][0]["list"][0].zero_()
    assert staged.keys() == expected.keys()
    assert type(staged["deep"][1]) is Pair
    for want, got in zip(leaves(expected), leaves(staged), strict=True):
        if not isinstance(want, torch.Tensor):
            assert want == got
        elif want.dtype == torch.float4_e2m1fn_x2:
            assert torch.equal(want.view(torch.uint8), got.view(torch.uint8))
        else:
            assert torch.equal(want.to_dense(), got.to_dense())
            assert want.dtype == got.dtype
    assert staged["plain"].data_ptr() == staged["tied"].data_ptr()


def test_memory_is_used_again_once_a_save_is_over() -> None:
    stager, state = Stager(), {"x": torch.ones(1000), "y": torch.zeros(3)}
    first = stager.stage(state)
    place = first["x"].data_ptr()
    second = stager.stage({"x": torch.zeros(1000), "y": torch.ones(3)})
    assert torch.equal(first["x"], torch.ones(1000))
    assert second["x"].data_ptr() != place
    kept = first["y"]
    del first
    assert stager.stage(state)["x"].data_ptr() != place, "y is left"
    del kept
    assert stager.stage(state)["x"].data_ptr() == place


def test_memory_is_freed_with_the_stager() -> None:
    descriptors = psutil.Process().num_fds
    before = descriptors()
    stager = Stager()
    staged = stager.stage({"x": torch.ones(1000)})
    assert descriptors() > before
    stager.stage({"x": torch.ones(10)})
    stager.close()
    assert torch.equal(staged["x"], torch.ones(1000)), "a save in progress keeps its memory"
    del staged
    assert descriptors() == before
    assert torch.equal(stager.stage({"x": torch.ones(3)})["x"], torch.ones(3))
    del stager
    gc.collect()
    assert descriptors() == before


def test_a_state_of_another_size_gets_other_memory() -> None:
    stager, descriptors = Stager(), set()
    for count in (10, 1000, 1_000_000):
        assert stager.stage({"x": torch.full((count,), 2.0)})["x"].sum() == 2 * count
        descriptors.add(psutil.Process().num_fds())
    assert len(descriptors) == 1, "the memory before is freed"


def test_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_stager, "available_nbytes", lambda: 3999)
    with pytest.raises(CheckpointError, match=r"4032 bytes .* has 3999 left; save with dcp\.save"):
        Stager().stage({"x": torch.ones(1000)})
