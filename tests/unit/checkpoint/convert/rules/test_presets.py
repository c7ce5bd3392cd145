"""Presets: every spelling of every family, there and back, and what each spelling looks like."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.convert.rules.matching import match_names
from keepstep.checkpoint.convert.rules.plan import Plan
from keepstep.checkpoint.convert.rules.planning import names_of
from keepstep.checkpoint.convert.rules.presets import HUB, families, preset
from keepstep.checkpoint.errors import RulesInvalid
from keepstep.checkpoint.format.layout.source import TensorSpec
from tests.unit.checkpoint.convert.rules.arrays import Array, made
from tests.unit.checkpoint.convert.rules.models import BY_NAME, MODELS, Model, checkpoint_of

PAIRS = [
    pytest.param(model, source, target, id=f"{model.name}-{source}-{target}")
    for model in MODELS
    for source, target in itertools.combinations(preset(model.family).spellings, 2)
    if not {source, target} & model.lacking
]


def converted(model: Model, target: str) -> tuple[Plan, dict[str, Array], dict[str, Array]]:
    """Return the plan from Hugging Face's files, what it reads, and what it makes."""
    specs, arrays = checkpoint_of(model)
    plan = preset(model.family).plan(HUB, target, specs, model.config)
    return plan, arrays, made(plan, arrays)


def test_every_preset_has_a_model() -> None:
    assert {preset(model.family).family for model in MODELS} == set(families())


@pytest.mark.parametrize(("model", "source", "target"), PAIRS)
def test_every_spelling_there_and_back_is_bit_identical(
    model: Model, source: str, target: str
) -> None:
    rules = preset(model.family)
    specs, arrays = checkpoint_of(model)
    start = rules.plan(HUB, source, specs, model.config)
    given = made(start, arrays)
    there = rules.plan(source, target, start.specs, model.config)
    back = rules.plan(target, source, there.specs, model.config)
    returned = made(back, made(there, given))
    assert returned.keys() == given.keys()
    for key, array in given.items():
        assert np.array_equal(returned[key], array), key
    # In one step, without what lies in between, it is the same.
    composed = made(back.after(there), given)
    assert all(np.array_equal(composed[key], array) for key, array in given.items())


def test_round_trip_of_regular_layouts_reads_each_tensor_as_one_box() -> None:
    model = BY_NAME["llama"]
    specs, _ = checkpoint_of(model)
    rules = preset(model.family)
    there = rules.plan(HUB, "torchtitan", specs, model.config)
    back = rules.plan("torchtitan", HUB, there.specs, model.config).after(there)
    assert {len(tensor.views) for tensor in back.tensors.values()} == {1}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_name_of_the_model_is_for_one_rule_of_each_spelling(model: Model) -> None:
    specs, _ = checkpoint_of(model)
    rules = preset(model.family)
    for spelling in rules.spellings.keys() - model.lacking:
        wanted = rules.rules(spelling)
        named = wanted if spelling == HUB else wanted.inverted
        report = match_names(named, names_of(specs), named.variables(model.config))
        assert report.is_complete, report.lines()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_live_spelling_has_the_names_and_shapes_of_the_module(model: Model) -> None:
    specs = {f"model/{name}": TensorSpec("int32", shape) for name, shape in model.shapes.items()}
    plan = preset(model.family).plan(HUB, "live", specs, model.config)
    live = {key.removeprefix("model/"): tensor.spec.shape for key, tensor in plan.tensors.items()}
    assert live == model.live


