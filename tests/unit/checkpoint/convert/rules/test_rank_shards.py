"""Tensors of ranks' own files, joined to global ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from keepstep.checkpoint.convert.read.arrays import view_of
from keepstep.checkpoint.convert.rules.presets import HUB, preset
from keepstep.checkpoint.convert.rules.rank_merges import ShardMerge
from keepstep.checkpoint.convert.rules.rank_shards import RankRules, join_ranks
from keepstep.checkpoint.convert.rules.rule import RuleSet
from keepstep.checkpoint.convert.rules.rule_file import parse_rules
from keepstep.checkpoint.errors import RulesInvalid
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.source import TensorSpec
from tests.unit.checkpoint.convert.rules.arrays import Array, made
from tests.unit.checkpoint.convert.rules.models import BY_NAME, checkpoint_of

Ranks = list[dict[str, Array]]
Merges = dict[str, ShardMerge]


def rules_of(text: str) -> RuleSet:
    return parse_rules(text, "my.toml")["rule"]


def specs_of(ranks: Ranks) -> list[dict[str, TensorSpec]]:
    return [
        {key: TensorSpec(str(array.dtype), array.shape) for key, array in tensors.items()}
        for tensors in ranks
    ]


def join(rules: RuleSet, ranks: Ranks, config: Mapping[str, Json] | None = None) -> Merges:
    return join_ranks(RankRules(rules, config or {}), specs_of(ranks))


def joined(merges: Merges, ranks: Ranks) -> dict[str, Array]:
    """Return the tensors that the ranks' make up; each element comes from some rank."""
    made: dict[str, Array] = {}
    for key, merge in merges.items():
        dtype = next(tensors[key].dtype for tensors in ranks if key in tensors)
        made[key] = np.empty(merge.shape, dtype)
        filled = np.zeros(merge.shape, bool)
        for part in merge.parts:
            target, source = part.target, part.source
            view_of(made[key], target)[...] = view_of(ranks[part.rank][key], source)
            view_of(filled, target)[...] = True
        assert filled.all()
    return made


def holders(merges: Merges, key: str) -> list[int]:
    return [part.rank for part in merges[key].parts]


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
    together = join(rules.rules("megatron"), ranks, model.config)
    for key, array in joined(together, ranks).items():
        assert np.array_equal(array, whole[key]), key
    norm = "model/decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
    assert holders(together, norm) == [0, 1]


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
    assert np.array_equal(joined(join(rules, ranks), ranks)["model/qkv"], whole)
    ranks[3]["model/qkv"] = ranks[3]["model/qkv"][:3]
    with pytest.raises(RulesInvalid, match=r"my\.toml:1: qkv: model/qkv: each of 4 ranks is to"):
        join(rules, ranks)


def test_dimension_is_sliced_unevenly_and_beside_the_layers() -> None:
    rules = rules_of(
        '[[rule]]\nmatch = "w"\nrename = "h.{n:int}"\nshard = 1\n'
        'stacked = { axis = 1, placeholder = "n" }'
    )
    whole = np.arange(2 * 3 * 5).reshape(2, 3, 5)
    ranks: Ranks = [{"model/w": whole[:, :, :3]}, {"model/w": whole[:, :, 3:]}]
    merges = join(rules, ranks)
    assert np.array_equal(joined(merges, ranks)["model/w"], whole)


def test_fused_tensor_that_is_sliced_along_another_dimension_is_put_side_by_side() -> None:
    rules = rules_of(
        '[[rule]]\nmatch = "f"\nrename = ["a", "b"]\nparts = { a = 4, b = 2 }\nshard = 1'
    )
    whole = np.arange(6 * 5).reshape(6, 5)
    ranks: Ranks = [{"model/f": whole[:, :3]}, {"model/f": whole[:, 3:]}]
    merges = join(rules, ranks)
    assert np.array_equal(joined(merges, ranks)["model/f"], whole)


def test_tensors_that_no_rule_joins_are_the_first_ranks() -> None:
    rules = rules_of('[[rule]]\nmatch = "mask"\ndrop = "made anew"')
    ranks: Ranks = [{"other": np.ones(2)}, {"other": np.ones(2), "model/mask": np.ones(3)}]
    merges = join(rules, ranks)
    assert holders(merges, "other") == [0, 1]
    assert holders(merges, "model/mask") == [1]
    ranks[0]["model/w"] = ranks[1]["model/w"] = np.ones(1)
    with pytest.raises(RulesInvalid, match="no rule matches w"):
        join(rules, ranks)


def test_copies_that_drifted_are_named_for_their_mean_and_equal_ones_for_a_check() -> None:
    rules = rules_of(
        '[[rule]]\nmatch = "norm"\nrename = "ln"\naverage = true\n'
        '[[rule]]\nmatch = "bias"\nreplicated = true'
    )
    ranks: Ranks = [
        {"model/norm": np.zeros(2), "model/bias": np.ones(2), "optim/norm/step": np.ones(())}
        for _ in range(2)
    ]
    merges = join(rules, ranks)
    assert {key for key, merge in merges.items() if merge.is_mean} == {"model/norm"}
    assert all(holders(merges, key) == [0, 1] for key in ranks[0])


def test_one_rank_holds_whole_tensors() -> None:
    ranks: Ranks = [{"model/w": np.arange(4)}]
    merges = join(rules_of('[[rule]]\nmatch = "w"'), ranks)
    assert np.array_equal(joined(merges, ranks)["model/w"], np.arange(4))


@pytest.mark.parametrize(
    ("rule", "shapes", "message"),
    [
        ("", [(2,), (2,)], "2 ranks have it, and the rule does not say what each holds"),
        ("replicated = true", [(2,), (3,)], "copies of it have different shapes"),
        ("shard = 1", [(2,), (2,)], "there is no dimension 1"),
        ("shard = 0", [(2, 3), (2, 4)], "slices of dimension 0 differ in another one"),
        ("shard = 0", [(2,), None], "rank 1 has no model/w, which other ranks have"),
    ],
)
def test_ranks_that_contradict_the_rule_are_refused(
    rule: str, shapes: list[tuple[int, ...] | None], message: str
) -> None:
    ranks: Ranks = [{} if shape is None else {"model/w": np.zeros(shape)} for shape in shapes]
    with pytest.raises(RulesInvalid, match=message):
        join(rules_of(f'[[rule]]\nmatch = "w"\n{rule}'), ranks)


def test_ranks_with_different_data_types_are_refused() -> None:
    ranks: Ranks = [{"model/w": np.zeros(2, np.float32)}, {"model/w": np.zeros(2, np.float64)}]
    with pytest.raises(RulesInvalid, match="w: the ranks have different data types"):
        join(rules_of('[[rule]]\nmatch = "w"\nshard = 0'), ranks)
