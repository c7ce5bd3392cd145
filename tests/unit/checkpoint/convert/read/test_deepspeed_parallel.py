"""Checkpoints of DeepSpeed with model parallelism.

Real ones were made by `tests/foreign_fixtures/make_deepspeed_parallel.py`; what each should hold
was computed by plain AdamW, without DeepSpeed. The others are written as DeepSpeed lays them out.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from keepstep.checkpoint.api import load
from keepstep.checkpoint.cli.ckpt import ckpt
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.write.opened import locate, open_location
from keepstep.checkpoint.convert.write.request import ConversionRequest
from keepstep.checkpoint.convert.write.rules_given import apply_naming_rules, rank_rules
from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointMissing,
    FormatUnsupported,
    RulesInvalid,
)
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.integration.checkpoint.foreign_reads import assert_same
from tests.opened_checkpoints import open_foreign
from tests.unit.checkpoint.convert.read.deepspeed_layouts import (
    Layout,
    Model,
    Parameter,
    expected_of,
    is_decayed,
    stand_ins,
    state_of,
    write,
)
from tests.unit.checkpoint.convert.read.test_deepspeed import FIXTURES, trained_state
from tests.unit.checkpoint.convert.read.written import tensor_of

REAL = {
    "pipe_2_2_2_zero1_bf16": (
        "DeepSpeed ZeRO 1, 2 tensor-parallel ranks, 2 stages",
        Layout(tp=2, pp=2, dp=2, is_pipeline=True),
    ),
    "pipe_1_2_2_zero1_fp32": (
        "DeepSpeed ZeRO 1, 2 stages",
        Layout(pp=2, dp=2, dtype=torch.float32, is_pipeline=True),
    ),
    "cut_2_1_2_zero2_bf16": (
        "DeepSpeed ZeRO 2, 2 tensor-parallel ranks",
        Layout(tp=2, dp=2, stage=2),
    ),
}
UNIVERSAL = ("pipe_2_2_2_zero1_bf16", "autotp_2_2_zero1_bf16", "autotp_2_1_zero3_bf16")
NEXT_TO_IT = "it is next to the checkpoint's directory, not in it"
BLOCK = {
    "norm": Parameter((6,)),
    "qkv": Parameter((12, 6), 0, (4, 4, 4)),
    "dense": Parameter((6, 4), 1),
    "fc1": Parameter((20, 6), 0, (10, 10)),
    "fc2": Parameter((6, 10), 1),
    "bias": Parameter((10,), 0),
}
EMBEDDING = {"weight": Parameter((12, 6), 0, logical_rows=11)}
INFO = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": 11,
    "vocabulary_parameter_patterns": [r"tied_modules.embed.weight"],
    "pipeline_replicated_parameter_patterns": [r"tied_modules.embed.weight"],
    "tp_replicated_parameter_patterns": [r"\d+.norm"],
    "parameter_with_row_parallelism_patterns": [r"\d+.dense", r"\d+.fc2"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+.fc1"],
    "parameter_with_sub_params": [
        {"patterns": [r"\d+.qkv"], "shape": ((4, 4, 4), 6), "partition_dim": 0}
    ],
}
MODEL = Model(
    (EMBEDDING, BLOCK, BLOCK, {"norm": Parameter((6,))}, EMBEDDING),
    {0: "embed", 4: "embed"},
    INFO,
    {"1.seen": (2,), "2.seen": (2,)},
)
RULES = """
[[rule]]
match = "tied_modules.embed.weight"
shard = 0

[[rule]]
match = "{layer:int}.{name:norm|seen}"
replicated = true

[[rule]]
match = "{layer:int}.qkv"
rename = ["{layer}.q", "{layer}.k", "{layer}.v"]
parts = { q = 4, k = 4, v = 4 }
shard = 0

[[rule]]
match = "{layer:int}.fc1"
rename = ["{layer}.gate", "{layer}.up"]
parts = { gate = 10, up = 10 }
shard = 0

[[rule]]
match = "{layer:int}.{name:dense|fc2}"
shard = 1

