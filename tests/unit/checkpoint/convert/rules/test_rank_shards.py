"""Tensors of ranks' own files, joined to global ones."""

from __future__ import annotations

import numpy as np
import pytest

from keepstep.checkpoint.convert.rules.plan import Plan, unchanged
from keepstep.checkpoint.convert.rules.planning import apply
from keepstep.checkpoint.convert.rules.presets import HUB, preset
from keepstep.checkpoint.convert.rules.rank_shards import join_ranks, rank_key
from keepstep.checkpoint.convert.rules.rule import RuleSet
from keepstep.checkpoint.convert.rules.rule_file import parse_rules
from keepstep.checkpoint.errors import RulesInvalid
from keepstep.checkpoint.format.layout.source import TensorSpec
from tests.unit.checkpoint.convert.rules.arrays import Array, made
from tests.unit.checkpoint.convert.rules.models import BY_NAME, checkpoint_of

Ranks = list[dict[str, Array]]


def rules_of(text: str) -> RuleSet:
    return parse_rules(text, "my.toml")["rule"]


def specs_of(ranks: Ranks) -> list[dict[str, TensorSpec]]:
    return [
        {key: TensorSpec(str(array.dtype), array.shape) for key, array in tensors.items()}
        for tensors in ranks
    ]


def joined(plan: Plan, ranks: Ranks) -> dict[str, Array]:
    sources = {
        rank_key(rank, key): array
        for rank, tensors in enumerate(ranks)
        for key, array in tensors.items()
    }
    return made(plan, sources)


def megatron_shard(name: str, whole: Array, rank: int) -> Array:
    """Return what a rank of two holds, as Megatron's layers slice themselves."""
    if whole.ndim == 0 or "layer_norm" in name or "layernorm" in name:
        return whole
    if "linear_fc1" in name:
        gate, up = np.split(whole, 2)
        return np.concatenate([np.split(gate, 2)[rank], np.split(up, 2)[rank]])
    axis = 1 if "linear_proj" in name or "linear_fc2" in name else 0
    return np.split(whole, 2, axis)[rank]


def test_two_ranks_of_megatron_become_the_model_on_file() -> None:
    model = BY_NAME["llama"]
    specs, arrays = checkpoint_of(model)
    rules = preset(model.family)
    to_megatron = rules.plan(HUB, "megatron", specs, model.config)
    whole = made(to_megatron, arrays)
    ranks = [
        {key: megatron_shard(key, array, rank) for key, array in whole.items()} for rank in (0, 1)
    ]
    together = join_ranks(rules.rules("megatron"), specs_of(ranks), model.config)
    for key, array in joined(together, ranks).items():
        assert np.array_equal(array, whole[key]), key
    back = rules.plan("megatron", HUB, together.specs, model.config).after(together)
    for key, array in joined(back, ranks).items():
        assert np.array_equal(array, arrays[key]), key
    norm = "model/decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
    assert (rank_key(0, norm), rank_key(1, norm)) in together.equal


def test_parts_are_sliced_by_themselves() -> None:
    rules = rules_of(
        '[[rule]]\nmatch = "qkv"\nrename = ["q", "k", "v"]\n'
        "parts = { q = 8, k = 4, v = 4 }\nshard = 0"
    )
    whole = np.arange(32).reshape(16, 2)
    q, k, v = whole[:8], whole[8:12], whole[12:]
    ranks = [
        {"model/qkv": np.concatenate([np.split(part, 4)[rank] for part in (q, k, v)])}
        for rank in range(4)
    ]
    assert np.array_equal(joined(join_ranks(rules, specs_of(ranks), {}), ranks)["model/qkv"], whole)
    ranks[3]["model/qkv"] = ranks[3]["model/qkv"][:3]
    with pytest.raises(RulesInvalid, match=r"my\.toml:1: qkv: model/qkv: each of 4 ranks is to"):
        join_ranks(rules, specs_of(ranks), {})


def test_dimension_is_sliced_unevenly_and_beside_the_layers() -> None:
    rules = rules_of(
        '[[rule]]\nmatch = "w"\nrename = "h.{n:int}"\nshard = 1\n'
        'stacked = { axis = 1, placeholder = "n" }'
    )
    whole = np.arange(2 * 3 * 5).reshape(2, 3, 5)
    ranks: Ranks = [{"model/w": whole[:, :, :3]}, {"model/w": whole[:, :, 3:]}]
    plan = join_ranks(rules, specs_of(ranks), {})
    assert np.array_equal(joined(plan, ranks)["model/w"], whole)


def test_fused_tensor_that_is_sliced_along_another_dimension_is_put_side_by_side() -> None:
    rules = rules_of(
        '[[rule]]\nmatch = "f"\nrename = ["a", "b"]\nparts = { a = 4, b = 2 }\nshard = 1'
    )
    whole = np.arange(6 * 5).reshape(6, 5)
    ranks: Ranks = [{"model/f": whole[:, :3]}, {"model/f": whole[:, 3:]}]
    plan = join_ranks(rules, specs_of(ranks), {})
    assert np.array_equal(joined(plan, ranks)["model/f"], whole)


