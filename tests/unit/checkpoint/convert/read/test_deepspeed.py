"""Real checkpoints of DeepSpeed, made by `tests/foreign_fixtures/make_deepspeed.py`, bit for bit.

What each should hold was computed by plain AdamW, without DeepSpeed.
"""

from __future__ import annotations

import enum
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointMissing
from keepstep.checkpoint.live.allocation import allocate
from keepstep.checkpoint.live.fills import fill
from keepstep.checkpoint.live.optimizer_options import restore_options
from keepstep.checkpoint.live.restore import plan_fills
from keepstep.checkpoint.live.state_mapping import capture
from tests.integration.checkpoint.foreign_reads import assert_same
from tests.opened_checkpoints import open_foreign

FIXTURES = Path(__file__).parents[4] / "foreign_fixtures" / "deepspeed"
NEXT_TO_IT = "it is next to the checkpoint's directory, not in it"
STAGES = {
    "zero1_bf16_4": "DeepSpeed ZeRO 1",
    "zero1_fp32_2": "DeepSpeed ZeRO 1",
    "zero2_bf16_2": "DeepSpeed ZeRO 2",
    "zero2_fp16_2": "DeepSpeed ZeRO 2",
    "zero3_bf16_2": "DeepSpeed ZeRO 3",
    "zero3_fp32_4": "DeepSpeed ZeRO 3",
    "zero2_bf16_2_universal": "DeepSpeed Universal",
    "zero3_bf16_2_universal": "DeepSpeed Universal",
}


def trained_state(name: str) -> dict[str, torch.Tensor]:
    expected: dict[str, torch.Tensor] = torch.load(FIXTURES / name / "expected.pt")
    state = {key: t for key, t in expected.items() if not key.startswith("master/")}
    for key, tensor in expected.items():
        own = key.replace("master/", "model/")
        if key.startswith("master/") and expected[own].dtype != torch.float32:
            state[f"{key.replace('master/', 'optim/')}/master_param"] = tensor
    return state


@pytest.mark.parametrize("name", STAGES)
def test_state_is_what_plain_training_arrives_at(name: str) -> None:
    source = open_foreign(str(FIXTURES / name))
    assert source.format_name == STAGES[name]
    assert source.step == 3
    expected = trained_state(name)
    for key, tensor in expected.items():
        assert_same(source, key, tensor)
    seen = torch.tensor([5.0, 7.0], dtype=expected["model/frozen.weight"].dtype)
    assert_same(source, "model/seen", seen)
    assert set(source.tensors) == {*expected, "model/seen"}
    assert [(left.name, left.reason) for left in source.left_out] == [("expected.pt", NEXT_TO_IT)]


@pytest.mark.parametrize("name", STAGES)
def test_groups_ties_and_values_are_carried(name: str) -> None:
    documents = open_foreign(str(FIXTURES / name)).documents
    groups = documents["optim/groups"]
    assert [
        (g["parameters"], g["options"]["lr"], g["options"]["weight_decay"]) for g in groups
    ] == [
        (["norm.weight", "bias.weight"], 0.01, 0.0),
        (["embed.weight", "odd.weight", "deep.weight"], 0.02, 0.1),
    ]
    assert documents["model/tied"] == {"head.weight": "embed.weight"}
    values = documents["values"]
    assert (values["epoch"], values["tokens"], values["global_steps"]) == (2, [128, 256], 3)
    assert values["lr_scheduler/last_epoch"] == 3
    assert documents["deepspeed"]["ds_version"] == "0.19.8"
    assert documents["deepspeed"]["loss_scaler"]["dynamic"] is False
    masters = documents.get("masters", {})
    assert len(masters) == (0 if "fp32" in name else 5)
    assert all(m == {"slot": "master_param", "dtype": "float32"} for m in masters.values())


