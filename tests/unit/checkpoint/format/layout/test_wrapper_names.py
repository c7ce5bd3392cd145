"""Claims about names of tensors without those of wrappers."""

from __future__ import annotations

import pytest

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.part_table import Part, PartTable
from keepstep.checkpoint.format.layout.wrapper_names import (
    StoredNames,
    may_have_wrappers,
    without_wrappers,
)
from keepstep.checkpoint.live.part_slices import check_parts


@pytest.mark.parametrize(
    ("name", "parallel", "clean"),
    [
        ("_orig_mod.up.weight", (), "up.weight"),
        (
            "_fsdp_wrapped_module.blocks.0._checkpoint_wrapped_module.up.bias",
            (),
            "blocks.0.up.bias",
        ),
        ("_orig_mod.module.up.weight", ("module",), "up.weight"),
        ("module.backbone.module.x", ("backbone.module",), "module.backbone.module.x"),
        ("module.backbone.module.x", ("module.backbone.module",), "module.backbone.x"),
        ("module.module.x", ("module",), "module.x"),
        ("module.x", (), "module.x"),
    ],
)
def test_names_of_wrappers_are_left_out(name: str, parallel: tuple[str, ...], clean: str) -> None:
    assert without_wrappers(name, parallel) == clean


@pytest.mark.parametrize(
    ("key", "may"),
    [
        ("model/up.weight", False),
        ("model/submodule.modules.weight", False),
        ("model/module.up.weight", True),
        ("model/module", True),
        ("optim/up._orig_mod.weight/exp_avg", True),
        ("model/_fsdp_wrapped_module.up.weight", True),
        ("model/up._checkpoint_wrapped_module.weight", True),
    ],
)
def test_only_keys_with_a_part_that_a_wrapper_may_have_may_be_renamed(key: str, may: bool) -> None:
    assert may_have_wrappers(["model/down.weight", key]) == may
    stored = {"model/down.weight", key}
    if not may:
        assert not StoredNames.of(stored, ["up.weight", "down.weight"]).keys


def test_a_checkpoint_of_a_wrapped_model_is_renamed_for_the_bare_one() -> None:
    keys = {
        "model/module.up._orig_mod.weight", "model/module.scale",
        "optim/module.up._orig_mod.weight/exp_avg", "extra/module.scale", "rank/00000/rng/cpu",
    }  # fmt: skip
    names = StoredNames.of(keys, ["up.weight", "scale"])
    assert names.keys == {
        "model/up.weight": "model/module.up._orig_mod.weight",
        "model/scale": "model/module.scale",
        "optim/up.weight/exp_avg": "optim/module.up._orig_mod.weight/exp_avg",
    }
    documents = names.documents({
        "optim/groups": [{"parameters": ["module.scale"], "options": {"lr": 1}}],
        "optim/scalars": {"module.scale/step": 3},
        "model/tied": {"module.head": "module.up._orig_mod.weight"},
        "parts": {"module.up._orig_mod.weight": {}},
        "values": {"module.scale": 1},
    })  # fmt: skip
    assert documents == {
        "optim/groups": [{"parameters": ["scale"], "options": {"lr": 1}}],
        "optim/scalars": {"scale/step": 3},
        "model/tied": {"head": "up.weight"},
        "parts": {"up.weight": {}},
        "values": {"module.scale": 1},
    }


@pytest.mark.parametrize("names", [["module.x"], ["module.x", "up"]])
def test_a_wrapped_model_may_have_a_module_of_that_name(names: list[str]) -> None:
    assert StoredNames.of(["model/module.module.x", "model/module.up"], names).is_parallel


def test_what_is_said_of_a_wrapped_model_is_said_of_the_bare_one() -> None:
    keys = {"model/module.qkv", "model/module.qkv_scale", "extra/module.qkv"}
    fused = PartTable(0, (Part("q", 2), Part("k", 2))).to_json()
    documents = StoredNames.of(keys, ["qkv", "qkv_scale"]).documents({
        "model/tied": {"module.head": {"name": "module.qkv", "transposed": True, "later": 1}},
        "parts": {"model/module.qkv": fused},
        "padding": {"model/module.qkv": {"logical_shape": [3]}},
        "masters": {"model/module.qkv": {"slot": "master_param", "dtype": "float32"}},
        "averages": {
            "extra/module.qkv": {"of": "model/module.qkv", "count": "model/module.count"},
            "model/module.ema": {"of": "model/module.qkv", "decay": 0.5},
        },
        "scales": {
            "model/module.qkv": {
                "scale": "model/module.qkv_scale", "zero_point": "model/module.zero",
                "block_shape": [4], "dtype": "bfloat16",
            }
        },
    })  # fmt: skip
    assert documents == {
        "model/tied": {"head": {"name": "qkv", "transposed": True, "later": 1}},
        "parts": {"model/qkv": fused},
        "padding": {"model/qkv": {"logical_shape": [3]}},
        "masters": {"model/qkv": {"slot": "master_param", "dtype": "float32"}},
        "averages": {
            "extra/module.qkv": {"of": "model/qkv", "count": "model/count"},
            "model/ema": {"of": "model/qkv", "decay": 0.5},
        },
        "scales": {
            "model/qkv": {
                "scale": "model/qkv_scale", "zero_point": "model/zero",
                "block_shape": [4], "dtype": "bfloat16",
            }
        },
    }  # fmt: skip
    other_order = PartTable(0, (Part("k", 2), Part("q", 2))).to_json()
    with pytest.raises(LayoutMismatch, match="model/qkv: is stored with the parts"):
        check_parts(documents["parts"], {"model/qkv": other_order})


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["model/module.x"], ["module.x"]),
        (["model/module.x"], []),
        (["model/module.x", "model/scale"], ["x", "scale"]),
        (["optim/module.x/step"], ["x"]),
        (["model/module.x"], ["module.x", "head"]),
        (["model/module.x"], ["module.x", "module.another"]),
        (["model/module.x"], ["another"]),
    ],
)
def test_a_module_of_that_name_is_no_wrapper(keys: list[str], names: list[str]) -> None:
    assert StoredNames.of(keys, names).keys == {}
