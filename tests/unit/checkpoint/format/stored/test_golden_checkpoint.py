"""Tests of a checkpoint that was written once: every later build must read its files."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch
import zarr
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from keepstep import checkpoint
from keepstep.checkpoint import Descriptions
from keepstep.checkpoint.format.stored.housekeeping import Difference, compare, copy
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.unit.checkpoint.format.stored.golden_checkpoint import (
    DESCRIPTIONS,
    QKV,
    VOCABULARY,
    DescribedModel,
    described_state,
    put_golden,
)


def golden_url() -> str:
    url = f"memory://{uuid.uuid4().hex}"
    put_golden(url)
    return url


def model_of(state: dict[str, object]) -> nn.Module:
    model = state["model"]
    assert isinstance(model, nn.Module)
    return model


def assert_holds(url: str) -> None:
    expected, filled = described_state(0), described_state(100)
    assert checkpoint.load(url, filled, descriptions=DESCRIPTIONS) == 30
    for name in ("model", "optimizer"):
        holders = expected.pop(name), filled.pop(name)
        wanted, got = (
            holder.state_dict()
            for holder in holders
            if isinstance(holder, nn.Module | torch.optim.Optimizer)
        )
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    wanted, got = (state.pop("extra") for state in (expected, filled))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert filled == expected, "the other values"


def test_it_is_of_the_format_that_is_written() -> None:
    source = StoredCheckpoint.open(open_storage(golden_url()))
    path = f"{source.stored.directory}/manifest.json"
    assert source.storage.read(path) == source.manifest.encode()


def test_it_is_verified_and_loaded() -> None:
    url = golden_url()
    StoredCheckpoint.open(open_storage(url)).verify()
    assert_holds(url)


def test_a_copy_holds_the_same() -> None:
    url, target = golden_url(), f"memory://{uuid.uuid4().hex}"
    source = StoredCheckpoint.open(open_storage(url))
    copy(source, open_storage(target))
    opened = StoredCheckpoint.open(open_storage(target))
    opened.verify()
    assert opened.manifest.objects == source.manifest.objects
    assert compare(source, opened) == Difference((), (), {}, ())
    assert_holds(target)


def test_zarr_reads_it(tmp_path: Path) -> None:
    put_golden(str(tmp_path))
    opened = StoredCheckpoint.open(open_storage(str(tmp_path)))
    group = zarr.open_group(str(tmp_path / opened.directory), mode="r")
    for name, value in model_of(described_state(0)).named_parameters():
        read = torch.from_numpy(group[f"model/{name}"][:].astype("float32"))
        assert torch.equal(read, value.float())


def test_it_has_packed_arrays_and_chunks_with_and_without_compression() -> None:
    stored = StoredCheckpoint.open(open_storage(golden_url())).stored_tensors
    kinds = {
        name: (stored[f"model/{name}.weight"].is_packed, stored[f"model/{name}.weight"].compression)
        for name in ("qkv", "large", "half")
    }
    assert kinds == {"qkv": (True, None), "large": (False, None), "half": (False, "zstd")}
    assert stored["model/large.weight"].grid == (2, 1)


def test_it_says_what_its_tensors_are() -> None:
    documents = StoredCheckpoint.open(open_storage(golden_url())).documents
    assert documents["parts"] == dict.fromkeys(
        ("model/qkv.weight", "model/qkv.bias"), QKV.to_json()
    )
    assert documents["padding"] == {"model/embed.weight": {"logical_shape": [VOCABULARY, 6]}}
    assert documents["model/tied"] == {"head.weight": "embed.weight"}
    assert documents["config"] == {"hidden": 6}
    assert documents["provenance"]["world_size"] == 2


def test_it_is_loaded_without_padding_and_without_the_tie() -> None:
    expected = model_of(described_state(0))
    filled = DescribedModel(rows=VOCABULARY, is_tied=False)
    described = Descriptions(padding={"embed.weight": (VOCABULARY, 6)})
    checkpoint.load(golden_url(), {"model": filled}, strict=False, descriptions=described)
    assert isinstance(expected, DescribedModel)
    wanted = expected.embed.weight[:VOCABULARY]
    assert torch.equal(filled.embed.weight, wanted)
    assert torch.equal(filled.head.weight, wanted)


@pytest.mark.parametrize(
    ("rank", "rows"),
    [
        (0, [0, 1, 2, 3, 8, 9, 10, 11]),
        (1, [4, 5, 6, 7, 8, 9, 10, 11]),
        (2, [12, 13, 14, 15, 20, 21, 22, 23]),
        (3, [16, 17, 18, 19, 20, 21, 22, 23]),
    ],
)
def test_it_is_loaded_in_slices_of_its_parts(rank: int, rows: list[int]) -> None:
    """Two of four ranks share a group, which has 8 rows of q, 2 of k and 2 of v."""
    whole = model_of(described_state(0)).get_parameter("qkv.weight").detach()
    mesh = DeviceMesh(
        "cpu", torch.arange(4), mesh_dim_names=("tp",), _init_backend=False, _rank=rank
    )
    local = torch.zeros(8, 6)
    sliced = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size((32, 6)), stride=(6, 1)
    )
    state = {"model/qkv.weight": sliced}
    checkpoint.load(golden_url(), state, strict=False, descriptions=DESCRIPTIONS)
    assert torch.equal(local, whole[rows])
