"""Real checkpoints of Orbax, made by `tests/foreign_fixtures/make_orbax.py`, bit for bit.

What each should hold was computed by NumPy, without Orbax.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
from click.testing import CliRunner
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint.cli.ckpt import ckpt
from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMissing,
    FormatUnsupported,
)
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.integration.checkpoint.foreign_reads import assert_same
from tests.opened_checkpoints import open_foreign
from tests.unit.checkpoint.convert.read.written import box_of, tensor_of

FIXTURES = Path(__file__).parents[4] / "foreign_fixtures" / "orbax"
EXPECTED: dict[str, dict[str, torch.Tensor]] = torch.load(FIXTURES / "expected.pt")
STATES = sorted(set(EXPECTED) - {"types"})


@pytest.mark.parametrize("name", EXPECTED)
def test_state_is_what_was_saved(name: str) -> None:
    source = open_foreign(str(FIXTURES / name))
    assert source.format_name == "Orbax"
    assert source.step == (0 if name == "types" else 3)
    for key, tensor in EXPECTED[name].items():
        assert_same(source, key, tensor)
    assert set(source.tensors) == set(EXPECTED[name])


@pytest.mark.parametrize("name", STATES)
def test_values_and_documents_are_carried_and_the_rest_is_named(name: str) -> None:
    source = open_foreign(str(FIXTURES / name))
    assert source.documents["values"] == {"note": "a text", "step": 3}
    assert "_CHECKPOINT_METADATA" in source.documents["orbax"]
    left_out = {entry.name.rpartition("/")[2] for entry in source.left_out}
    assert left_out == {"_sharding", "process_0"}
    if name == "manager":
        assert source.documents["extra"] == {"epoch": 2, "tokens": [128, 256]}


def test_a_step_of_a_manager_is_opened_by_its_url() -> None:
    assert open_foreign(str(FIXTURES / "manager" / "2")).step == 2
    assert open_foreign(str(FIXTURES / "manager" / "3" / "state")).step == 3
    steps = {"step": 0}
    for step in (2, 3):
        url = str(FIXTURES / "manager")
        assert checkpoint.load(url, {"values": steps}, step=step, strict=False) == step
    with pytest.raises(CheckpointMissing, match="step 4 is wanted"):
        checkpoint.load(str(FIXTURES / "manager"), {"values": steps}, step=4)


def modules_of(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """Return modules with parameters of these names, as a port of the model to torch has."""
    model = nn.Module()
    for key, tensor in tensors.items():
        if not key.startswith("model/"):
            continue
        *path, leaf = key.removeprefix("model/").split(".")
        holder = model
        for part in path:
            if part not in dict(holder.named_children()):
                holder.add_module(part, nn.Module())
            holder = dict(holder.named_children())[part]
        holder.register_parameter(leaf, nn.Parameter(torch.zeros_like(tensor)))
    return model


def test_training_in_torch_goes_on_from_it() -> None:
    expected = EXPECTED["ocdbt"]
    model = modules_of(expected).to(torch.float32)
    optimizer = torch.optim.AdamW(model.named_parameters())
    state = {"model": model, "optim": optimizer, "note": "", "step": 0}
    source = open_foreign(str(FIXTURES / "ocdbt"))
    assert {key for key in source.tensors if key.startswith("model/")} == {
        f"model/{name}" for name, _ in model.named_parameters()
    }
    model.to(torch.bfloat16)
    assert checkpoint.load(str(FIXTURES / "ocdbt"), state) == 3
    assert (state["note"], state["step"]) == ("a text", 3)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[f"model/{name}"])
        slots = optimizer.state[parameter]
        for slot in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(slots[slot], expected[f"optim/{name}/{slot}"].to(slots[slot].dtype))


@pytest.mark.parametrize("name", ["manager", "ocdbt_zarr3", "folders_plain"])
def test_it_is_converted(tmp_path: Path, name: str) -> None:
    target = tmp_path / "universal"
    done = CliRunner().invoke(
        ckpt, ["convert", str(FIXTURES / name), str(target), "--json"], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed["step"] == 3
    stored = StoredCheckpoint.open(open_storage(str(target)))
    assert set(stored.tensors) == set(EXPECTED[name])
    for key, tensor in EXPECTED[name].items():
        assert_same(stored, key, tensor)  # type: ignore[arg-type]


def test_boxes_of_parts_of_chunks_are_read() -> None:
    source = open_foreign(str(FIXTURES / "ocdbt"))
    key = "model/embed.table"
    whole = tensor_of(source, key)
    for first, last in itertools.combinations(range(0, 53, 13), 2):
        box = Box((first, 1), (last - first, 17))
        assert box_of(source, key, box).tobytes() == whole[box.slices].tobytes()


# What TensorStore writes and Orbax does not, in folders that look like Orbax's.

VALUES = np.arange(7 * 10, dtype=np.int32).reshape(7, 10)


def tree_of(
    root: Path, metadata: dict[str, Any] | None, *, is_v3: bool = False, **more: Any
) -> Path:
    """Write the array `a` by TensorStore, and metadata that names it."""
    root.mkdir(exist_ok=True)
    if metadata is not None:
        array = tensorstore.open(
            {
                "driver": "zarr3" if is_v3 else "zarr",
                "kvstore": {"driver": "file", "path": f"{root}/a/"},
                "metadata": metadata,
                "store_data_equal_to_fill_value": not more.get("zeros_are_absent", False),
            },
            create=True,
            dtype="int32",
        ).result()
        array.write(more.get("values", VALUES)).result()
    entry = {
        "key_metadata": [{"key": "a", "key_type": 2}],
        "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
    }
    content = {
        "tree_metadata": {"('a',)": entry},
        "use_ocdbt": False,
        "use_zarr3": is_v3,
        "store_array_data_equal_to_fill_value": not more.get("zeros_are_absent", False),
    }
    (root / "_METADATA").write_text(json.dumps(content))
    return root


V2 = {"shape": [7, 10], "chunks": [4, 4]}


def sharded(
    codecs: list[Any], index_codecs: list[Any] | None = None, **more: Any
) -> dict[str, Any]:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    return {
        "shape": [7, 10],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 6]}},
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [2, 3],
                    "codecs": [little, *codecs],
                    "index_codecs": [little, *(index_codecs or [])],
                    **more,
                },
            }
        ],
    }


ZSTD = {"name": "zstd", "configuration": {"level": 1}}
GZIP = {"name": "gzip", "configuration": {"level": 1}}
CHECKSUM = {"name": "crc32c"}
LAYOUTS: dict[str, tuple[dict[str, Any], bool]] = {
    "v2": ({**V2, "compressor": None}, False),
    "v2 zstd": ({**V2, "compressor": {"id": "zstd", "level": 5}}, False),
    "v2 gzip": ({**V2, "compressor": {"id": "gzip", "level": 1}}, False),
    "v2 slashes": ({**V2, "compressor": None, "dimension_separator": "/"}, False),
    "v2 blosc": ({**V2, "compressor": {"id": "blosc"}}, False),
    "v2 order F": ({**V2, "compressor": None, "order": "F"}, False),
    "v2 big-endian": ({**V2, "compressor": None, "dtype": ">i4"}, False),
    "v3": (sharded([])
           | {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]}, True),
    "v3 dots": (sharded([]) | {
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, GZIP, CHECKSUM],
        "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
    }, True),
    "v3 shards": (sharded([]), True),
    "v3 shards zstd": (sharded([ZSTD], [CHECKSUM]), True),
    "v3 shards gzip first": (sharded([GZIP, CHECKSUM], index_location="start"), True),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_tensorstore_writes_is_read(tmp_path: Path, name: str) -> None:
    metadata, is_v3 = LAYOUTS[name]
    source = open_foreign(str(tree_of(tmp_path / "t", metadata, is_v3=is_v3)))
    assert np.array_equal(tensor_of(source, "model/a"), VALUES)
    for box in (Box((1, 2), (5, 7)), Box((3, 5), (1, 1)), Box((6, 9), (1, 1))):
        assert np.array_equal(box_of(source, "model/a", box), VALUES[box.slices])


@pytest.mark.parametrize("is_v3", [False, True])
def test_chunks_of_zeros_that_old_versions_left_out_are_zeros(tmp_path: Path, is_v3: bool) -> None:
    values = VALUES.copy()
    values[:4] = 0
    metadata = sharded([ZSTD]) if is_v3 else {**V2, "compressor": {"id": "zstd"}}
    root = tree_of(tmp_path / "t", metadata, is_v3=is_v3, values=values, zeros_are_absent=True)
    assert len(list((root / "a").rglob("*"))) < 9
    assert np.array_equal(tensor_of(open_foreign(str(root)), "model/a"), values)


def renamed(root: Path, *keys: str) -> None:
    """Give the only array of a tree another path."""
    content = json.loads((root / "_METADATA").read_text())
    (entry,) = content["tree_metadata"].values()
    entry["key_metadata"] = [{"key": key, "key_type": 2} for key in keys]
    (root / "_METADATA").write_text(json.dumps(content))
    (root / "a").rename(root / ".".join(keys))


@pytest.mark.parametrize(("folder", "step"), [("7", 7), ("ckpt_7", 7), ("v7", 0)])
def test_a_state_in_one_of_several_items_is_found(tmp_path: Path, folder: str, step: int) -> None:
    for item, keys in {"main": ("params", "w"), "ema": ("w",)}.items():
        (tmp_path / folder).mkdir(exist_ok=True)
        renamed(tree_of(tmp_path / folder / item, {**V2, "compressor": None}), *keys)
    (tmp_path / folder / "rng").mkdir()
    (tmp_path / folder / "rng" / "key").write_bytes(b"key")
    source = open_foreign(str(tmp_path / folder))
    assert (set(source.tensors), source.step) == ({"model/w", "ema/w"}, step)
    assert [entry.name for entry in source.left_out] == ["rng"]
    # What is saved alone may have any name.
    (tmp_path / folder / "orbax.checkpoint").write_text("{}")
    assert open_foreign(str(tmp_path / folder)).step == 0


def test_checkpoints_in_an_object_store_are_read() -> None:
    storage = open_storage("memory://orbax")
    for path in FIXTURES.joinpath("ocdbt").rglob("*"):
        if path.is_file():
            name = f"run/{path.relative_to(FIXTURES / 'ocdbt').as_posix()}"
            storage.write(name, [path.read_bytes()])
    source = open_foreign("memory://orbax/run")
    for key, tensor in EXPECTED["ocdbt"].items():
        assert_same(source, key, tensor)


def test_paths_of_keys_with_dots_are_not_mixed_up(tmp_path: Path) -> None:
    root = tree_of(tmp_path / "t", {**V2, "compressor": None})
    content = json.loads((root / "_METADATA").read_text())
    entry = content["tree_metadata"]["('a',)"]
    (root / "a").rename(root / "a.b")
    for number, keys in enumerate((["a.b"], ["a", "b"])):
        listed = [{"key": key, "key_type": 2} for key in keys]
        content["tree_metadata"][f"{number}"] = {**entry, "key_metadata": listed}
    del content["tree_metadata"]["('a',)"]
    (root / "_METADATA").write_text(json.dumps(content))
    with pytest.raises(CheckpointDamaged, match=r"the paths \('a.b',\) and \('a', 'b'\) have one"):
        open_foreign(str(root))
    del content["tree_metadata"]["1"]
    (root / "_METADATA").write_text(json.dumps(content))
    assert set(open_foreign(str(root)).tensors) == {"model/a.b"}


# What no writer makes.

Change = Callable[[Path], None]


def edited(name: str, change: Callable[[Any], None]) -> Change:
    def apply(root: Path) -> None:
        content = json.loads((root / name).read_text())
        change(content)
        (root / name).write_text(json.dumps(content))

    return apply


def array(**changes: Any) -> Change:
    return edited("a/.zarray", lambda content: content.update(changes))


def entry(change: Callable[[Any], None]) -> Change:
    return edited("_METADATA", lambda content: change(content["tree_metadata"]["('a',)"]))


def content_of(name: str, data: bytes) -> Change:
    return lambda root: (root / name).write_bytes(data) and None


HOSTILE: dict[str, tuple[Change, str, str]] = {
    "no JSON": (content_of("_METADATA", b"{"), "_METADATA", "is no JSON"),
    "deep JSON": (content_of("_METADATA", b"[" * 10**6), "_METADATA", "is no JSON"),
    "deep array": (content_of("a/.zarray", b"[" * 10**6), "a/.zarray", "is no JSON"),
    "no tree": (edited("_METADATA", lambda c: c.update(tree_metadata=[])), "_METADATA", "mapping"),
    "no keys": (entry(lambda e: e.update(key_metadata=None)), "_METADATA", "no keys"),
    "number as a key": (
        entry(lambda e: e.update(key_metadata=[{"key": 1}])), "_METADATA", "no text",
    ),
    "very deep": (
        entry(lambda e: e.update(key_metadata=[{"key": "a"}] * 201)), "_METADATA", "far too many",
    ),
    "absurd shape": (array(shape=[2**62, 2**62]), "a/.zarray", "copy all files"),
    "negative shape": (array(shape=[-1, 10]), "a/.zarray", '"shape"'),
    "very many dimensions": (array(shape=[1] * 99), "a/.zarray", '"shape"'),
    "other rank": (array(chunks=[4]), "a/.zarray", '"chunks"'),
    "chunks of nothing": (array(chunks=[0, 4]), "a/.zarray", '"chunks"'),
    "huge grid": (array(shape=[2**30, 2**30], chunks=[1, 1]), "a/.zarray", "chunks of shape"),
    "more rows": (array(shape=[9, 10]), "a/.zarray", "9 chunks of shape"),
    "other chunks": (array(shape=[99, 10], chunks=[99, 10]), "a/0.0", "uncompressed"),
    "huge chunks": (array(shape=[2**50, 10], chunks=[2**50, 10]), "a/.zarray", "cannot be in"),
    "separator": (array(dimension_separator="/../"), "a/.zarray", '"dimension_separator"'),
    "chunk is short": (content_of("a/0.0", b"1"), "a/0.0", "ZSTD"),
    "chunk is no zstd": (content_of("a/0.0", bytes(99)), "a/0.0", "ZSTD"),
    "no format": (array(zarr_format=4), "a/.zarray", '"zarr_format"'),
    "no chunk": (lambda root: (root / "a/1.2").unlink(), "a/.zarray", "copy all files"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folder_is_refused_by_its_file(tmp_path: Path, name: str) -> None:
    root = tree_of(tmp_path / "t", {**V2, "compressor": {"id": "zstd", "level": 1}})
    change, file, reason = HOSTILE[name]
    change(root)
    refusals = (CheckpointDamaged, CheckpointMissing, FormatUnsupported)
    with pytest.raises(refusals, match=rf"{root}/{file}.*({reason})"):
        tensor_of(open_foreign(str(root)), "model/a")


UNSUPPORTED: dict[str, Change] = {
    "filters": array(filters=[{"id": "delta"}]),
    "codec": array(compressor={"id": "lz77"}),
    "fields": array(dtype=[["x", "<i4"]]),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, name: str) -> None:
    root = tree_of(tmp_path / "t", {**V2, "compressor": None})
    UNSUPPORTED[name](root)
    with pytest.raises(FormatUnsupported, match=f"{root}/a/.zarray"):
        open_foreign(str(root))


def test_data_types_that_cannot_be_stored_are_left_out_by_name(tmp_path: Path) -> None:
    root = tree_of(tmp_path / "t", {**V2, "compressor": None})
    array(dtype="int4")(root)
    source = open_foreign(str(root))
    assert not source.tensors
    assert [(entry.name, entry.reason) for entry in source.left_out] == [
        ("a", "its data type int4 cannot be stored")
    ]


def test_links_lead_nowhere_and_pipes_are_not_waited_for(tmp_path: Path) -> None:
    root = tree_of(tmp_path / "t", {**V2, "compressor": None})
    (root / "a/0.0").unlink()
    os.mkfifo(root / "a/0.0")
    with pytest.raises(CheckpointError, match="copy all files"):
        open_foreign(str(root))


def test_a_store_without_a_data_file_is_refused_by_its_name(tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(FIXTURES / "ocdbt", root)
    for path in (root / "ocdbt.process_0").rglob("d/*"):
        path.unlink()
    with pytest.raises(CheckpointMissing, match=r"there is no file 'ocdbt.process_0/d/"):
        open_foreign(str(root))