def test_tensors_that_no_rule_joins_are_the_first_ranks() -> None:
    rules = rules_of('[[rule]]\nmatch = "mask"\ndrop = "made anew"')
    ranks: Ranks = [{"other": np.ones(2)}, {"other": np.ones(2), "model/mask": np.ones(3)}]
    plan = join_ranks(rules, specs_of(ranks), {})
    assert plan.tensors["other"].views[0].source == rank_key(0, "other")
    assert plan.tensors["model/mask"].views[0].source == rank_key(1, "model/mask")
    assert plan.equal == ((rank_key(0, "other"), rank_key(1, "other")),)
    ranks[0]["model/w"] = ranks[1]["model/w"] = np.ones(1)
    with pytest.raises(RulesInvalid, match="no rule matches w"):
        join_ranks(rules, specs_of(ranks), {})


def test_fragments_are_ranges_of_the_flattened_tensor() -> None:
    rules = rules_of('[[rule]]\nmatch = "w"\nfragments = true')
    whole = np.arange(3 * 4 * 5).reshape(3, 4, 5)
    flat = whole.reshape(-1)
    ranks: Ranks = [{"model/w": flat[:33]}, {"model/w": flat[33:34]}, {"model/w": flat[34:]}]
    plan = join_ranks(rules, specs_of(ranks), {}, {"w": (3, 4, 5)})
    assert np.array_equal(joined(plan, ranks)["model/w"], whole)
    with pytest.raises(RulesInvalid, match="its global shape is not known"):
        join_ranks(rules, specs_of(ranks), {})
    with pytest.raises(RulesInvalid, match="are not 72 elements in a row"):
        join_ranks(rules, specs_of(ranks), {}, {"w": (3, 4, 6)})


def test_copies_that_drifted_are_named_for_their_mean_and_equal_ones_for_a_check() -> None:
    rules = rules_of(
        '[[rule]]\nmatch = "norm"\nrename = "ln"\naverage = true\n'
        '[[rule]]\nmatch = "bias"\nreplicated = true'
    )
    ranks: Ranks = [
        {"model/norm": np.zeros(2), "model/bias": np.ones(2), "optim/norm/step": np.ones(())}
        for _ in range(2)
    ]
    plan = join_ranks(rules, specs_of(ranks), {})
    both = {key: (rank_key(0, key), rank_key(1, key)) for key in ranks[0]}
    assert plan.mean == (both["model/norm"],)
    assert set(plan.equal) == {both["model/bias"], both["optim/norm/step"]}
    renamed = apply(rules, plan.specs, {}).after(plan)
    assert (renamed.mean, renamed.equal) == (plan.mean, plan.equal)
    # The ranks' files may be read by way of another plan in turn.
    files = Plan(
        tensors={
            rank_key(rank, key): unchanged(f"file/{rank_key(rank, key)}", spec)
            for rank, specs in enumerate(specs_of(ranks))
            for key, spec in specs.items()
        }
    )
    assert plan.after(files).mean == (tuple(f"file/{key}" for key in both["model/norm"]),)


def test_one_rank_holds_whole_tensors_though_they_may_be_flat() -> None:
    rules = rules_of('[[rule]]\nmatch = "w"\n[[rule]]\nmatch = "flat"\nfragments = true')
    ranks: Ranks = [{"model/w": np.arange(4), "model/flat": np.arange(6)}]
    plan = join_ranks(rules, specs_of(ranks), {}, {"flat": (2, 3)})
    assert not plan.equal
    tensors = joined(plan, ranks)
    assert np.array_equal(tensors["model/w"], np.arange(4))
    assert np.array_equal(tensors["model/flat"], np.arange(6).reshape(2, 3))


@pytest.mark.parametrize(
    ("rule", "shapes", "message"),
    [
        ("", [(2,), (2,)], "2 ranks have it, and the rule does not say what each holds"),
        ("replicated = true", [(2,), (3,)], "copies have different shapes"),
        ("shard = 1", [(2,), (2,)], "there is no dimension 1"),
        ("shard = 0", [(2, 3), (2, 4)], "slices of dimension 0 have other shapes"),
        ("shard = 0", [(2,), None], "rank 1 has no model/w, which other ranks have"),
    ],
)
def test_ranks_that_contradict_the_rule_are_refused(
    rule: str, shapes: list[tuple[int, ...] | None], message: str
) -> None:
    ranks: Ranks = [{} if shape is None else {"model/w": np.zeros(shape)} for shape in shapes]
    with pytest.raises(RulesInvalid, match=message):
        join_ranks(rules_of(f'[[rule]]\nmatch = "w"\n{rule}'), specs_of(ranks), {})


def test_ranks_with_different_data_types_are_refused() -> None:
    ranks: Ranks = [{"model/w": np.zeros(2, np.float32)}, {"model/w": np.zeros(2, np.float64)}]
    with pytest.raises(RulesInvalid, match="w: the ranks have different data types"):
        join_ranks(rules_of('[[rule]]\nmatch = "w"\nshard = 0'), specs_of(ranks), {})
