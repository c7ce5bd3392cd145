"""Tests of stored checkpoints in one process: other readers, crashes, damage, partial reads."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import pytest
import tensorstore
import torch
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointExists,
    CheckpointMissing,
    CheckpointTooNew,
)
from keepstep.checkpoint.format.layout.boxes import Box, Entry, ShardIndex
from keepstep.checkpoint.format.layout.source import BoxRequest
from keepstep.checkpoint.format.stored import cell_reads
from keepstep.checkpoint.format.stored.chunking import plan_chunks
from keepstep.checkpoint.format.stored.manifest import COMPRESSED_CELLS
from keepstep.checkpoint.format.stored.object_names import Attempt, StoredStep
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import list_steps, newest
from keepstep.checkpoint.format.stored.storage import Storage, open_storage
from keepstep.checkpoint.format.stored.stored_json import encode
from keepstep.checkpoint.format.stored.writer import write_part
from keepstep.checkpoint.live.tensors import as_bytes
from tests.integration.checkpoint.tied import Tied, trained


class CountingStorage:
    """A storage that counts the bytes read from it."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.nbytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    def read_into(self, name: str, buffers: Sequence[memoryview], offset: int = 0) -> int:
        count = self.storage.read_into(name, buffers, offset)
        self.nbytes += count
        return count


def directory_of(root: Path, step: int) -> str:
    """Return where the objects of a checkpoint lie."""
    return StoredCheckpoint.open(open_storage(str(root)), step).directory


