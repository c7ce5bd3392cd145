"""Real checkpoints of Megatron, made by `tests/foreign_fixtures/make_megatron.py`, bit for bit.

What each should hold was computed by plain AdamW, without Megatron.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from keepstep.checkpoint.cli.ckpt import ckpt
from keepstep.checkpoint.convert.read.arrays import MemoryArray
from keepstep.checkpoint.convert.read.contents import Contents
from keepstep.checkpoint.convert.read.dcp_entries import tensor_of_chunks
from keepstep.checkpoint.convert.read.dcp_metadata import read_metadata
from keepstep.checkpoint.convert.read.files import open_files
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.opening import locate_foreign
from keepstep.checkpoint.convert.read.pieces import whole
from keepstep.checkpoint.convert.write.conversion import Target, convert
from keepstep.checkpoint.convert.write.megatron_target import megatron_left_out
from keepstep.checkpoint.convert.write.opened import Checkpoint
from keepstep.checkpoint.convert.write.rules_given import apply_naming_rules
from keepstep.checkpoint.convert.write.selection import Selection
from keepstep.checkpoint.convert.write.verification import verify_foreign
from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointMissing,
    FormatUnsupported,
    LayoutMismatch,
)
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.location import Location
from tests.fuzz.cases import read_all
from tests.integration.checkpoint.foreign_reads import assert_same
from tests.opened_checkpoints import open_foreign
from tests.unit.checkpoint.convert.read.written import tensor_of
from tests.unit.checkpoint.convert.write.sources import bytes_of

FIXTURES = Path(__file__).parents[4] / "foreign_fixtures" / "megatron"
CORE = (
    "core_apart", "core_bf16_dp", "core_bf16_dp_pp2", "core_bf16_full", "core_bf16_tp2_pp2",
    "core_fp32_tp2", "core_moe_ep2",
)  # fmt: skip
PER_RANK = ("lm_bf16_tp2_pp2", "lm_fp32_pp2_vp2", "lm_fp32_tp2")
TIED = ("core_bf16_dp_pp2", "core_bf16_tp2_pp2", "lm_bf16_tp2_pp2")


class Unpacked:
    """The checkpoints, each unpacked once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._sources: dict[str, ForeignCheckpoint] = {}

    def __getitem__(self, name: str) -> Path:
        directory = self._root / name
        if not directory.exists():
            unpack(name, directory)
        return directory

    def source(self, name: str) -> ForeignCheckpoint:
        """Return a checkpoint, opened once."""
        if name not in self._sources:
            self._sources[name] = open_foreign(str(self[name]))
        return self._sources[name]


def unpack(name: str, directory: Path) -> Path:
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Unpacked:
    return Unpacked(tmp_path_factory.mktemp("megatron"))


def expected_of(directory: Path) -> dict[str, torch.Tensor]:
    expected: dict[str, torch.Tensor] = torch.load(directory / "expected.pt")
    return expected


@pytest.mark.parametrize("name", [*CORE, *PER_RANK])
def test_state_is_what_plain_training_arrives_at(unpacked: Unpacked, name: str) -> None:
    source = unpacked.source(name)
    assert source.step == 3
    assert source.format_name == ("Megatron-LM" if name in PER_RANK else "Megatron-Core torch_dist")
    expected = expected_of(unpacked[name])
    for key, tensor in expected.items():
        assert_same(source, key, tensor)
    assert {key for key in source.tensors if not key.endswith("/step")} == set(expected)


@pytest.mark.parametrize("name", [*CORE, *PER_RANK])
def test_groups_steps_and_arguments_are_carried(unpacked: Unpacked, name: str) -> None:
    source = unpacked.source(name)
    documents = source.documents
    names = {key.removeprefix("model/") for key in source.tensors if key.startswith("model/")}
    grouped = [name for group in documents["optim/groups"] for name in group["parameters"]]
    assert sorted(grouped) == sorted(names)
    for group in documents["optim/groups"]:
        decay = {
            len(source.tensors[f"model/{member}"].shape) > 1 and not member.endswith(".bias")
            for member in group["parameters"]
        }
        assert decay == {group["options"]["weight_decay"] == 0.1}
        experts = {".experts." in member for member in group["parameters"]}
        assert experts == {group["options"]["is_expert_parallel"]}
    if name in PER_RANK:
        steps = {float(tensor_of(source, f"optim/{member}/step")) for member in names}
    else:
        steps = {documents["optim/scalars"][f"{member}/step"] for member in names}
    assert steps == {3}
    assert documents["megatron"]["args"]["hidden_size"] == 8
    assert documents["megatron"]["model"]["num_query_groups"] == 2
    assert documents["values"]["opt_param_scheduler/num_steps"] == 3
    masters = documents.get("masters", {})
    assert set(masters) == (set() if "bf16" not in name and "moe" not in name else
                            {f"model/{member}" for member in names})  # fmt: skip