[[rule]]
match = "{layer:int}.bias"
shard = 0
"""


def expected_of_real(name: str) -> dict[str, torch.Tensor]:
    state = trained_state(name)
    seen = torch.tensor([5.0, 7.0], dtype=state["model/1.norm"].dtype)
    return {**state, "model/1.seen": seen, "model/2.seen": seen}


@pytest.mark.parametrize("name", REAL)
def test_state_is_what_plain_training_arrives_at(name: str) -> None:
    source = open_foreign(str(FIXTURES / name))
    expected = expected_of_real(name)
    for key, tensor in expected.items():
        assert_same(source, key, tensor)
    assert set(source.tensors) == set(expected)
    assert source.step == 2
    assert source.format_name == REAL[name][0]
    assert source.documents["values"]["own"] == 0
    groups = source.documents["optim/groups"]
    assert [group["options"]["lr"] for group in groups] == [0.01, 0.02]
    assert {name for group in groups for name in group["parameters"]} == set(MODEL.parameters)
    if REAL[name][1].tp > 1:
        assert source.documents["padding"] == {
            "model/tied_modules.embed.weight": {"logical_shape": [11, 6]}
        }


@pytest.mark.parametrize("name", ["pipe_1_2_2_zero1_fp32", "pipe_2_2_2_zero1_bf16_universal"])
def test_modules_in_another_layout_load_it_without_a_conversion(name: str) -> None:
    # One process with all layers: neither stages nor ranks of tensor parallelism.
    expected = expected_of_real(name)
    model = torch.nn.ModuleDict()
    for key in (key for key in expected if key.startswith("model/")):
        if "seen" in key or (name.endswith("universal") and "embed" in key):
            continue
        path = key.removeprefix("model/").split(".")
        holder: torch.nn.Module = model
        for part in path[:-1]:
            if not hasattr(holder, part):
                holder.add_module(part, torch.nn.Module())
            holder = holder.get_submodule(part)
        holder.register_parameter(path[-1], torch.nn.Parameter(torch.randn(expected[key].shape)))
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if is_decayed(n) is decayed]}
            for decayed in (False, True)
        ]
    )
    state = {"model": model, "optimizer": optimizer}
    url = f"deepspeed{'-universal' * name.endswith('universal')}:{FIXTURES / name}"
    assert load(url, state, strict=False) == 2
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    for key, parameter in named.items():
        master = expected.get(f"optim/{key}/master_param", expected[f"model/{key}"])
        assert torch.equal(parameter, master), key
        for slot in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[parameter][slot], expected[f"optim/{key}/{slot}"])


def universal_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return what DeepSpeed's own tool has put together, by keys."""
    found = {}
    for path in directory.glob("global_step*/zero/*/*.pt"):
        if not path.with_name("exp_avg.pt").exists():
            # A buffer, which the tool copies as if it were a parameter.
            continue
        with stand_ins():
            content = torch.load(path, weights_only=False)
        slot = "master_param" if path.stem == "fp32" else path.stem
        tensor = content["param"] if isinstance(content, dict) else content
        found[f"optim/{path.parent.name}/{slot}"] = torch.as_tensor(tensor)
    return found


@pytest.mark.parametrize("name", UNIVERSAL)
def test_tensors_are_those_that_ds_to_universal_makes(name: str) -> None:
    made = universal_tensors(FIXTURES / f"{name}_universal")
    both = [open_foreign(str(FIXTURES / n)) for n in (name, f"{name}_universal")]
    logical = both[0].documents.get("padding", {})
    assert len(made) >= 16
    for key, tensor in made.items():
        assert_same(both[1], key, tensor)
        joined = torch.from_numpy(tensor_of(both[0], key))
        parameter = key.split("/")[1]
        if f"model/{parameter}" in logical:
            assert key.endswith("step") or len(joined) > len(tensor)
        # DeepSpeed cuts off the rows that pad a vocabulary, which are described here.
        assert torch.equal(joined if joined.ndim == 0 else joined[: len(tensor)], tensor), key
    raw, converted = (source.tensors for source in both)
    # The tool leaves out a pipeline's files of layers, and so their buffers.
    lacking = {item.name for item in both[1].left_out if item.name.startswith("model/")}
    assert {key for key in raw if key not in converted} == lacking
    assert not converted.keys() - raw.keys()
    cut = {key for key in converted if raw[key] != converted[key]}
    assert {key.split("/")[1] for key in cut} == {key.split("/")[1] for key in logical}
    for source in both:
        groups = source.documents["optim/groups"]
        assert {n for g in groups for n in g["parameters"]} == {
            key.split("/")[1] for key in made
        }  # fmt: skip


def tree_of(directory: Path) -> dict[str, Any]:
    return {
        path.name: torch.load(path, weights_only=False)
        for path in sorted(directory.glob("global_step*/*.pt"))
    }


