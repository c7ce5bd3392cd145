"""Folders of DCP by one process: layouts of the state, and metadata that contradicts its files."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from keepstep.checkpoint.convert.read.dcp_entries import TensorEntry
from keepstep.checkpoint.convert.read.files import open_files
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointMissing, FormatUnsupported
from tests.integration.checkpoint.foreign_reads import assert_same
from tests.opened_checkpoints import open_foreign

W = torch.arange(12.0).reshape(4, 3)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def opened(directory: Path, state: dict[str, Any]) -> ForeignCheckpoint:
    dcp.save(state, checkpoint_id=directory, no_dist=True)
    return open_foreign(str(directory))


def test_state_of_a_module_alone_is_the_model(tmp_path: Path) -> None:
    source = opened(tmp_path, {"block.w": W, "block.b": W[0], "block._extra_state": b"x"})
    assert set(source.tensors) == {"model/block.w", "model/block.b"}
    assert [left.name for left in source.left_out] == ["model/block._extra_state"]


def test_dictionary_of_a_user_has_its_own_names(tmp_path: Path) -> None:
    state = {"x": W, "ema": [{"w": W + 1, "n": 2}, {"w": W + 2}], "text": "a", "none": None}
    source = opened(tmp_path, state)
    assert set(source.tensors) == {"x", "ema/0/w", "ema/1/w"}
    assert_same(source, "ema/1/w", W + 2)
    assert source.documents["values"] == {"ema/0/n": 2, "text": "a", "none": None}


def test_names_with_dots_are_told_from_nesting_by_their_paths(tmp_path: Path) -> None:
    source = opened(tmp_path, {"a.b": W, "a": {"c.d": W + 1}, "n": 3})
    assert "a.b" in source.tensors
    assert_same(source, "model/c.d", W + 1)


def test_application_under_one_name_is_its_model_and_optimizer(tmp_path: Path) -> None:
    groups = [{"params": ["w"], "lr": torch.tensor(0.5), "betas": (0.9, 0.99)}]
    optimizer = {"state": {"w": {"exp_avg": W, "step": torch.tensor(2.0)}}, "param_groups": groups}
    source = opened(tmp_path, {"app": {"model": {"w": W}, "optim": optimizer}})
    assert set(source.tensors) == {"model/w", "optim/w/exp_avg", "optim/w/step"}
    assert source.documents["optim/groups"] == [
        {"parameters": ["w"], "options": {"lr": 0.5, "betas": [0.9, 0.99]}}
    ]


def test_optimizer_of_numbers_is_named_by_the_only_group(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    source = opened(tmp_path, state)
    moment = optimizer.state[model.weight]["momentum_buffer"]
    assert_same(source, "optim/weight/momentum_buffer", moment)
    assert source.documents["optim/groups"][0]["parameters"] == ["weight", "bias"]


def test_optimizer_without_state_keeps_its_groups(tmp_path: Path) -> None:
    optimizer = {"state": {}, "param_groups": [{"params": ["w"], "lr": 0.5}]}
    source = opened(tmp_path, {"model": {"w": W}, "optim": optimizer})
    assert source.documents["optim/groups"] == [{"parameters": ["w"], "options": {"lr": 0.5}}]


def test_groups_without_a_list_of_parameters_are_refused(tmp_path: Path) -> None:
    state = {"model": {"w": W}, "optim": {"state": {}, "param_groups": [{"params": 5}]}}
    with pytest.raises(CheckpointDamaged, match="a group of its optimizer has no list"):
        opened(tmp_path, state)


def test_flattened_options_become_groups_of_equal_options(tmp_path: Path) -> None:
    flat = {
        "state.a.w.exp_avg": W, "state.a.w.deep.x": W + 1,
        "param_groups.a.w.lr": 0.5, "param_groups.b.lr": 0.25, "param_groups.c.lr": 0.5,
    }  # fmt: skip
    state = {"a.w": W, "b": W, "c": W, "optimizer": flat}
    source = opened(tmp_path, state)
    assert {key for key in source.tensors if key.startswith("optim/")} == {
        "optim/a.w/exp_avg",
        "optim/a.w/deep.x",
    }
    assert source.documents["optim/groups"] == [
        {"parameters": ["a.w", "c"], "options": {"lr": 0.5}},
        {"parameters": ["b"], "options": {"lr": 0.25}},
    ]


def test_model_of_its_own_is_told_from_tensors_beside_it(tmp_path: Path) -> None:
    flat = {"state.w.exp_avg": W, "param_groups.w.lr": 0.5}
    source = opened(tmp_path, {"model": {"w": W}, "optimizer": flat, "rng": W + 1})
    assert set(source.tensors) == {"model/w", "optim/w/exp_avg", "rng"}


def test_mapping_of_tensors_beside_a_model_at_the_root_is_no_model(tmp_path: Path) -> None:
    flat = {"state.a.w.exp_avg": W, "param_groups.a.w.lr": 0.5}
    source = opened(tmp_path, {"a.w": W, "optimizer": flat, "loader": {"drawn": W + 1}})
    assert set(source.tensors) == {"model/a.w", "optim/a.w/exp_avg", "loader/drawn"}


def test_files_that_are_not_the_folders_are_left_out_by_name(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "meta.pt")
    source = opened(tmp_path, {"model": {"w": W}})
    assert [(item.name, item.reason) for item in source.left_out] == [
        ("meta.pt", "it was not opened: .metadata has nothing that is in it")
    ]


Change = Callable[[Metadata], None]


def changed(directory: Path, change: Change) -> None:
    """Save two tensors and a value, and change what the metadata says of them."""
    dcp.save({"model": {"w": W, "v": W + 1}, "n": 3}, checkpoint_id=directory, no_dist=True)
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def place(metadata: Metadata, name: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def set_place(name: str, **values: Any) -> Change:
    def change(metadata: Metadata) -> None:
        vars(place(metadata, name)).update(values)

    return change


def set_chunks(*chunks: tuple[tuple[int, int], tuple[int, int]]) -> Change:
    def change(metadata: Metadata) -> None:
        described: Any = metadata.state_dict_metadata["model.w"]
        described.chunks = [
            ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)) for offset, sizes in chunks
        ]
        first = next(index for index in metadata.storage_data if index.fqn == "model.w")
        for offset, _ in chunks:
            index = type(first)("model.w", offset)
            metadata.storage_data[index] = metadata.storage_data[first]

    return change


def set_path(path: Any) -> Change:
    return lambda metadata: metadata.planner_data.update({"model.w": path})


def forget(name: str) -> Change:
    def change(metadata: Metadata) -> None:
        for index in [index for index in metadata.storage_data if index.fqn == name]:
            del metadata.storage_data[index]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_place("model.w", offset=10**9), r"model\.w has \d+ bytes from 1000000000 on in __0_0"),
        (set_place("model.w", length=-5), r"model\.w has -5 bytes"),
        (set_place("model.w", offset=None), "does not say where one of its entries is"),
        (forget("model.w"), r"does not say which file has the chunk of model\.w at \(0, 0\)"),
        (set_path(("n",)), r"two values have the path \('n',\)"),
        (set_path(("n", "w")), r"two values have the path \('n',\)"),
        (set_path(("model", 3)), r"the path \('model', 'v'\) leads through a value"),
        (set_path(("list", 10**9)), "a list of 1 items has one at 1000000000"),
        (set_path(("a",) * 1000), "planner_data are not paths"),
        (set_path(()), "planner_data are not paths"),
        (forget("n"), "does not say which file has n"),
        (set_chunks(((0, 0), (3, 3))), r"shape \(4, 3\), 12 elements, and only 9"),
        (set_chunks(((0, 0), (3, 3)), ((2, 0), (2, 3))), r"__0_0\.distcp.* overlaps it"),
        (set_chunks(((0, 0), (4, 4))), r"lies outside its shape \(4, 3\)"),
    ],
)
def test_metadata_that_contradicts_its_files_is_refused(
    tmp_path: Path, change: Change, message: str
) -> None:
    changed(tmp_path, change)
    with pytest.raises(CheckpointDamaged, match=message):
        open_foreign(str(tmp_path))


def test_chunk_without_elements_needs_no_entry(tmp_path: Path) -> None:
    def add_empty_chunk(metadata: Metadata) -> None:
        described: Any = metadata.state_dict_metadata["model.w"]
        described.chunks.append(ChunkStorageMetadata(torch.Size((4, 0)), torch.Size((0, 3))))

    changed(tmp_path, add_empty_chunk)
    assert_same(open_foreign(str(tmp_path)), "model/w", W)


def test_files_outside_the_folder_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x" * 10**4)
    changed(tmp_path / "run", set_place("model.w", relative_path="../other"))
    with pytest.raises(CheckpointMissing, match=r"'\.\./other'"):
        open_foreign(str(tmp_path / "run"))


def test_entry_of_another_tensor_is_refused_when_it_is_read(tmp_path: Path) -> None:
    dcp.save({"model": {"w": W, "v": W[:2]}, "n": 1}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    vars(place(metadata, "model.w")).update(vars(place(metadata, "model.v")))
    path.write_bytes(pickle.dumps(metadata))
    source = open_foreign(str(tmp_path))
    with pytest.raises(CheckpointDamaged, match=r"float32 of shape \(2, 3\), and .metadata says"):
        assert_same(source, "model/w", W)


def test_entry_whose_bytes_are_repeated_is_refused(tmp_path: Path) -> None:
    torch.save(torch.ones(1).expand(9999), tmp_path / "entry")
    stored = open_files(str(tmp_path)).file("entry").whole
    with pytest.raises(CheckpointDamaged, match="are repeated to a tensor of 39996"):
        _ = TensorEntry(stored, "float32", (9999,)).array


def test_compressed_entries_are_named(tmp_path: Path) -> None:
    changed(tmp_path, set_place("model.w", transform_descriptors=["stream.zstd"]))
    with pytest.raises(FormatUnsupported, match=r"model\.w went through \['stream\.zstd'\]"):
        open_foreign(str(tmp_path))