@pytest.mark.parametrize("name", [*CORE, *PER_RANK])
def test_padding_ties_and_states_of_ranks_are_named(unpacked: Unpacked, name: str) -> None:
    source = unpacked.source(name)
    padding = {"model/embedding.word_embeddings.weight": {"logical_shape": [27, 8]}}
    if name in TIED:
        tied = {"output_layer.weight": "embedding.word_embeddings.weight"}
        assert source.documents["model/tied"] == tied
    else:
        assert "model/tied" not in source.documents
        padding["model/output_layer.weight"] = {"logical_shape": [27, 8]}
    assert source.documents["padding"] == padding
    left_out = {item.name for item in source.left_out}
    assert "rng_state" in left_out
    assert all(item == "rng_state" or item.endswith("_extra_state") for item in left_out)


def test_only_what_is_asked_for_is_read(unpacked: Unpacked, tmp_path: Path) -> None:
    directory = unpack("core_fp32_tp2", tmp_path)
    source = open_foreign(str(directory))
    for path in directory.glob("iter_*/__1_*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))
    # Rank 0 has the first half of the rows; that rank 1's are gone is noticed when they are read.
    with pytest.raises(FormatUnsupported, match="__1_0"):
        tensor_of(source, "model/decoder.layers.1.self_attention.linear_qkv.weight")
    norm = "model/decoder.layers.1.input_layernorm.weight"
    assert_same(source, norm, expected_of(directory)[norm])


def test_verification_finds_a_changed_bit(tmp_path: Path) -> None:
    directory = unpack("core_fp32_tp2", tmp_path)
    found = locate_foreign(Location(str(directory)))
    verified = verify_foreign(found)
    assert verified.checked_nbytes > verified.nbytes // 4
    norm = "model/decoder.final_layernorm.weight"
    values = expected_of(directory)[norm].numpy().tobytes()
    (path,) = (p for p in directory.glob("iter_*/*.distcp") if values in p.read_bytes())
    path.write_bytes(path.read_bytes().replace(values, bytes([values[0] ^ 1]) + values[1:]))
    with pytest.raises(CheckpointDamaged, match=rf"{path.name}.*do not match their checksum"):
        verify_foreign(found)


def written(source: ForeignCheckpoint, directory: Path) -> ForeignCheckpoint:
    """Write a checkpoint for Megatron, and open it."""
    opened = Checkpoint(source, source.format_name, source.left_out)
    chosen = Selection(whole=source, only_model=False, model_dtype=None)
    url = str(directory)
    convert(opened, "x", url, Target.MEGATRON_CORE, chosen, memory_nbytes=2**24)
    return open_foreign(url)


FIRST, SECOND = (f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in (0, 1))
NORM = "decoder.final_layernorm.weight"
DECAYED = {"lr": 0.001, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("groups", "is_kept"),
    [
        ([((FIRST, SECOND), DECAYED), ((NORM,), {**DECAYED, "weight_decay": 0})], True),
        ([((FIRST, SECOND, NORM), DECAYED)], False),
        ([((FIRST, NORM), DECAYED), ((SECOND,), {**DECAYED, "lr": 0.1})], False),
        ([((FIRST, NORM), DECAYED), ((SECOND,), {**DECAYED, "weight_decay": 0})], False),
    ],
)
def test_groups_that_megatron_does_not_make_are_left_out_by_name(
    groups: list[tuple[tuple[str, ...], dict[str, float]]], is_kept: bool
) -> None:
    model = {FIRST: (4, 4), SECOND: (4, 4), NORM: (4,)}
    contents = Contents("x", "of a test")
    for name, shape in model.items():
        contents.add(
            f"model/{name}", whole(MemoryArray("float32", np.ones(shape, np.float32), "x"))
        )
    for names, options in groups:
        contents.add_group(names, options)
    lines = megatron_left_out(contents.checkpoint(3))
    assert [line.partition(":")[0] for line in lines] == ([] if is_kept else ["optim/groups"])


@pytest.mark.parametrize("name", [*CORE, "lm_fp32_tp2"])
def test_what_is_written_for_megatron_is_read_as_it_was(
    unpacked: Unpacked, tmp_path: Path, name: str
) -> None:
    source = unpacked.source(name)
    back = written(source, tmp_path / "written")
    assert back.format_name == "Megatron-Core torch_dist"
    for key, tensor in expected_of(unpacked[name]).items():
        assert_same(back, key, tensor)
    for document in ("padding", "masters", "model/tied"):
        assert back.documents.get(document) == source.documents.get(document), document
    assert back.documents["megatron"]["args"] == source.documents["megatron"]["args"]
    assert set(back.documents["optim/scalars"].values()) == {3}
    assert not [line for line in megatron_left_out(source) if line.startswith("optim/groups")]
    assert back.documents["megatron"].get("layers_apart") == (True if "apart" in name else None)


def test_masters_are_written_for_megatron_however_wide_the_model_is(tmp_path: Path) -> None:
    contents = Contents("x", "of a test")
    masters = {}
    for number, name in enumerate((FIRST, SECOND)):
        master = np.full((4, 4), np.pi + number, np.float32)
        narrow = master.astype(numpy_dtype("bfloat16"))
        contents.add(f"model/{name}", whole(MemoryArray("bfloat16", narrow, "x")))
        for slot in ("master_param", "exp_avg"):
            contents.add(f"optim/{name}/{slot}", whole(MemoryArray("float32", master, "x")))
        masters[f"model/{name}"] = {"slot": "master_param", "dtype": "float32"}
    contents.add_group([FIRST, SECOND], DECAYED)
    contents.add_document("masters", masters)
    source = contents.checkpoint(3)
    url = str(tmp_path)
    chosen = Selection(whole=source, model_dtype="float32")
    opened = Checkpoint(source, "memory")
    done = convert(opened, "x", url, Target.MEGATRON_CORE, chosen, memory_nbytes=2**24)
    assert not [line for line in done.left_out if "master" in line]
    metadata = read_metadata(open_files(f"{url}/iter_0000003"))
    stack = "decoder.layers.mlp.linear_fc1.weight"
    assert metadata.tensors.keys() == {
        stack, *(f"optimizer.state.{slot}.{stack}" for slot in ("param", "fp32_param", "exp_avg")),
    }  # fmt: skip
    entries = Contents("x", "of a test")
    for name, chunked in metadata.tensors.items():
        entries.add(name, tensor_of_chunks(name, chunked))
    stored = entries.checkpoint(3)
    masters_of_layers = np.array([[np.pi] * 16, [np.pi + 1] * 16], np.float32).tobytes()
    assert bytes_of(stored, stack) != masters_of_layers
    for slot in ("param", "fp32_param"):
        assert bytes_of(stored, f"optimizer.state.{slot}.{stack}") == masters_of_layers


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"model.layers.0.mlp.up_proj.weight": (2, 2)}, "no tensor of the model is called as"),
        (
            {"decoder.layers.0.mlp.linear_fc2.weight": (2, 2),
             "decoder.layers.2.mlp.linear_fc2.weight": (2, 2)},
            r"has the layer decoder\.layers\.2 and no decoder\.layers\.1",
        ),
        (
            {"decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight": (2, 2),
             "decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight": (2, 2)},
            "some are missing",
        ),
        (
            {"decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight": (2, 2),
             "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight": (2, 3)},
            "several shapes",
        ),
    ],
)  # fmt: skip
def test_models_that_are_not_megatrons_are_not_written(
    tmp_path: Path, names: dict[str, tuple[int, ...]], message: str
) -> None:
    torch.save({name: torch.ones(shape) for name, shape in names.items()}, tmp_path / "a.pt")
    with pytest.raises(LayoutMismatch, match=message):
        written(open_foreign(str(tmp_path / "a.pt")), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_layers_that_differ_are_written_apart(tmp_path: Path) -> None:
    expert = "decoder.layers.1.mlp.experts.local_experts.{}.linear_fc2.weight"
    names = {
        "decoder.layers.0.mlp.linear_fc2.weight": torch.ones(2, 3),
        expert.format(0): torch.ones(2, 2),
        expert.format(1): torch.zeros(2, 2),
    }
    torch.save(names, tmp_path / "a.pt")
    back = written(open_foreign(str(tmp_path / "a.pt")), tmp_path / "b")
    for name, tensor in names.items():
        assert_same(back, f"model/{name}", tensor)
    metadata = read_metadata(open_files(str(tmp_path / "b" / "iter_0000000")))
    experts = metadata.tensors["decoder.layers.1.mlp.experts.experts.linear_fc2.weight"]
    assert experts.spec.shape == (2, 2, 2)


def test_preset_reads_megatron_and_leads_back_to_it(unpacked: Unpacked) -> None:
    source = unpacked.source("core_bf16_full")
    expected = expected_of(unpacked["core_bf16_full"])
    config = dict(source.documents["megatron"]["model"])
    opened = apply_naming_rules(Checkpoint(source, ""), "llama:megatron:hf", config)
    qkv = expected["model/decoder.layers.1.self_attention.linear_qkv.weight"]
    groups = qkv.view(2, 16, 8)
    q = groups[:, :8].reshape(16, 8)
    assert_same_in(opened, "model/model.layers.1.self_attn.q_proj.weight", q)
    v = groups[:, 12:].reshape(8, 8)
    assert_same_in(opened, "model/model.layers.1.self_attn.v_proj.weight", v)
    up = expected["optim/decoder.layers.0.mlp.linear_fc1.weight/exp_avg"][12:]
    assert_same_in(opened, "optim/model.layers.0.mlp.up_proj.weight/exp_avg", up)
    embedding = expected["model/embedding.word_embeddings.weight"][:27]
    assert_same_in(opened, "model/model.embed_tokens.weight", embedding)
    back = apply_naming_rules(opened, "llama:hf:megatron", config)
    assert_same_in(back, "model/decoder.layers.1.self_attention.linear_qkv.weight", qkv)
    norm = expected["model/decoder.layers.1.pre_mlp_layernorm.weight"]
    assert_same_in(back, "model/decoder.layers.1.mlp.linear_fc1.layer_norm_weight", norm)


def test_command_takes_the_sizes_from_megatrons_arguments(
    unpacked: Unpacked, tmp_path: Path
) -> None:
    source, target = str(unpacked["core_fp32_tp2"]), str(tmp_path / "hf")
    options = ("--rules", "llama:megatron:hf", "--to", "huggingface")
    done = CliRunner().invoke(ckpt, ["convert", source, target, *options])
    assert done.exit_code == 0, done.output
    expected = expected_of(unpacked["core_fp32_tp2"])
    head = expected["model/output_layer.weight"][:27]
    assert_same(open_foreign(target), "model/lm_head.weight", head)
    assert "left out: model/output_layer.weight, elements at (27, 0)" in done.output


def test_preset_reads_experts(unpacked: Unpacked) -> None:
    source = unpacked.source("core_moe_ep2")
    expected = expected_of(unpacked["core_moe_ep2"])
    config = dict(source.documents["megatron"]["model"])
    opened = apply_naming_rules(Checkpoint(source, ""), "mixtral:megatron:hf", config)
    gate = expected["model/decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"][:12]
    assert_same_in(opened, "model/model.layers.1.block_sparse_moe.experts.3.w1.weight", gate)


def assert_same_in(opened: Checkpoint, key: str, expected: torch.Tensor) -> None:
    assert_same(opened.source, key, expected)  # type: ignore[arg-type]


# Files that contradict themselves or each other.


def changed_metadata(directory: Path, change: Callable[[Metadata], None]) -> str:
    path = next(directory.glob("iter_*/.metadata"))
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return str(directory)


def changed_file(directory: Path, file: str, change: Callable[[Any], None]) -> str:
    path = next(directory.glob(f"iter_*/{file}"))
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)
    return str(directory)


