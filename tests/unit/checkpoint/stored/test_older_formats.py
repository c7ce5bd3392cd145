"""Tests of checkpoints that earlier releases wrote: they are read, verified, and copied as new."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch
import zarr
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint.stored.housekeeping import Difference, compare, copy
from keepstep.checkpoint.stored.manifest import VERSION, Manifest
from keepstep.checkpoint.stored.reader import StoredCheckpoint
from keepstep.checkpoint.stored.storage import open_storage
from tests.unit.checkpoint.stored.older_formats import new_state, put_format, train

OLDER = [1, 2]


@pytest.fixture(params=OLDER)
def url(request: pytest.FixtureRequest) -> str:
    url = f"memory://{uuid.uuid4().hex}"
    put_format(url, request.param)
    return url


def assert_holds(url: str) -> None:
    expected, filled = new_state(), new_state()
    train(expected)
    filled["extra"], filled["loss"] = torch.zeros(7, dtype=torch.int64), 0.0
    assert checkpoint.load(url, filled) == 30
    for name in ("model", "optimizer"):
        holders = expected[name], filled[name]
        wanted, got = (
            holder.state_dict()
            for holder in holders
            if isinstance(holder, nn.Module | torch.optim.Optimizer)
        )
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert isinstance(filled["extra"], torch.Tensor)
    assert filled["extra"].tolist() == list(range(7))
    assert filled["loss"] == 1.5


def test_what_an_older_release_wrote_is_verified_and_loaded(url: str) -> None:
    StoredCheckpoint.open(url).verify()
    assert_holds(url)


def test_a_copy_is_of_this_format_and_holds_the_same(url: str) -> None:
    target = f"memory://{uuid.uuid4().hex}"
    copied = copy(StoredCheckpoint.open(url), target)
    content = open_storage(target).read(f"{copied.directory}/manifest.json")
    assert Manifest.decode(content, "").encode() == content, "it is written as of this format"
    assert f'"format":{VERSION}'.encode() in content
    source, opened = StoredCheckpoint.open(url), StoredCheckpoint.open(target)
    opened.verify()
    difference = compare(source, opened)
    assert difference == Difference((), (), {}, ())
    assert_holds(target)


@pytest.mark.parametrize("number", OLDER)
def test_zarr_reads_an_older_format(tmp_path: Path, number: int) -> None:
    put_format(str(tmp_path), number)
    opened = StoredCheckpoint.open(str(tmp_path))
    group = zarr.open_group(str(tmp_path / opened.directory), mode="r")
    expected = new_state()
    train(expected)
    model = expected["model"]
    assert isinstance(model, nn.Module)
    for name, value in model.state_dict().items():
        read = torch.from_numpy(group[f"model/{name}"][:].astype("float32"))
        assert torch.equal(read, value.float())
