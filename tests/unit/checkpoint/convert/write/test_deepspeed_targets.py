"""Compares files written for DeepSpeed with those of DeepSpeed and its `ds_to_universal`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint.convert.read.arrays import FileArray
from keepstep.checkpoint.convert.read.files import open_files
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.pickled_values import Record
from keepstep.checkpoint.convert.read.torch_file import read_torch_file
from keepstep.checkpoint.convert.write.conversion import Target, convert
from keepstep.checkpoint.convert.write.opened import Checkpoint
from keepstep.checkpoint.convert.write.selection import Selection
from keepstep.checkpoint.convert.write.zero_layout import ZeroLayout
from keepstep.checkpoint.errors import LayoutMismatch
from tests.opened_checkpoints import open_any
from tests.unit.checkpoint.convert.write.sources import bytes_of, checkpoint_of

FIXTURES = Path(__file__).parents[4] / "foreign_fixtures" / "deepspeed"


def write(opened: Checkpoint, url: Path, to: Target, zero: ZeroLayout | None = None) -> None:
    chosen = Selection(whole=opened.source)
    convert(opened, "here", str(url), to, chosen, memory_nbytes=2**20, zero=zero)


def files_in(directory: Path) -> dict[str, Any]:
    """Return what the files of `torch.save` have, with bytes where tensors are."""
    files = open_files(str(directory))
    return {
        name: shown(read_torch_file(files.file(name).whole))
        for name in files.names
        if name.endswith(".pt") and name != "expected.pt"
    }


def shown(value: Any) -> Any:
    if isinstance(value, FileArray):
        return value.dtype, value.shape, value.read().tobytes()
    if isinstance(value, Record):
        # Of members of an enumeration the value, which they are equal to.
        return value.args[0] if value.args else (value.name, dict(value.attributes))
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    return value


def without(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in names}


def test_universal_is_that_of_ds_to_universal_tensor_by_tensor(tmp_path: Path) -> None:
    write(open_any(str(FIXTURES / "zero2_bf16_2")), tmp_path, Target.DEEPSPEED_UNIVERSAL)
    theirs, ours = files_in(FIXTURES / "zero2_bf16_2_universal"), files_in(tmp_path)
    folder = "global_step3_universal"
    # What rank 0 had of its partitions says nothing of parameters.
    optimizer = f"{folder}/zero/optimizer_state.pt"
    partitions = ("group_paddings", "param_alignment_paddings", "partition_count")
    assert without(ours.pop(optimizer), *partitions) == without(theirs.pop(optimizer), *partitions)
    model = f"{folder}/mp_rank_00_model_states.pt"
    of_ranks = (
        "frozen_param_shapes", "frozen_param_fragments", "dp_world_size",
        "checkpoint_parallel_dimensions", "universal_checkpoint_info",
    )  # fmt: skip
    assert without(ours.pop(model), *of_ranks) == without(theirs.pop(model), *of_ranks)
    assert ours == theirs
    latest = (tmp_path / "latest_universal").read_bytes()
    assert latest == (FIXTURES / "zero2_bf16_2_universal" / "latest_universal").read_bytes()


def test_universal_for_stage_3_is_that_of_ds_to_universal(tmp_path: Path) -> None:
    source = open_any(str(FIXTURES / "zero3_bf16_2"))
    write(source, tmp_path, Target.DEEPSPEED_UNIVERSAL, ZeroLayout(3))
    theirs, ours = files_in(FIXTURES / "zero3_bf16_2_universal"), files_in(tmp_path)
    assert "global_step3_universal/zero_pp_rank_0_mp_rank_00_model_states.pt" in ours
    optimizer = "global_step3_universal/zero/optimizer_state.pt"
    state = ours.pop(optimizer)["optimizer_state_dict"]
    expected = theirs.pop(optimizer)["optimizer_state_dict"]
    # Its loader takes the step and the options from here, and nothing else.
    assert state["state"][0] == {"step": expected["state"][0]["step"]}
    assert [without(group, "params") for group in state["param_groups"]] == [
        without(group, "params") for group in expected["param_groups"]
    ]
    assert {n: v for n, v in ours.items() if "/zero/" in n} == {
        n: v for n, v in theirs.items() if "/zero/" in n
    }


def without_padding(state: dict[str, Any], model: dict[str, Any], rank: int, ranks: int) -> None:
    """Cut off what stage 3 pads its parts of parameters with, which DeepSpeed leaves as it was."""
    flat = state["fp32_flat_groups"]
    slots = state["optimizer_state_dict"]["state"]
    for number, shapes in enumerate(model["param_shapes"]):
        flat[number] = _cut(flat[number], shapes, rank, ranks)
        for slot in ("exp_avg", "exp_avg_sq"):
            slots[number][slot] = _cut(slots[number][slot], shapes, rank, ranks)


def _cut(stored: Any, shapes: dict[str, Any], rank: int, ranks: int) -> list[bytes]:
    dtype, _, data = stored
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    parts = []
    start = 0
    for shape in shapes.values():
        size = -(-math.prod(shape) // ranks)
        count = max(0, min(size, math.prod(shape) - rank * size))
        parts.append(data[itemsize * start : itemsize * (start + count)])
        start += size
    assert itemsize * start == len(data)
    return parts


@pytest.mark.parametrize(
    ("case", "stage", "ranks"),
    [
        ("zero1_bf16_4", 1, 4),
        ("zero1_fp32_2", 1, 2),
        ("zero2_bf16_2", 2, 2),
        ("zero2_fp16_2", 2, 2),
        ("zero3_bf16_2", 3, 2),
        ("zero3_fp32_4", 3, 4),
    ],
)
def test_files_of_ranks_are_those_of_deepspeed(
    tmp_path: Path, case: str, stage: int, ranks: int
) -> None:
    write(open_any(str(FIXTURES / case)), tmp_path, Target.DEEPSPEED, ZeroLayout(stage, ranks))
    theirs, ours = files_in(FIXTURES / case), files_in(tmp_path)
    assert ours.keys() == theirs.keys()
    assert (tmp_path / "latest").read_bytes() == (FIXTURES / case / "latest").read_bytes()
    for name, expected in theirs.items():
        found = ours[name]
        rank = int(name.partition("pp_rank_")[2].partition("_")[0] or 0)
        if name.endswith("_model_states.pt"):
            if stage == 3:
                for one in (expected, found):
                    shapes = one["frozen_param_shapes"]
                    for frozen, part in one["frozen_param_fragments"].items():
                        one["frozen_param_fragments"][frozen] = _cut(
                            part, {frozen: shapes[frozen]}, rank, ranks
                        )
            assert without(expected, "checkpoint_parallel_dimensions") == found
            continue
        state = expected["optimizer_state_dict"]
        state.pop("param_alignment_paddings", None)
        if stage == 3:
            model = theirs[f"global_step3/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"]
            for one in (state, found["optimizer_state_dict"]):
                without_padding(one, model, rank, ranks)
        assert found == expected, name


def test_rounding_the_model_leaves_the_optimizers_parameters_as_they_were(tmp_path: Path) -> None:
    source = checkpoint_of(is_tied=True)
    opened = Checkpoint(source, "memory")
    chosen = Selection(whole=source, model_dtype="bfloat16")
    zero = ZeroLayout(2, 2)
    convert(opened, "", str(tmp_path), Target.DEEPSPEED, chosen, memory_nbytes=2**20, zero=zero)
    assert (tmp_path / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").exists()
    written = open_any(str(tmp_path)).source
    assert written.tensors["model/odd.weight"].dtype == "bfloat16"
    assert bytes_of(written, "optim/odd.weight/master_param") == bytes_of(
        source, "model/odd.weight"
    )


@pytest.mark.parametrize(
    ("target", "zero"),
    [(Target.DEEPSPEED, ZeroLayout(2, 2)), (Target.DEEPSPEED_UNIVERSAL, ZeroLayout(2))],
)
def test_masters_stay_the_optimizers_parameters_where_the_model_is_as_wide(
    tmp_path: Path, target: Target, zero: ZeroLayout
) -> None:
    source = checkpoint_of(is_tied=True, dtype="bfloat16")
    chosen = Selection(whole=source, model_dtype="float32")
    opened = Checkpoint(source, "memory")
    done = convert(opened, "", str(tmp_path), target, chosen, memory_nbytes=2**20, zero=zero)
    assert done.left_out == ()
    masters = bytes_of(source, "optim/odd.weight/master_param")
    assert masters != bytes_of(chosen, "model/odd.weight")
    assert masters in b"".join(
        tensor for content in files_in(tmp_path).values() for _, _, tensor in tensors_in(content)
    )


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors of what `files_in` returns."""
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], bytes):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def test_several_flat_tensors_of_a_group_follow_the_configured_size(tmp_path: Path) -> None:
    source = checkpoint_of(is_tied=True)
    config = {"ds_config": {"zero_optimization": {"sub_group_size": 40}}}
    source = replace(source, documents={**source.documents, "deepspeed": config})
    write(Checkpoint(source, "memory"), tmp_path, Target.DEEPSPEED, ZeroLayout(3, 2))
    model = files_in(tmp_path)["global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt"]
    assert [list(group) for group in model["param_shapes"]] == [
        ["norm.weight", "bias", "scale"],
        ["embed.weight", "odd.weight"],
        ["deep.weight"],
    ]
    files = open_files(str(tmp_path))
    name = "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    written: Any = read_torch_file(files.file(name).whole)
    state = written["optimizer_state_dict"]["optimizer_state_dict"]["state"]
    # An optimizer counts in place: of one tensor for all it would make three steps at once.
    assert len({state[number]["step"].extent.offset for number in range(3)}) == 3


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (ZeroLayout(3, 2), {"norm.running_mean", "seen"}),
        (ZeroLayout(3, 2, ("frozen.weight", "seen")), {"frozen.weight", "seen"}),
    ],
)
def test_buffers_are_whole_in_stage_3_and_frozen_parameters_are_cut(
    tmp_path: Path, zero: ZeroLayout, expected: set[str]
) -> None:
    source = checkpoint_of(is_tied=True)
    tensors = {k: t for k, t in source.foreign_tensors.items() if k != "model/none"}
    write(
        Checkpoint(replace(source, foreign_tensors=tensors), "memory"),
        tmp_path,
        Target.DEEPSPEED,
        zero,
    )
    model = files_in(tmp_path)["global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt"]
    assert set(model["buffer_names"]) == expected
    for name, (_, shape, _) in model["module"].items():
        assert (shape != (0,)) == (name in expected), name
    untrained = {"norm.running_mean", "seen", "frozen.weight"}
    assert model["frozen_param_fragments"].keys() == untrained - expected