QKV = "decoder.layers.self_attention.linear_qkv.weight"
BUCKET = (
    "optimizer.distributed.dp_group_idx_{}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)."
    "bucket_idx_0.{}"
)


def without_a_layer(metadata: Metadata) -> None:
    metadata.state_dict_metadata[QKV].chunks.pop()  # type: ignore[union-attr]


def twice_a_layer(metadata: Metadata) -> None:
    chunks = metadata.state_dict_metadata[QKV].chunks  # type: ignore[union-attr]
    shifted = ChunkStorageMetadata(torch.Size([0, 8, 0]), torch.Size([1, 16, 8]))
    stored = metadata.storage_data
    stored[MetadataIndex(QKV, shifted.offsets)] = next(
        info for index, info in stored.items() if index.fqn == QKV
    )
    chunks[0] = shifted


def absurdly_many_layers(metadata: Metadata) -> None:
    described = metadata.state_dict_metadata[QKV]
    described.size = torch.Size([2**50, 32, 8])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_layer, r"linear_qkv\.weight has shape \(2, 32, 8\), 512 elements, and only 384"),
        (twice_a_layer, r"__\d_0.*linear_qkv\.weight.*overlaps it"),
        (absurdly_many_layers, r"linear_qkv\.weight.*(so many|elements)"),
    ],
)
def test_chunks_that_contradict_each_other_are_refused(
    tmp_path: Path, change: Callable[[Metadata], None], message: str
) -> None:
    url = changed_metadata(unpack("core_fp32_tp2", tmp_path), change)
    with pytest.raises(CheckpointDamaged, match=message):
        open_foreign(url)