def live_state() -> tuple[torch.nn.ModuleDict, torch.optim.Optimizer]:
    shapes = {"embed": (11, 6), "norm": (5,), "odd": (7, 5), "bias": (3,), "deep": (2, 3, 4)}
    model = torch.nn.ModuleDict({name: torch.nn.Module() for name in (*shapes, "head", "frozen")})
    for name, shape in shapes.items():
        model[name].weight = torch.nn.Parameter(torch.randn(shape))
    model["head"].weight = model["embed"].weight
    model["frozen"].weight = torch.nn.Parameter(torch.randn(3, 11), requires_grad=False)
    model.register_buffer("seen", torch.zeros(2))
    trained = {name: model[name].weight for name in shapes}
    return model, torch.optim.AdamW(
        [
            {"params": [trained.pop("norm"), trained.pop("bias")], "lr": 1.0},
            {"params": list(trained.values()), "lr": 2.0},
        ]
    )


@pytest.mark.parametrize("name", ["zero1_fp32_2", "zero3_fp32_4"])
def test_plain_training_goes_on_from_it(name: str) -> None:
    source = open_foreign(str(FIXTURES / name))
    model, optimizer = live_state()
    allocate(model, [optimizer], source)
    fill(plan_fills(capture({"model": model, "optim": optimizer}), source), source)
    restore_options(model, [optimizer], source.documents)
    expected = trained_state(name)
    for parameter_name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[f"model/{parameter_name}"])
        for slot, value in optimizer.state[parameter].items():
            assert torch.equal(value, expected[f"optim/{parameter_name}/{slot}"])
    assert sum(len(slots) for slots in optimizer.state.values()) == 15
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]


def opened_after(
    directory: Path, name: str, file: str, change: Callable[[Any], None]
) -> ForeignCheckpoint:
    """Open a copy of a checkpoint in which one file's content was changed."""
    copy = directory / "run"
    shutil.copytree(FIXTURES / name, copy)
    path = next(copy.glob(f"global_step3*/{file}"))
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)
    return open_foreign(str(copy))


RANK_1 = "*zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `torch.load` and `torch.save` find stand-ins for the classes in DeepSpeed's files."""
    for module, name in (
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
        ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ):
        holder = ModuleType(module)
        setattr(holder, name, type(name, (), {"__module__": module}))
        monkeypatch.setitem(sys.modules, module, holder)
    config = ModuleType("deepspeed.runtime.zero.config")
    config.ZeroStageEnum = enum.IntEnum(  # type: ignore[attr-defined]
        "ZeroStageEnum", {"one": 1, "two": 2, "three": 3}, module=config.__name__
    )
    monkeypatch.setitem(sys.modules, config.__name__, config)
    for module in list(sys.modules):
        if module.startswith("deepspeed."):
            parts = module.split(".")
            for count in range(1, len(parts)):
                parent = ".".join(parts[:count])
                if parent not in sys.modules:
                    monkeypatch.setitem(sys.modules, parent, ModuleType(parent))


def address(content: Any, name: str) -> Any:
    return content["optimizer_state_dict"]["param_slice_mappings"][1][name]


def set_address(name: str, **values: int) -> Callable[[Any], None]:
    return lambda content: vars(address(content, name)).update(values)


def set_state(key: str, value: object) -> Callable[[Any], None]:
    return lambda content: content["optimizer_state_dict"].update({key: value})


def cut_moments(content: Any) -> None:
    slots = content["optimizer_state_dict"]["base_optimizer_state"]["state"][1]
    slots["exp_avg"] = slots["exp_avg"][:40].clone()


def cut_buffer(content: Any) -> None:
    buffers = content["optimizer_state_dict"]["fp32_flat_groups"]
    buffers[1] = buffers[1][:-1].clone()


def cut_frozen(content: Any) -> None:
    fragments = content["frozen_param_fragments"]
    fragments["frozen.weight"] = fragments["frozen.weight"][:9].clone()