def compare(path: str, real: Any, written: Any) -> None:
    """Check that what was written is there in a real file too, with the same content."""
    if isinstance(written, Mapping):
        assert isinstance(real, Mapping), path
        for key, value in written.items():
            assert key in real, f"{path}/{key}"
            compare(f"{path}/{key}", real[key], value)
    elif isinstance(written, torch.Tensor):
        assert (real.dtype, real.shape) == (written.dtype, written.shape), path
        # What is behind a partition's end is in no parameter.
        is_padding = written == 9.0
        assert torch.equal(real.masked_fill(is_padding, 0), written.masked_fill(is_padding, 0)), (
            path
        )
    elif isinstance(written, list | tuple):
        assert len(real) == len(written), path
        for number, (own, other) in enumerate(zip(real, written, strict=True)):
            compare(f"{path}/{number}", own, other)
    elif hasattr(written, "numel"):
        assert vars(real) == vars(written), path
    else:
        assert real == written, path


@pytest.mark.parametrize("name", REAL)
def test_written_layouts_are_those_of_deepspeed_file_by_file(tmp_path: Path, name: str) -> None:
    layout = REAL[name][1]
    expected: dict[str, torch.Tensor] = torch.load(FIXTURES / name / "expected.pt")
    seen = torch.tensor([5.0, 7.0], dtype=layout.dtype)
    state = {**expected, "buffer/1.seen": seen, "buffer/2.seen": seen}
    written = write(tmp_path / "run", MODEL, state, layout)
    with stand_ins():
        ours, theirs = tree_of(written), tree_of(FIXTURES / name)
        assert list(ours) == list(theirs)
        for file, content in ours.items():
            # Not the script's, and not said of the training.
            for key in ("ds_config", "own", "global_steps", "global_samples", "shared_params"):
                content.pop(key, None)
            state_dict = content.get("optimizer_state_dict", {})
            for slots in state_dict.get("base_optimizer_state", {}).get("state", {}).values():
                slots.pop("step")
            for key in ("loss_scaler", "overflow"):
                state_dict.pop(key, None)
            compare(file, theirs[file], content)


def opened_after(
    directory: Path, layout: Layout, change: Callable[[Path], None], model: Model = MODEL
) -> ForeignCheckpoint:
    """Open a checkpoint of which files were changed."""
    run = write(directory / "run", model, state_of(model), layout)
    change(run / "global_step3")
    return open_foreign(str(run))