def test_stack_without_a_dimension_of_layers_is_refused(tmp_path: Path) -> None:
    def flatten(metadata: Metadata) -> None:
        described = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
        metadata.state_dict_metadata["decoder.layers.weight"] = described
        described.size = torch.Size([])  # type: ignore[union-attr]
        described.chunks = []  # type: ignore[union-attr]

    url = changed_metadata(unpack("core_fp32_tp2", tmp_path), flatten)
    with pytest.raises(CheckpointDamaged):
        open_foreign(url)


def test_buffers_with_other_values_than_the_model_are_refused(tmp_path: Path) -> None:
    directory = unpack("core_bf16_dp", tmp_path)

    def exchange(metadata: Metadata) -> None:
        # Two matrices of one size change places: sizes and borders are as before.
        key = BUCKET.format(0, "param")
        stored = {i.offset[0]: i for i in metadata.storage_data if i.fqn == key}
        sizes = {c.offsets[0]: c.sizes[0] for c in metadata.state_dict_metadata[key].chunks}  # type: ignore[union-attr]
        largest = [o for o in sorted(sizes) if sizes[o] == 128][:2]
        first, second = (stored[offset] for offset in largest)
        data = metadata.storage_data
        data[first], data[second] = data[second], data[first]

    url = changed_metadata(directory, exchange)
    with pytest.raises(CheckpointDamaged, match="they have other values than the model"):
        open_foreign(url)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_model_parallel_size": 1}, r"buffers of the ranks \[0, 1\], and 1 x 1 ranks"),
        ({"pipeline_model_parallel_size": None}, "does not say how many ranks"),
        ({"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}, "chunks"),
    ],
)
def test_buffers_whose_parameters_have_no_place_are_left_out(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    url = changed_file(
        unpack("core_bf16_dp", tmp_path),
        "common.pt",
        lambda content: vars(content["args"]).update(arguments),
    )
    source = open_foreign(url)
    (reason,) = [item.reason for item in source.left_out if item.name == "optimizer"]
    assert re.search(message, reason), reason
    assert not [key for key in source.tensors if key.startswith("optim/")]


def test_other_backends_are_refused(tmp_path: Path) -> None:
    directory = unpack("core_fp32_tp2", tmp_path)
    path = next(directory.glob("iter_*/metadata.json"))
    path.write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    with pytest.raises(FormatUnsupported, match="save it as torch_dist"):
        open_foreign(str(directory))


def test_what_all_ranks_have_in_common_is_needed(tmp_path: Path) -> None:
    directory = unpack("core_fp32_tp2", tmp_path)
    next(directory.glob("iter_*/common.pt")).unlink()
    with pytest.raises(CheckpointMissing, match=r"common\.pt"):
        open_foreign(str(directory))


def cut(name: str) -> Callable[[Any], None]:
    return lambda content: content["model"].update({name: content["model"][name][:-1].clone()})


RANK_1 = "mp_rank_01/model_optim_rng.pt"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut(FC1), r"mp_rank_01.*linear_fc1\.weight.*\[12, 11\]"),
        (
            lambda content: content["model"].pop(FC1),
            r"mp_rank_01.*rank 1 has no model/decoder\.layers\.0\.mlp\.linear_fc1\.weight",
        ),
        (
            lambda content: content["model"]["decoder.final_layernorm.weight"].add_(1),
            r"mp_rank_01.*final_layernorm\.weight is not that of .*mp_rank_00",
        ),
        (
            lambda content: content["model"].update({FC1: content["model"][FC1].double()}),
            r"linear_fc1\.weight: the ranks have different data types",
        ),
        (
            lambda content: setattr(content["args"], "tensor_model_parallel_size", 4),
            r"mp_rank_01.*one of 4 ranks of tensor parallelism, and there are files of 2",
        ),
        (lambda content: content.pop("model"), r"mp_rank_01.*it has no model"),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(
    tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    url = changed_file(unpack("lm_fp32_tp2", tmp_path), RANK_1, change)
    with pytest.raises(CheckpointDamaged, match=message):
        read_all(open_foreign(url))


def test_layers_with_gaps_are_refused(tmp_path: Path) -> None:
    def rename(content: Any) -> None:
        for name in [name for name in content["model0"] if name.startswith("decoder.layers.0.")]:
            content["model0"][name.replace("s.0.", "s.1.")] = content["model0"].pop(name)

    file = "mp_rank_00_001/model_optim_rng.pt"
    url = changed_file(unpack("lm_fp32_pp2_vp2", tmp_path), file, rename)
    with pytest.raises(CheckpointDamaged, match=r"mp_rank_00_001.*it has the layers \[1\]"):
        open_foreign(url)


def test_file_of_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    directory = unpack("lm_bf16_tp2_pp2", tmp_path)
    next(directory.glob("iter_*/mp_rank_01_000/model_optim_rng.pt")).unlink()
    with pytest.raises(CheckpointMissing, match=r"mp_rank_01_000/model_optim_rng\.pt"):
        open_foreign(str(directory))


def test_tensors_that_nothing_says_the_cut_of_are_refused(tmp_path: Path) -> None:
    directory = unpack("lm_fp32_tp2", tmp_path)
    for rank in (0, 1):
        changed_file(
            directory,
            f"mp_rank_0{rank}/model_optim_rng.pt",
            lambda content: content["model"].update({"adapter.weight": torch.ones(2, 2)}),
        )
    with pytest.raises(FormatUnsupported, match=r"what each rank has of adapter\.weight"):
        open_foreign(str(directory))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(checkpoint_version=1.0), "checkpoint_version is 1.0"),
        (
            lambda content: setattr(content["args"], "expert_model_parallel_size", 2),
            "experts of each rank",
        ),
        (lambda content: delattr(content["args"], "swiglu"), "whether there is SwiGLU"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    url = changed_file(unpack("lm_fp32_tp2", tmp_path), "mp_rank_00/model_optim_rng.pt", change)
    with pytest.raises(FormatUnsupported, match=message):
        open_foreign(url)


def test_optimizer_with_other_parameters_is_left_out(tmp_path: Path) -> None:
    def forget(content: Any) -> None:
        content["optimizer"]["param_groups"][0]["params"].pop()

    url = changed_file(unpack("lm_fp32_tp2", tmp_path), RANK_1, forget)
    source = open_foreign(url)
    assert "optimizer" in {item.name for item in source.left_out}
    assert not [key for key in source.tensors if key.startswith("optim/")]


def test_nothing_in_the_files_is_executed(tmp_path: Path) -> None:
    directory = unpack("core_fp32_tp2", tmp_path)
    path = next(directory.glob("iter_*/common.pt"))
    content = torch.load(path, weights_only=False)
    content["harmful"] = Harmful(tmp_path / "executed")
    stream = io.BytesIO()
    torch.save(content, stream)
    path.write_bytes(stream.getvalue())
    source = open_foreign(str(directory))
    assert not (tmp_path / "executed").exists()
    assert "harmful" in {item.name for item in source.left_out}


class Harmful:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))