@pytest.mark.usefixtures("classes")
@pytest.mark.parametrize(
    ("name", "file", "change", "message"),
    [
        (
            "zero2_bf16_2", RANK_1, set_address("deep.weight", start=40),
            r"rank_1.*24 elements of deep\.weight are to be at 40 in partition 1, which has 61",
        ),
        (
            "zero2_bf16_2", RANK_1, set_address("odd.weight", numel=34),
            r"all ranks together have 34 elements of odd\.weight, whose shape is \(7, 5\)",
        ),
        (
            "zero2_bf16_2", RANK_1, set_address("odd.weight", start=-1),
            r"rank_1.*does not say where its elements of odd\.weight are",
        ),
        (
            "zero2_bf16_2", RANK_1, cut_moments,
            r"rank_1.*partition 1 has 61 elements of parameters and 40 of their state",
        ),
        (
            "zero2_bf16_2", RANK_1, set_state("partition_count", [3, 3]),
            r"rank_1.*one of \[3, 3\] partitions, and there are files of 2 ranks",
        ),
        (
            "zero3_bf16_2", RANK_1, cut_buffer,
            r"rank_1.*flat buffer 1 has 50 elements, and its parameters need 51 on each of 2",
        ),
        (
            "zero3_bf16_2", "zero_pp_rank_1_mp_rank_00_model_states.pt", cut_frozen,
            r"of frozen\.weight, \(3, 11\), 2 ranks have \[17, 9\] elements, and need 17 each",
        ),
        (
            "zero2_bf16_2", "mp_rank_00_model_states.pt",
            lambda content: content["param_shapes"][1].pop("odd.weight"),
            r"rank_1.*it has odd\.weight, which the module's file has not trained",
        ),
        (
            "zero2_bf16_2", "mp_rank_00_model_states.pt",
            lambda content: content["module"].pop("odd.weight"),
            r"model_states.*it has no odd\.weight, which was trained",
        ),
        (
            "zero3_bf16_2_universal", "zero_pp_rank_0_mp_rank_00_model_states.pt",
            lambda content: content["param_shapes"][1].update({"odd.weight": torch.Size((7, 6))}),
            r"odd\.weight/exp_avg\.pt: it has 35 elements, and the parameter's shape is \(7, 6\)",
        ),
    ],
)  # fmt: skip
def test_files_that_contradict_each_other_are_refused(
    tmp_path: Path, name: str, file: str, change: Callable[[Any], None], message: str
) -> None:
    with pytest.raises(CheckpointDamaged, match=message):
        opened_after(tmp_path, name, file, change)


def test_file_of_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "zero1_bf16_4", tmp_path / "run")
    next(tmp_path.glob("run/*/*pp_rank_1_*optim_states.pt")).unlink()
    with pytest.raises(CheckpointMissing, match="bf16_zero_pp_rank_1_mp_rank_00_optim_states"):
        open_foreign(str(tmp_path / "run"))


def test_files_of_the_last_ranks_that_are_missing_are_noticed(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "zero1_bf16_4", tmp_path / "run")
    next(tmp_path.glob("run/*/*pp_rank_3_*optim_states.pt")).unlink()
    with pytest.raises(CheckpointDamaged, match=r"one of \[4, 4\] partitions, .* of 3 ranks"):
        open_foreign(str(tmp_path / "run"))


@pytest.mark.parametrize("name", ["zero2_bf16_2", "zero3_bf16_2", "zero3_bf16_2_universal"])
def test_files_that_are_not_deepspeeds_are_left_out_by_name(tmp_path: Path, name: str) -> None:
    shutil.copytree(FIXTURES / name, tmp_path / "run")
    step = next(path for path in (tmp_path / "run").glob("global_step3*") if path.is_dir())
    (step / "zero_to_fp32.py").write_text("")
    torch.save({"a": torch.ones(3)}, step / "custom_0.pt")
    assert [(item.name, item.reason) for item in open_foreign(str(tmp_path / "run")).left_out] == [
        *(
            (name, "it was not opened: DeepSpeed has no state of its own in it")
            for name in ("custom_0.pt", "zero_to_fp32.py")
        ),
        ("expected.pt", NEXT_TO_IT),
    ]


def test_file_beside_the_modules_alone_is_left_out_by_name(tmp_path: Path) -> None:
    torch.save({"module": {"w": torch.ones(2)}}, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"a": torch.ones(3)}, tmp_path / "custom_0.pt")
    source = open_foreign(str(tmp_path))
    assert [item.name for item in source.left_out] == ["custom_0.pt"]