def test_megatron_qkv_is_by_query_group() -> None:
    plan, given, made_tensors = converted(BY_NAME["llama"], "megatron")
    for layer in range(3):
        q, k, v = (
            given[f"model/model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv"
        )
        groups = [
            part
            for group in range(2)
            for part in (
                q[group * 16 : group * 16 + 16],
                k[group * 8 : group * 8 + 8],
                v[group * 8 : group * 8 + 8],
            )
        ]
        key = f"decoder.layers.{layer}.self_attention.linear_qkv.weight"
        fused = np.concatenate(groups)
        assert np.array_equal(made_tensors[f"model/{key}"], fused)
        assert np.array_equal(made_tensors[f"optim/{key}/exp_avg"], fused + 10**8 - 1)
        assert made_tensors[f"optim/{key}/step"] == 7.0
    steps = {f"optim/model.layers.1.self_attn.{p}_proj.weight/step" for p in "qkv"}
    assert steps in [set(keys) for keys in plan.equal]


def test_megatron_swiglu_has_all_gate_rows_first_and_norms_have_transformer_engines_names() -> None:
    _, given, tensors = converted(BY_NAME["llama"], "megatron")
    for layer in range(3):
        base = f"model/model.layers.{layer}"
        fc1 = tensors[f"model/decoder.layers.{layer}.mlp.linear_fc1.weight"]
        assert np.array_equal(fc1[:48], given[f"{base}.mlp.gate_proj.weight"])
        assert np.array_equal(fc1[48:], given[f"{base}.mlp.up_proj.weight"])
        for stored, name in (
            ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
            ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
        ):
            norm = tensors[f"model/decoder.layers.{layer}.{stored}"]
            assert np.array_equal(norm, given[f"{base}.{name}"])


def test_megatron_vocabulary_is_padded_with_zeros_and_what_padding_held_is_listed() -> None:
    model = BY_NAME["llama"]
    plan, given, tensors = converted(model, "megatron")
    head = tensors["model/output_layer.weight"]
    assert head.shape == (256, 32)
    assert np.array_equal(head[:250], given["model/lm_head.weight"])
    assert not head[250:].any()
    assert plan.left_out == ()
    back = preset(model.family).plan("megatron", HUB, plan.specs, model.config)
    lost = {(left.source, left.box.offset, left.box.shape) for left in back.left_out}
    assert ("optim/output_layer.weight/exp_avg", (250, 0), (6, 32)) in lost
    # Of three models' tensors (model, two moments), embedding and head are padded.
    assert len(lost) == 6


def test_torchtitan_rotary_order_is_metas() -> None:
    _, given, tensors = converted(BY_NAME["llama"], "torchtitan")
    for part, hub, heads in (("wq", "q_proj", 4), ("wk", "k_proj", 2)):
        halves = given[f"model/model.layers.1.self_attn.{hub}.weight"]
        pairs = halves.reshape(heads, 2, 4, 32).transpose(0, 2, 1, 3).reshape(heads * 8, 32)
        assert np.array_equal(tensors[f"model/layers.1.attention.qkv_linear.{part}.weight"], pairs)
    assert np.array_equal(
        tensors["model/layers.1.attention.qkv_linear.wv.weight"],
        given["model/model.layers.1.self_attn.v_proj.weight"],
    )


def test_live_mixtral_holds_the_experts_of_a_layer_in_two_tensors() -> None:
    _, given, tensors = converted(BY_NAME["mixtral"], "live")
    base = "model/model.layers.2"
    experts = [f"{base}.block_sparse_moe.experts.{n}" for n in range(4)]
    fused = np.stack(
        [np.concatenate([given[f"{e}.w1.weight"], given[f"{e}.w3.weight"]]) for e in experts]
    )
    assert np.array_equal(tensors[f"{base}.mlp.experts.gate_up_proj"], fused)
    down = np.stack([given[f"{expert}.w2.weight"] for expert in experts])
    assert np.array_equal(tensors[f"{base}.mlp.experts.down_proj"], down)
    assert np.array_equal(
        tensors[f"{base}.mlp.gate.weight"], given[f"{base}.block_sparse_moe.gate.weight"]
    )


def test_megatron_has_a_tensor_for_each_layer_and_expert() -> None:
    _, given, tensors = converted(BY_NAME["mixtral"], "megatron")
    fc1 = tensors["model/decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight"]
    expert = "model/model.layers.2.block_sparse_moe.experts.3"
    assert np.array_equal(
        fc1, np.concatenate([given[f"{expert}.w1.weight"], given[f"{expert}.w3.weight"]])
    )
    norm = tensors["model/decoder.layers.2.pre_mlp_layernorm.weight"]
    assert np.array_equal(norm, given["model/model.layers.2.post_attention_layernorm.weight"])


def test_megatron_gpt2_is_transposed_and_by_head() -> None:
    _, given, tensors = converted(BY_NAME["gpt2"], "megatron")
    stored = tensors["model/decoder.layers.1.self_attention.linear_qkv.weight"]
    hub = given["model/transformer.h.1.attn.c_attn.weight"].T
    by_head = hub.reshape(3, 4, 8, 32).transpose(1, 0, 2, 3).reshape(96, 32)
    assert np.array_equal(stored, by_head)
    bias = given["model/transformer.h.1.attn.c_attn.bias"]
    assert np.array_equal(
        tensors["model/decoder.layers.1.self_attention.linear_qkv.bias"],
        bias.reshape(3, 4, 8).transpose(1, 0, 2).reshape(96),
    )
    fc2 = given["model/transformer.h.0.mlp.c_proj.weight"].T
    assert np.array_equal(tensors["model/decoder.layers.0.mlp.linear_fc2.weight"], fc2)


def test_oldest_gpt2_files_are_read_without_prefix_and_without_masks() -> None:
    model = BY_NAME["gpt2"]
    specs, arrays = checkpoint_of(model)
    old = {key.replace("model/transformer.", "model/"): key for key in specs if "model/" in key}
    old_specs = {name: specs[key] for name, key in old.items()}
    old_specs["model/h.0.attn.bias"] = specs["model/transformer.wpe.weight"]
    plan = preset("gpt2").plan(HUB, "live", old_specs, model.config)
    tensors = made(plan, {name: arrays[key] for name, key in old.items()})
    assert all(np.array_equal(tensors[key], arrays[key]) for key in old.values())
    assert [(left.source, left.why) for left in plan.left_out] == [
        ("model/h.0.attn.bias", "causal mask, the same in every model")
    ]


def test_deepseek_norms_have_the_name_of_their_kind_of_layer() -> None:
    _, given, tensors = converted(BY_NAME["deepseek-v3"], "megatron")
    for layer, name in ((0, "mlp.linear_fc1.layer_norm_weight"), (2, "pre_mlp_layernorm.weight")):
        assert np.array_equal(
            tensors[f"model/decoder.layers.{layer}.{name}"],
            given[f"model/model.layers.{layer}.post_attention_layernorm.weight"],
        )


def test_other_name_of_a_norm_is_read() -> None:
    model = BY_NAME["llama"]
    plan, _, tensors = converted(model, "megatron")
    stored, live = "linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
    renamed = {key.replace(f"mlp.{stored}", live): key for key in plan.tensors}
    specs = {name: plan.specs[key] for name, key in renamed.items()}
    back = preset("llama").plan("megatron", HUB, specs, model.config)
    _, arrays = checkpoint_of(model)
    returned = made(back, {name: tensors[key] for name, key in renamed.items()})
    assert all(np.array_equal(returned[key], array) for key, array in arrays.items())


def test_heads_that_do_not_divide_are_refused_by_name_and_line() -> None:
    model = BY_NAME["llama"]
    specs, _ = checkpoint_of(model)
    wrong = {**model.config, "num_attention_heads": 5, "head_dim": None}
    with pytest.raises(RulesInvalid, match=r"llama\.toml:9: head_dim: .*32 is not a multiple of 5"):
        preset("llama").plan(HUB, "megatron", specs, wrong)
    with pytest.raises(RulesInvalid, match=r"llama\.toml:\d+: .*q_proj.*q = heads \* head_dim"):
        preset("llama").plan(HUB, "megatron", specs, {**model.config, "num_attention_heads": 2})
    config = {name: value for name, value in model.config.items() if name != "vocab_size"}
    with pytest.raises(RulesInvalid, match=r"llama\.toml:\d+: .*'vocab' is not known"):
        preset("llama").plan(HUB, "megatron", specs, config)


def test_unknown_family_and_spelling_name_what_there_is() -> None:
    with pytest.raises(RulesInvalid, match="there are deepseek_v3, gemma"):
        preset("elephant")
    with pytest.raises(RulesInvalid, match="'gpt2' has no spelling 'torchtitan'; it has hf, live"):
        preset("gpt2").rules("torchtitan")


def test_spelling_to_itself_carries_everything() -> None:
    model = BY_NAME["llama"]
    plan, _, tensors = converted(model, "megatron")
    same = preset("llama").plan("megatron", "megatron", plan.specs, model.config)
    assert not same.left_out
    for key, array in made(same, tensors).items():
        assert np.array_equal(array, tensors[key]), key


@given(st.data())
def test_damaged_checkpoint_is_refused_or_planned_completely(data: st.DataObject) -> None:
    """Tensors are missing, or have other shapes, names or types."""
    model = data.draw(st.sampled_from(MODELS))
    rules = preset(model.family)
    spelling = data.draw(st.sampled_from(sorted(rules.spellings.keys() - model.lacking)))
    specs, _ = checkpoint_of(model)
    given_specs = dict(rules.plan(HUB, spelling, specs, model.config).specs)
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(given_specs)))
        spec = given_specs.pop(key)
        shape = tuple(data.draw(st.lists(st.integers(0, 48), max_size=3)))
        change = data.draw(st.sampled_from(["missing", "shape", "name", "type"]))
        if change == "shape":
            given_specs[key] = TensorSpec(spec.dtype, shape)
        elif change == "name":
            given_specs[data.draw(st.sampled_from([f"{key}0", key.replace("0", "1")]))] = spec
        elif change == "type":
            given_specs[key] = TensorSpec("float64", spec.shape)
    target = data.draw(st.sampled_from(sorted(rules.spellings.keys() - model.lacking)))
    try:
        plan = rules.plan(spelling, target, given_specs, model.config)
    except RulesInvalid:
        return
    for tensor in plan.tensors.values():
        assert sum(view.size for view in tensor.views) == np.prod(tensor.spec.shape)
