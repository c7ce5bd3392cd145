"""Tests of checkpoints that the release of each format wrote: later releases must read them.

Their files are never changed or made anew: a release of a new format adds its own.
"""

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
from keepstep.checkpoint.format.stored.manifest import VERSION, Manifest
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.unit.checkpoint.format.stored.stored_formats import (
    DESCRIPTIONS,
    QKV,
    ROOT,
    VOCABULARY,
    DescribedModel,
    described_state,
    new_state,
    put_format,
    train,
)

FORMATS = [1, 2, 3]


def url_of(number: int) -> str:
    url = f"memory://{uuid.uuid4().hex}"
    put_format(url, number)
    return url


def saved_state(number: int) -> dict[str, object]:
    """Return the state that the checkpoint of a format holds."""
    if number == 3:
        return described_state(0)
    state = new_state()
    train(state)
    return state


def other_state(number: int) -> dict[str, object]:
    """Return a state of the same names with nothing of what the checkpoint of a format holds."""
    if number == 3:
        return described_state(100)
    return {**new_state(), "extra": torch.zeros(7, dtype=torch.int64), "loss": 0.0}


def model_of(state: dict[str, object]) -> nn.Module:
    model = state["model"]
    assert isinstance(model, nn.Module)
    return model


def assert_holds(url: str, number: int) -> None:
    expected, filled = saved_state(number), other_state(number)
    descriptions = DESCRIPTIONS if number == 3 else Descriptions()
    assert checkpoint.load(url, filled, descriptions=descriptions) == 30
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


def test_each_format_has_a_checkpoint_that_its_release_wrote() -> None:
    assert list(range(1, VERSION + 1)) == FORMATS
    assert sorted(path.name for path in ROOT.iterdir()) == sorted(map(str, FORMATS))


@pytest.mark.parametrize("number", FORMATS)
def test_what_the_release_of_a_format_wrote_is_verified_and_loaded(number: int) -> None:
    url = url_of(number)
    StoredCheckpoint.open(url).verify()
    assert_holds(url, number)


@pytest.mark.parametrize("number", FORMATS)
def test_a_copy_is_of_this_format_and_holds_the_same(number: int) -> None:
    url, target = url_of(number), f"memory://{uuid.uuid4().hex}"
    copied = copy(StoredCheckpoint.open(url), target)
    content = open_storage(target).read(f"{copied.directory}/manifest.json")
    assert Manifest.decode(content, "").encode() == content, "it is written as of this format"
    assert f'"format":{VERSION}'.encode() in content
    source, opened = StoredCheckpoint.open(url), StoredCheckpoint.open(target)
    opened.verify()
    difference = compare(source, opened)
    assert difference == Difference((), (), {}, ())
    assert_holds(target, number)


@pytest.mark.parametrize("number", FORMATS)
def test_zarr_reads_each_format(tmp_path: Path, number: int) -> None:
    put_format(str(tmp_path), number)
    opened = StoredCheckpoint.open(str(tmp_path))
    group = zarr.open_group(str(tmp_path / opened.directory), mode="r")
    for name, value in model_of(saved_state(number)).named_parameters():
        read = torch.from_numpy(group[f"model/{name}"][:].astype("float32"))
        assert torch.equal(read, value.float())


def test_format_3_has_packed_arrays_and_chunks_with_and_without_compression() -> None:
    stored = StoredCheckpoint.open(url_of(3)).stored_tensors
    kinds = {
        name: (stored[f"model/{name}.weight"].is_packed, stored[f"model/{name}.weight"].compression)
        for name in ("qkv", "large", "half")
    }
    assert kinds == {"qkv": (True, None), "large": (False, None), "half": (False, "zstd")}
    assert stored["model/large.weight"].grid == (2, 1)


def test_format_3_says_what_its_tensors_are() -> None:
    documents = StoredCheckpoint.open(url_of(3)).documents
    assert documents["parts"] == dict.fromkeys(
        ("model/qkv.weight", "model/qkv.bias"), QKV.to_json()
    )
    assert documents["padding"] == {"model/embed.weight": {"logical_shape": [VOCABULARY, 6]}}
    assert documents["model/tied"] == {"head.weight": "embed.weight"}
    assert documents["config"] == {"hidden": 6}
    assert documents["provenance"]["world_size"] == 2


def test_format_3_is_loaded_without_padding_and_without_the_tie() -> None:
    expected = model_of(saved_state(3))
    filled = DescribedModel(rows=VOCABULARY, is_tied=False)
    described = Descriptions(padding={"embed.weight": (VOCABULARY, 6)})
    checkpoint.load(url_of(3), {"model": filled}, strict=False, descriptions=described)
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
def test_format_3_is_loaded_in_slices_of_its_parts(rank: int, rows: list[int]) -> None:
    """Two of four ranks share a group, which has 8 rows of q, 2 of k and 2 of v."""
    whole = model_of(saved_state(3)).get_parameter("qkv.weight").detach()
    mesh = DeviceMesh(
        "cpu", torch.arange(4), mesh_dim_names=("tp",), _init_backend=False, _rank=rank
    )
    local = torch.zeros(8, 6)
    sliced = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size((32, 6)), stride=(6, 1)
    )
    state = {"model/qkv.weight": sliced}
    checkpoint.load(url_of(3), state, strict=False, descriptions=DESCRIPTIONS)
    assert torch.equal(local, whole[rows])