def edit(name: str, change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Return what changes the content of a file."""

    def edited(step: Path) -> None:
        with stand_ins():
            content = torch.load(step / name, weights_only=False)
            change(content)
            torch.save(content, step / name)

    return edited


SAYING_NOTHING = Model(MODEL.layers, MODEL.tied, {}, MODEL.buffers)


def test_cuts_that_nothing_says_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        FormatUnsupported,
        match=r"mp_rank_01_model_states\.pt: 2 ranks .* 16 parameters and buffers .*--rules FILE",
    ):
        opened_after(tmp_path, Layout(tp=2), lambda _: None, SAYING_NOTHING)


def test_stages_need_nobody_to_say_anything(tmp_path: Path) -> None:
    layout = Layout(pp=2, dp=2)
    source = opened_after(tmp_path, layout, lambda _: None, SAYING_NOTHING)
    for key, tensor in expected_of(MODEL, state_of(MODEL), layout).items():
        assert_same(source, key, tensor)


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, dp=2), Layout(tp=2, dp=2, stage=3)])
def test_rules_say_what_files_do_not_and_rename(tmp_path: Path, layout: Layout) -> None:
    state = state_of(SAYING_NOTHING)
    run = write(tmp_path / "run", SAYING_NOTHING, state, layout)
    (tmp_path / "mine.toml").write_text(RULES)
    given = str(tmp_path / "mine.toml")
    opened = open_location(locate(str(run)), rank_rules=rank_rules(given, {}))
    expected = expected_of(MODEL, state, layout)
    for key, tensor in expected.items():
        assert_same(opened.source, key, tensor)
    apart = apply_naming_rules(opened, given, {}).source
    for key in ("model/{}", "optim/{}/exp_avg", "optim/{}/master_param"):
        fused = expected[key.format("2.fc1")]
        assert_same(apart, key.format("2.up"), fused[10:])


def test_command_takes_rules_for_ranks_files(tmp_path: Path) -> None:
    layout = Layout(tp=2, dp=2)
    state = state_of(SAYING_NOTHING)
    run = write(tmp_path / "run", SAYING_NOTHING, state, layout)
    rules = tmp_path / "mine.toml"
    rules.write_text(RULES)
    arguments = ["convert", str(run), str(tmp_path / "converted"), "--rules", str(rules)]
    done = CliRunner().invoke(ckpt, arguments)
    assert done.exit_code == 0, done.output
    converted = StoredCheckpoint.open(open_storage(str(tmp_path / "converted")))
    expected = expected_of(MODEL, state, layout)
    assert_same(converted, "model/1.gate", expected["model/1.fc1"][:10])
    assert_same(converted, "optim/2.dense/exp_avg", expected["optim/2.dense/exp_avg"])
    checked = CliRunner().invoke(ckpt, ["rules", "check", str(run), "--rules", str(rules)])
    assert checked.exit_code == 0, checked.output
    assert "{layer:int}.fc1: 2 tensors" in checked.output


def renaming(tmp_path: Path, more: str = "") -> str:
    rules = tmp_path / "rename-only.toml"
    rules.write_text(f'[[rule]]\nmatch = "{{name...}}"\nrename = "net.{{name...}}"\n{more}')
    return str(rules)


@pytest.mark.parametrize("more", ["", "shard = 1"])
@pytest.mark.parametrize("name", ["autotp_2_1_zero3_bf16", "cut_2_1_2_zero2_bf16"])
def test_rules_do_not_replace_what_files_say_of_cuts(tmp_path: Path, name: str, more: str) -> None:
    location = locate(str(FIXTURES / name))
    request = ConversionRequest(location=location, rules=renaming(tmp_path, more))
    plain = ConversionRequest(location=location).open().source
    before = request.open_before_rules().source
    assert before.tensors == plain.tensors
    assert before.documents == plain.documents
    assert request.open().source.tensors == {
        key.replace("/", "/net.", 1) if key.startswith(("model/", "optim/")) else key: spec
        for key, spec in plain.tensors.items()
    }


def test_rules_that_only_rename_do_not_say_what_ranks_have(tmp_path: Path) -> None:
    assert rank_rules(renaming(tmp_path), {}) is None
    run = write(tmp_path / "run", SAYING_NOTHING, state_of(MODEL), Layout(tp=2))
    with pytest.raises(FormatUnsupported, match="--rules FILE, in which each rule says"):
        ConversionRequest(location=locate(str(run)), rules=renaming(tmp_path)).open()


def test_mean_of_drifted_copies_by_rules_is_rounded_from_masters(tmp_path: Path) -> None:
    drifting = Model(({"norm": Parameter((5,), is_averaged=True)},))
    state = state_of(drifting)
    layout = Layout(tp=3)
    run = write(tmp_path / "run", drifting, state, layout)
    rules = tmp_path / "mine.toml"
    rules.write_text('[[rule]]\nmatch = "0.norm"\naverage = true')
    source = open_location(locate(str(run)), rank_rules=rank_rules(str(rules), {})).source
    for key, tensor in expected_of(drifting, state, layout).items():
        assert_same(source, key, tensor)


def test_bf16_optimizer_without_zero_names_parameters_by_their_slices(tmp_path: Path) -> None:
    def change(step: Path) -> None:
        for path in step.glob("mp_rank_*"):
            edit(path.name, set_value("param_shapes", None))(step)
        for path in step.glob("*optim_states.pt"):
            edit(path.name, lambda c: c["optimizer_state_dict"].pop("zero_stage"))(step)

    layout = Layout(tp=2, pp=2, dp=2)
    source = opened_after(tmp_path, layout, change)
    expected = expected_of(MODEL, state_of(MODEL), layout)
    for key, tensor in expected.items():
        assert_same(source, key, tensor)
    assert set(source.tensors) == set(expected)


def test_pipeline_without_zero_has_its_optimizer_by_the_names_in_groups(tmp_path: Path) -> None:
    layout = Layout(tp=2, stage=0, dtype=torch.float32)
    source = opened_after(tmp_path, layout, lambda _: None)
    for key, tensor in expected_of(MODEL, state_of(MODEL), layout).items():
        assert_same(source, key, tensor)
    real = open_foreign(str(FIXTURES / "pipe_2_2_1_zero0_fp32"))
    expected = expected_of_real("pipe_2_2_1_zero0_fp32")
    for key in (key for key in expected if key.startswith("model/")):
        assert_same(real, key.replace("tied_modules.embed", "0"), expected[key])
    assert "optimizer" in [item.name for item in real.left_out]


def test_rules_that_do_not_fit_name_the_tensor(tmp_path: Path) -> None:
    run = write(tmp_path / "run", SAYING_NOTHING, state_of(MODEL), Layout(tp=2))
    rules = tmp_path / "mine.toml"
    rules.write_text('[[rule]]\nmatch = "{all...}"\nshard = 1')
    with pytest.raises(RulesInvalid, match=r"mine\.toml:1: .*model/1\.bias: there is no dim"):
        open_location(locate(str(run)), rank_rules=rank_rules(str(rules), {}))
    rules.write_text('[[rule]]\nmatch = "1.norm"\nreplicated = true\n[[rule]]\nmatch = "{all...}"')
    with pytest.raises(RulesInvalid, match="the rule does not say what each holds"):
        open_location(locate(str(run)), rank_rules=rank_rules(str(rules), {}))


def test_copies_that_differ_are_refused_where_they_are_read(tmp_path: Path) -> None:
    def change(content: Any) -> None:
        content["module"]["2.norm"][3] += 1

    name = "mp_rank_01_model_states.pt"
    source = opened_after(tmp_path, Layout(tp=2), edit(name, change))
    tensor_of(source, "model/1.norm")
    with pytest.raises(
        CheckpointDamaged,
        match=r"mp_rank_01_model_states\.pt.*model/2\.norm is not that of .*mp_rank_00",
    ):
        tensor_of(source, "model/2.norm")


def test_moments_of_copies_are_compared_too(tmp_path: Path) -> None:
    def change(content: Any) -> None:
        states = content["optimizer_state_dict"]["base_optimizer_state"]["state"]
        states[0]["exp_avg"][0] += 1

    name = "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
    source = opened_after(tmp_path, Layout(tp=2), edit(name, change))
    with pytest.raises(CheckpointDamaged, match=r"mp_rank_01_optim.*its optim/1\.norm/exp_avg"):
        tensor_of(source, "optim/1.norm/exp_avg")


def set_value(key: str, value: object) -> Callable[[Any], None]:
    return lambda content: content.update({key: value})


RANK_1 = "mp_rank_01_model_states.pt"


def test_values_that_a_rank_has_otherwise_are_left_out_by_name(tmp_path: Path) -> None:
    def change(content: Any) -> None:
        content.update(
            epoch=float("nan"), rng=torch.ones(3), other={"a": [1, 2]}, large=torch.ones(2**19)
        )

    def change_both(step: Path) -> None:
        edit(RANK_1, change)(step)
        edit("mp_rank_00_model_states.pt", change)(step)
        edit(RANK_1, lambda content: content["other"]["a"].append(3))(step)
        edit(RANK_1, lambda content: content["rng"].add_(1))(step)

    source = opened_after(tmp_path, Layout(tp=2), change_both)
    said = {item.name: item.reason for item in source.left_out}
    carried = "that of mp_rank_00_model_states.pt, which is carried"
    assert said == {
        f"own of {RANK_1}": f"it differs from {carried}",
        f"rng of {RANK_1}": f"it differs from {carried}",
        f"other of {RANK_1}": f"it differs from {carried}",
        f"large of {RANK_1}": f"it is too large to be compared with {carried}",
    }
    assert source.documents["values"]["other/a"] == [1, 2]


def test_buffers_and_values_of_stage_3s_ranks_are_compared(tmp_path: Path) -> None:
    name = "zero_pp_rank_1_mp_rank_00_model_states.pt"

    def change(step: Path) -> None:
        edit(name, set_value("epoch", 3))(step)
        edit(name, lambda content: content["module"]["1.seen"].add_(1))(step)

    source = opened_after(tmp_path, Layout(dp=2, stage=3), change)
    assert [item.name for item in source.left_out] == [
        f"epoch of {name}",
        f"model/1.seen of {name}",
    ]
    with pytest.raises(CheckpointDamaged, match=rf"{name}: its global_steps is 4, and that of "):
        opened_after(
            tmp_path / "b", Layout(dp=2, stage=3), edit(name, set_value("global_steps", 4))
        )


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            RANK_1, set_value("checkpoint_parallel_dimensions", {"pp_degree": 2, "tp_degree": 1}),
            r"mp_rank_01.*its checkpoint_parallel_dimensions is .*'tp_degree': 1",
        ),
        (
            RANK_1, lambda content: content["module"].pop("1.norm"),
            "it has no 1.norm, which was trained",
        ),
        (
            RANK_1, lambda content: content["module"].pop("1.seen"),
            r"mp_rank_01.*of model/1\.seen and .*mp_rank_00.* only one has it",
        ),
        (
            RANK_1, lambda content: content["param_shapes"].reverse(),
            "param_slice_mappings|has not trained|elements",
        ),
    ],
)  # fmt: skip
def test_ranks_that_contradict_each_other_are_refused(
    tmp_path: Path, file: str, change: Callable[[Any], None], message: str
) -> None:
    with pytest.raises(CheckpointDamaged, match=message):
        opened_after(tmp_path, Layout(tp=2), edit(file, change))


@pytest.mark.parametrize(
    "name",
    [
        "mp_rank_01_model_states.pt",
        "layer_02-model_01-model_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_02_optim_states.pt",
    ],
)
def test_file_of_a_rank_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    with pytest.raises(CheckpointMissing, match=name):
        opened_after(tmp_path, layout, lambda step: (step / name).unlink())


def test_files_of_a_whole_stage_that_are_missing_are_noticed(tmp_path: Path) -> None:
    def remove(step: Path) -> None:
        for name in ("mp_rank_01", "zero_pp_rank_0_mp_rank_01", "zero_pp_rank_1_mp_rank_01"):
            for path in step.glob(f"*{name}_*"):
                path.unlink()

    with pytest.raises(CheckpointDamaged, match=r"2 stages .* files of 1 model ranks"):
        opened_after(tmp_path, Layout(pp=2, dp=2), remove)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "zero/1.dense/fp32.pt", {"cat_dim": 0},
            r"1\.dense/fp32.pt: its shape is \(6, 4\), put together along 0 \(`cat_dim`\), and the "
            r"ranks have \(6, 2\), \(6, 2\)",
        ),
        ("zero/1.dense/exp_avg.pt", {"cat_dim": 2}, "put together along 2"),
        ("zero/1.dense/exp_avg.pt", {"param": torch.zeros(6, 5)}, r"its shape is \(6, 5\)"),
        (
            "zero/tied_modules.embed.weight/fp32.pt", {"param": torch.zeros(13, 6)},
            r"its shape is \(13, 6\)",
        ),
        ("zero/1.norm/fp32.pt", {"param": torch.zeros(13)}, r"its shape is \(13,\)"),
    ],
)  # fmt: skip
def test_universal_tensors_that_contradict_the_ranks_are_refused(
    tmp_path: Path, file: str, change: dict[str, object], message: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(FIXTURES / "pipe_2_2_2_zero1_bf16_universal", run)
    edit(file, lambda content: content.update(change))(run / "global_step2_universal")
    with pytest.raises(CheckpointDamaged, match=message):
        open_foreign(str(run))


def test_tied_layers_that_nothing_tells_apart_are_refused(tmp_path: Path) -> None:
    twice = Model((EMBEDDING, BLOCK, EMBEDDING), {0: "a", 2: "b"}, INFO)
    with pytest.raises(FormatUnsupported, match="layer 0 may be any of the tied layers a, b"):
        opened_after(tmp_path, Layout(pp=2), lambda _: None, twice)


def test_what_lies_beside_the_checkpoint_is_left_out_by_name(tmp_path: Path) -> None:
    run = write(tmp_path / "run", MODEL, state_of(MODEL), Layout())
    shutil.copytree(run / "global_step3", run / "global_step2")
    for name in ("zero_to_fp32.py", "notes.txt", "logs/a.txt", "logs/b.txt"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("")
    left_out = open_foreign(str(run)).left_out
    assert [(item.name, item.reason) for item in left_out] == [
        ("logs/ (2 files)", NEXT_TO_IT), ("notes.txt", NEXT_TO_IT),
    ]  # fmt: skip
    assert open_foreign(str(run / "global_step3")).left_out == ()


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    def add(step: Path) -> None:
        torch.save({"a": torch.ones(1)}, step / "layer_0_expert_1_mp_rank_00_model_states.pt")

    with pytest.raises(FormatUnsupported, match=r"layer_0_expert_1.*has experts of DeepSpeed"):
        opened_after(tmp_path, Layout(), add)