def changed(source: ForeignCheckpoint, *, without_key: str = "", **documents: Any) -> Checkpoint:
    tensors = {k: v for k, v in source.foreign_tensors.items() if k != without_key}
    return Checkpoint(
        replace(source, foreign_tensors=tensors, documents={**source.documents, **documents}),
        "memory",
    )


ADAM = checkpoint_of(is_tied=True)
NARROW = checkpoint_of(is_tied=True, dtype="bfloat16")


@pytest.mark.parametrize(
    ("opened", "message"),
    [
        (changed(ADAM, **{"optim/groups": []}), "no groups of an optimizer"),
        (changed(NARROW, masters={}), r"embed\.weight|norm\.weight is bfloat16, and .* no float32"),
        (changed(ADAM, without_key="optim/bias/exp_avg"), "bias has no exp_avg"),
        (changed(ADAM, without_key="model/bias"), "bias is in a group .* no such parameter"),
        (
            changed(ADAM, without_key="optim/bias/step", **{"optim/scalars": {"bias/step": 4}}),
            r"step is 3\.0 for norm\.weight and 4 for bias",
        ),
    ],
)
def test_state_that_is_not_for_zero_is_refused(
    tmp_path: Path, opened: Checkpoint, message: str
) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        write(opened, tmp_path / "to", Target.DEEPSPEED, ZeroLayout(2, 2))
    assert not (tmp_path / "to").exists()


def test_stage_and_ranks_have_to_be_given(tmp_path: Path) -> None:
    with pytest.raises(LayoutMismatch, match="give --zero-stage and --ranks"):
        write(Checkpoint(ADAM, "memory"), tmp_path, Target.DEEPSPEED, ZeroLayout(stage=2))
    for stage, ranks in ((4, 1), (1, 0)):
        with pytest.raises(LayoutMismatch):
            ZeroLayout(stage, ranks)


def test_documents_without_a_place_are_left_out_by_name(tmp_path: Path) -> None:
    opened = changed(ADAM, config={"heads": 2})
    chosen = Selection(whole=opened.source)
    done = convert(
        opened, "", str(tmp_path), Target.DEEPSPEED, chosen, memory_nbytes=2**20,
        zero=ZeroLayout(1, 1),
    )  # fmt: skip
    assert done.left_out == ("config: DeepSpeed's files have no place for it",)
    sizes = {key: math.prod(spec.shape) for key, spec in ADAM.tensors.items()}
    assert done.tensors == len(sizes)