def objects(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_and_optimizer_are_restored_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    model, optimizer = trained(0, dtype)
    checkpoint.save(str(tmp_path), {"model": model, "optimizer": optimizer}, step=3)
    other = Tied().to(dtype)
    fresh = torch.optim.AdamW(other.parameters(), lr=9.0)
    assert checkpoint.load(str(tmp_path), {"model": other, "optimizer": fresh}) == 3
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert other.head.weight is other.embedding.weight
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert fresh.param_groups[0]["betas"] == (0.9, 0.999)
    for old, new in zip(model.parameters(), other.parameters(), strict=True):
        for slot, value in optimizer.state[old].items():
            assert torch.equal(fresh.state[new][slot], value), slot
            assert fresh.state[new][slot].dtype == value.dtype


def test_tied_weights_are_stored_once_even_if_they_are_two_parameters(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    model[1].weight = nn.Parameter(model[0].weight.data)
    checkpoint.save(str(tmp_path), {"model": model}, step=1)
    assert list(StoredCheckpoint.open(open_storage(str(tmp_path))).tensors) == ["model/0.weight"]


def test_zarr_reads_a_checkpoint_without_importing_keepstep(tmp_path: Path) -> None:
    """Entry points give zarr the extensions that it needs."""
    model, optimizer = trained(0)
    state = {
        "model": model,
        "optimizer": optimizer,
        "large": torch.randn(1301, 577),
        "half": torch.randn(1301, 577).bfloat16(),
        "eighth": torch.randn(7).to(torch.float8_e4m3fn),
    }
    checkpoint.save(str(tmp_path), state, step=3)
    code = (
        "import sys, numpy, zarr\n"
        "group = zarr.open(sys.argv[1], mode='r')\n"
        "assert group.attrs['keepstep']['step'] == 3\n"
        "assert not {'torch', 'keepstep.checkpoint.format.stored.reader'} & set(sys.modules)\n"
        "nodes = dict(group.members(max_depth=None))\n"
        "arrays = {n: node[...] for n, node in nodes.items() if isinstance(node, zarr.Array)}\n"
        "assert (group['large'][700:702, 5:9] == arrays['large'][700:702, 5:9]).all()\n"
        "doubles = {name: numpy.asarray(array, 'float64') for name, array in arrays.items()}\n"
        "numpy.savez(sys.argv[2], **doubles)\n"
    )
    root = tmp_path / directory_of(tmp_path, 3)
    subprocess.run([sys.executable, "-c", code, str(root), str(tmp_path / "read.npz")], check=True)
    read = {
        name: torch.from_numpy(values) for name, values in np.load(tmp_path / "read.npz").items()
    }
    assert torch.equal(read["model/embedding.weight"], model.embedding.weight.detach().double())
    assert read["optim/embedding.weight/step"].item() == 1.0
    assert read["model/norm.num_batches_tracked"].item() == 0
    for name in ("large", "half", "eighth"):
        assert torch.equal(read[name], state[name].double()), name


def test_tensorstore_reads_a_large_tensor_from_its_own_directory(tmp_path: Path) -> None:
    large = torch.randn(1301, 577)
    checkpoint.save(str(tmp_path), {"large": large}, step=3)
    path = str(tmp_path / directory_of(tmp_path, 3) / "large")
    array = tensorstore.open(
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
    ).result()
    assert torch.equal(torch.from_numpy(array.read().result()), large)


def test_thousands_of_small_tensors_make_few_objects(tmp_path: Path) -> None:
    state = {f"t{i}": torch.full((3,), float(i)) for i in range(3000)}
    checkpoint.save(str(tmp_path), state, step=1)
    assert len(objects(tmp_path)) == 7
    filled = {name: torch.zeros(3) for name in state}
    checkpoint.load(str(tmp_path), filled)
    assert all(torch.equal(filled[name], state[name]) for name in state)


def test_scalars_empty_tensors_and_padded_chunks_are_restored(tmp_path: Path) -> None:
    state = {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "nested": {"flags": torch.tensor([True, False]), "note": {"deep": [1, None, "x"]}},
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "complex": torch.tensor([1 + 2j]),
    }
    checkpoint.save(str(tmp_path), state, step=1)
    filled = {
        "scalar": torch.tensor(0.0),
        "empty": torch.zeros(0, 3),
        "nested": {"flags": torch.tensor([False, False]), "note": {"deep": []}},
        "transposed": torch.zeros(2, 3).t(),
        "complex": torch.zeros(1, dtype=torch.complex64),
    }
    checkpoint.load(str(tmp_path), filled)
    assert filled["nested"]["note"]["deep"] == [1, None, "x"]
    assert torch.equal(filled["nested"]["flags"], state["nested"]["flags"])
    for name in ("scalar", "empty", "transposed", "complex"):
        assert torch.equal(filled[name], state[name])


def test_lazily_conjugated_and_negated_tensors_are_restored(tmp_path: Path) -> None:
    values = torch.complex(torch.arange(6.0), -torch.ones(6)).reshape(2, 3)
    state = {"conjugate": values.conj(), "negative": values.conj().imag, "adjoint": values.mH}
    assert state["conjugate"].is_conj()
    assert state["negative"].is_neg()
    expected = {name: tensor.clone() for name, tensor in state.items()}
    checkpoint.save(str(tmp_path), state, step=1)
    for filled in (
        {name: torch.zeros_like(tensor.clone()) for name, tensor in state.items()},
        {
            "conjugate": torch.zeros_like(values).conj(),
            "negative": torch.zeros_like(values).conj().imag,
            "adjoint": torch.zeros_like(values).mH,
        },
    ):
        checkpoint.load(str(tmp_path), filled)
        assert all(torch.equal(filled[name], expected[name]) for name in state)


def test_numbers_that_json_lacks_are_stored_as_json_and_come_back(tmp_path: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    state = {"x": torch.ones(1), "loss": math.nan, "best": [-math.inf, {"__float__": "NaN"}]}
    checkpoint.save(str(tmp_path), state, step=1)
    documents = tmp_path / directory_of(tmp_path, 1) / "documents.json"
    json.loads(documents.read_text(), parse_constant=refuse)
    filled: dict[str, Any] = {"x": torch.zeros(1), "loss": 0.0, "best": []}
    checkpoint.load(str(tmp_path), filled)
    assert math.isnan(filled["loss"])
    assert filled["best"] == [-math.inf, {"__float__": "NaN"}]


def test_a_crash_before_the_manifest_leaves_the_previous_step_the_newest(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path), {"x": torch.ones(4)}, step=1)
    checkpoint.save(str(tmp_path), {"x": torch.full((4,), 2.0)}, step=2)
    (tmp_path / StoredStep(2, 0).directory / "manifest.json").unlink()
    assert newest(open_storage(str(tmp_path))) == StoredStep(1, 0)
    state = {"x": torch.zeros(4)}
    assert checkpoint.load(str(tmp_path), state) == 1
    assert state["x"].tolist() == [1, 1, 1, 1]


def test_a_second_save_stores_a_changed_tensor(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    checkpoint.save(str(tmp_path), {"model": model, "optimizer": optimizer}, step=1)
    with torch.no_grad():
        model.embedding.weight.add_(1)
    checkpoint.save(str(tmp_path), {"model": model, "optimizer": optimizer}, step=2)
    other = Tied()
    checkpoint.load(str(tmp_path), {"model": other})
    assert torch.equal(other.embedding.weight, model.embedding.weight)


def test_a_committed_step_is_never_changed(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path), {"x": torch.ones(4)}, step=1)
    before = {path: path.read_bytes() for path in objects(tmp_path)}
    with pytest.raises(CheckpointExists, match="committed already"):
        checkpoint.save(str(tmp_path), {"x": torch.zeros(4)}, step=1)
    assert {path: path.read_bytes() for path in objects(tmp_path)} == before


def test_the_newest_generation_of_a_step_is_loaded(tmp_path: Path) -> None:
    for generation in (0, 2, 1):
        checkpoint.save(
            str(tmp_path), {"x": torch.full((2,), float(generation))}, step=1, generation=generation
        )
    state = {"x": torch.zeros(2)}
    checkpoint.load(str(tmp_path), state)
    assert state["x"].tolist() == [2, 2]
    assert [stored.generation for stored in list_steps(open_storage(str(tmp_path)))] == [2, 1, 0]


def flip(data: bytes, position: int, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[position] ^= 1 << bit
    return bytes(flipped)


DAMAGES: dict[str, Callable[[bytes, bytes], bytes | None]] = {
    "flip first": lambda data, other: flip(data, 0, bit=0),
    "flip middle": lambda data, other: flip(data, len(data) // 2, bit=6),
    "flip last": lambda data, other: flip(data, -1, bit=7),
    "cut": lambda data, other: data[:-1],
    "empty": lambda data, other: b"",
    "delete": lambda data, other: None,
    "swap": lambda data, other: other,
    "append": lambda data, other: data + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_object_is_detected_and_named(tmp_path: Path, damage: str) -> None:
    """`verify` detects all damage, `load` all damage to objects that it uses."""
    state = {
        "x": torch.arange(4e5),
        "y": torch.arange(4e5) + 1,
        "small": torch.arange(4.0),
        "other": torch.ones(7),
    }
    checkpoint.save(f"{tmp_path}/good", state, step=1)
    good = tmp_path / "good" / StoredStep(1, 0).directory
    names = [path.relative_to(good) for path in objects(good)]
    assert len(names) == 10
    for number, name in enumerate(names):
        if str(name) == "manifest.json" and damage == "delete":
            continue  # Then the directory is not a checkpoint, which another test covers.
        bad = tmp_path / f"bad-{number}"
        shutil.copytree(tmp_path / "good", bad)
        path = bad / StoredStep(1, 0).directory / name
        # "swap" takes the most similar object.
        other = min(
            (n for n in names if n != name), key=lambda n: (n.parts[2:] != name.parts[2:], n)
        )
        damaged = DAMAGES[damage]((good / name).read_bytes(), (good / other).read_bytes())
        if damaged == path.read_bytes():
            continue  # The metadata of two arrays is equal.
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(CheckpointDamaged, match=str(name)):
            StoredCheckpoint.open(open_storage(str(bad))).verify()
        # `load` reads the arrays' metadata in the root, not in the arrays' own objects, and no
        # bytes after a chunk's end.
        is_array_metadata = len(name.parts) == 3 and name.name == "zarr.json"
        if not is_array_metadata and damage != "append":
            with pytest.raises(CheckpointDamaged, match=str(name)):
                checkpoint.load(
                    str(bad), {key: torch.zeros_like(value) for key, value in state.items()}
                )
        shutil.rmtree(bad)


def test_a_changed_group_is_detected(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path), {"model": {"w": torch.zeros(1301, 577)}}, step=1)
    group = tmp_path / directory_of(tmp_path, 1) / "model" / "zarr.json"
    group.write_bytes(group.read_bytes().replace(b"parameters", b"Parameters"))
    with pytest.raises(CheckpointDamaged, match=r"model/zarr\.json"):
        StoredCheckpoint.open(open_storage(str(tmp_path))).verify()


def test_exchanged_chunks_of_two_tensors_are_detected(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path), {"x": torch.arange(4e5), "y": torch.arange(4e5) + 1}, step=1)
    x, y = (tmp_path / directory_of(tmp_path, 1) / name / "c.0" for name in "xy")
    first, second = x.read_bytes(), y.read_bytes()
    x.write_bytes(second)
    y.write_bytes(first)
    with pytest.raises(CheckpointDamaged, match="does not match its checksum"):
        checkpoint.load(str(tmp_path), {"x": torch.zeros(400_000)}, strict=False)


def test_reading_some_rows_reads_few_other_bytes(tmp_path: Path) -> None:
    values = torch.randn(4096, 512)
    checkpoint.save(str(tmp_path), {"x": values}, step=1)
    source = StoredCheckpoint.open(open_storage(str(tmp_path)))
    counting = CountingStorage(source.storage)
    into = torch.zeros(1024, 512)
    box = Box((1030, 0), (1024, 512))
    replace(source, storage=counting).read([BoxRequest("x", box, as_bytes(into))])
    assert torch.equal(into, values[1030:2054])
    listings = 4096
    assert counting.nbytes < into.nbytes + 2 * 2**20 + listings
    counting.nbytes = 0
    into = torch.zeros(1024, 512)
    replace(source, storage=counting).read(
        [BoxRequest("x", Box((1024, 0), (1024, 512)), as_bytes(into))]
    )
    assert counting.nbytes < 1.01 * into.nbytes + listings


def test_reading_columns_of_rowwise_shards_reads_few_other_bytes(tmp_path: Path) -> None:
    values = torch.randn(1000, 2048)
    checkpoint.save(str(tmp_path), {"x": values}, step=1)
    source = StoredCheckpoint.open(open_storage(str(tmp_path)))
    counting = CountingStorage(source.storage)
    into = torch.zeros(1000, 512)
    replace(source, storage=counting).read(
        [BoxRequest("x", Box((0, 1024), (1000, 512)), as_bytes(into))]
    )
    assert torch.equal(into, values[:, 1024:1536])
    assert counting.nbytes < 1.01 * into.nbytes + 4096
    columns = torch.zeros(1000, 100)
    rows = torch.zeros(30, 2048)
    boxes = (Box((0, 333), (1000, 100)), columns), (Box((970, 0), (30, 2048)), rows)
    counting.nbytes = 0
    replace(source, storage=counting).read(
        [BoxRequest("x", box, as_bytes(target)) for box, target in boxes]
    )
    assert torch.equal(columns, values[:, 333:433])
    assert torch.equal(rows, values[970:])
    assert counting.nbytes < values.nbytes / 2, "cells that two requests share are read once"


def test_a_step_directory_copied_to_another_step_is_refused(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path), {"x": torch.ones(4)}, step=1)
    shutil.copytree(tmp_path / StoredStep(1, 0).directory, tmp_path / StoredStep(9, 0).directory)
    with pytest.raises(CheckpointDamaged, match="belongs to step 1"):
        checkpoint.load(str(tmp_path), {"x": torch.zeros(4)})


def test_a_checkpoint_that_does_not_exist_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissing, match="there is no checkpoint"):
        checkpoint.load(f"{tmp_path}/nothing", {"x": torch.zeros(4)})
    checkpoint.save(str(tmp_path), {"x": torch.zeros(4)}, step=4)
    with pytest.raises(CheckpointMissing, match=r"no checkpoint of step 5 \(steps there: 4\)"):
        checkpoint.load(str(tmp_path), {"x": torch.zeros(4)}, step=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 99}, "has format 99"),
        ({"required": ["a-feature"]}, "requires 'a-feature', which this keepstep does not know"),
        ({"required": [COMPRESSED_CELLS, "a-feature"]}, "requires 'a-feature', which"),
    ],
    ids=["format", "feature", "feature next to a known one"],
)
def test_fallback_does_not_skip_a_checkpoint_that_a_newer_release_wrote(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    for step in (1, 2):
        checkpoint.save(str(tmp_path), {"x": torch.full((4,), float(step))}, step=step)
    manifest = tmp_path / StoredStep(2, 0).directory / "manifest.json"
    content = {**json.loads(manifest.read_bytes()), **changes}
    del content["crc32c"]
    manifest.write_bytes(encode({**content, "crc32c": crc32c.crc32c(encode(content))}))
    state = {"x": torch.zeros(4)}
    with pytest.raises(CheckpointTooNew, match=message):
        checkpoint.load(str(tmp_path), state, fallback=True)
    assert state["x"].tolist() == [0] * 4
    assert checkpoint.load(str(tmp_path), state, step=1) == 1


def test_lack_of_memory_is_no_damage_and_no_older_checkpoint_is_loaded_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that rolls back removes newer checkpoints than the one that it goes on from."""
    for step in (1, 2):
        checkpoint.save(str(tmp_path), {"x": torch.full((600, 700), float(step))}, step=step)
    of_size = cell_reads.TransferMemory.of_size
    is_short = True

    def allocate(buffer: Any, nbytes: int) -> Any:
        if is_short:
            raise MemoryError
        return of_size(buffer, nbytes)

    monkeypatch.setattr(cell_reads.TransferMemory, "of_size", allocate)
    state = {"x": torch.zeros(600, 700)}
    with pytest.raises(CheckpointError, match="no memory for") as error:
        checkpoint.load(str(tmp_path), state, fallback=True)
    assert not isinstance(error.value, CheckpointDamaged)
    is_short = False
    assert checkpoint.load(str(tmp_path), state, fallback=True) == 2


def test_write_part_stops_when_the_generation_is_over(tmp_path: Path) -> None:
    entries = tuple(
        Entry(
            key=f"t{i}",
            dtype="uint8",
            global_shape=(4,),
            box=Box.whole((4,)),
            byte_offset=0,
            nbytes=4,
        )
        for i in range(50)
    )
    plan = plan_chunks([ShardIndex(0, entries, {})])
    read_keys: list[str] = []

    def read_box(key: str, box: Box):
        read_keys.append(key)
        return torch.zeros(4, 1, dtype=torch.uint8).numpy()

    storage, attempt = open_storage(str(tmp_path)), Attempt(StoredStep(1, 0), "a")
    with pytest.raises(CheckpointError, match="generation 0 is over"):
        write_part(storage, attempt, plan, [0], read_box, name=0, stop=lambda: len(read_keys) >= 10)
    assert len(read_keys) < 20
    assert list_steps(open_storage(str(tmp_path))) == ()


def test_importing_the_package_loads_neither_torch_nor_tensorstore() -> None:
    code = (
        "import sys, keepstep.checkpoint;"
        "from keepstep.checkpoint.format.stored import files, reader, writer;"
        "print([m for m in ('torch', 'tensorstore') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
