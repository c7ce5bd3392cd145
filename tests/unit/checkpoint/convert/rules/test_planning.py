"""Rules applied to tensors: matching, optimizer state, refusals, random rules there and back."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.convert.rules.matching import match_names
from keepstep.checkpoint.convert.rules.planning import apply, names_of
from keepstep.checkpoint.convert.rules.rule import RuleSet
from keepstep.checkpoint.convert.rules.rule_file import parse_rules
from keepstep.checkpoint.errors import RulesInvalid
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.source import TensorSpec
from tests.unit.checkpoint.convert.rules.arrays import Array, made

Shape = tuple[int, ...]


def rules_of(text: str) -> RuleSet:
    return parse_rules(text, "my.toml")["rule"]


def specs_of(shapes: Mapping[str, Shape], dtype: str = "int64") -> dict[str, TensorSpec]:
    return {key: TensorSpec(dtype, shape) for key, shape in shapes.items()}


def arrays_of(specs: Mapping[str, TensorSpec]) -> dict[str, Array]:
    arrays, count = {}, 1
    for key, spec in specs.items():
        size = math.prod(spec.shape)
        arrays[key] = np.arange(count, count + size).reshape(spec.shape)
        count += size
    return arrays


@st.composite
def random_rules(draw: st.DrawFn) -> tuple[str, dict[str, Shape]]:
    """Return a file of rules, and shapes of tensors that `rename` names."""
    text, shapes = "", {}
    for number in range(draw(st.integers(1, 3))):
        parts = draw(st.sampled_from([1, 1, 2, 3]))
        layers, experts = draw(st.sampled_from([(1, 1), (3, 1), (1, 2), (3, 2), (0, 0)]))
        stacked = layers * experts > 0
        axes = draw(st.permutations([0, 1]))
        rank = draw(st.integers(1, 3))
        groups = draw(st.integers(1, 3))
        sizes = [groups * draw(st.integers(1, 4)) for _ in range(parts)]
        dim = draw(st.integers(0, rank - 1))
        other = [draw(st.integers(0, 5)) for _ in range(rank)]
        order = draw(st.permutations(range(rank)))
        grid = [draw(st.integers(1, 3)) for _ in range(3)]
        grid_order = draw(st.permutations(range(3)))
        placeholders = ".{layer:int}.{expert:int}" if stacked else ""
        names = [f"h{number}{placeholders}.{part}" for part in range(parts)]
        text += f'[[rule]]\nmatch = "t{number}"\nrename = {names if parts > 1 else names[0]!r}\n'
        if stacked:
            text += f'stacked = {{ axis = {axes[0]}, placeholder = "layer" }}\n'
            text += f'experts = {{ axis = {axes[1]}, placeholder = "expert" }}\n'
        if parts > 1:
            members = ", ".join(f"p{part} = {size}" for part, size in enumerate(sizes))
            text += f"parts = {{ {members} }}\ndim = {dim}\ninterleave = {groups}\n"
            if permuted := draw(st.lists(st.sampled_from(range(parts)), unique=True)):
                text += (
                    f"reorder = {{ dim = {dim}, parts = {[f'p{part}' for part in permuted]}, "
                    f"shape = ['part / {groups}', {groups}], order = [1, 0] }}\n"
                )
        elif draw(st.booleans()):
            other[dim] = math.prod(grid)
            text += f"reorder = {{ dim = {dim}, shape = {grid}, order = {list(grid_order)} }}\n"
        if draw(st.booleans()):
            text += f"transpose = {list(order)}\n"
        else:
            order = list(range(rank))
        for part, name in enumerate(names):
            unit = list(other)
            if parts > 1:
                unit[dim] = sizes[part]
            shape = tuple(unit[axis] for axis in order)
            for layer in range(layers if stacked else 1):
                for expert in range(experts if stacked else 1):
                    single = name.replace("{layer:int}", str(layer))
                    single = single.replace("{expert:int}", str(expert))
                    shapes[f"model/{single}"] = shape
    return text, shapes


@given(random_rules())
def test_inverted_rules_bring_back_identical_bytes(case: tuple[str, dict[str, Shape]]) -> None:
    text, shapes = case
    rules = rules_of(text)
    specs = specs_of(shapes)
    given_arrays = arrays_of(specs)
    there = apply(rules.inverted, specs, {})
    middle = made(there, given_arrays)
    assert len(middle) == text.count("[[rule]]")
    back = apply(rules, there.specs, {})
    assert not there.left_out
    assert not back.left_out
    returned = made(back, middle)
    assert returned.keys() == given_arrays.keys()
    for key, array in given_arrays.items():
        assert np.array_equal(returned[key], array), key
    at_once = made(back.after(there), given_arrays)
    assert all(np.array_equal(at_once[key], array) for key, array in given_arrays.items())


QKV = """
[config]
heads = "num_heads"
[[rule]]
match = "qkv"
rename = ["q", "k", "v"]
parts = { q = "heads * 2", k = 2, v = 2 }
"""


def test_some_parts_alone_are_permuted_each_by_its_own_grid() -> None:
    rules = rules_of(
        """
[[rule]]
match = "qkv"
rename = ["q", "k", "v"]
parts = { q = 16, k = 8, v = 8 }
interleave = 2
reorder = { parts = ["q", "k"], shape = ["part / 4", 2, 2], order = [0, 2, 1] }
"""
    )
    # Each of the two groups has two heads of q, one of k and one of v, of two pairs each.
    specs = specs_of({"model/qkv": (32,)})
    made_tensors = made(apply(rules, specs, {}), {"model/qkv": np.arange(32)})
    assert {key: values.tolist() for key, values in made_tensors.items()} == {
        "model/q": [0, 2, 1, 3, 4, 6, 5, 7, 16, 18, 17, 19, 20, 22, 21, 23],
        "model/k": [8, 10, 9, 11, 24, 26, 25, 27],
        "model/v": [12, 13, 14, 15, 28, 29, 30, 31],
    }


def test_rule_of_one_way_is_none_of_the_way_back() -> None:
    rules = rules_of(
        '[[rule]]\nmatch = "a.{n:int}"\nrename = "b.{n}"\n'
        '[[rule]]\nmatch = "old.{n:int}"\nrename = "b.{n}"\none_way = true\n'
    )
    there = apply(rules, specs_of({"model/a.0": (2,), "model/old.1": (2,)}), {})
    assert set(there.tensors) == {"model/b.0", "model/b.1"}
    assert set(apply(rules.inverted, there.specs, {}).tensors) == {"model/a.0", "model/a.1"}


def test_parts_of_the_unsharded_tensor_are_boxes_of_it() -> None:
    plan = apply(rules_of(QKV), specs_of({"model/qkv": (12, 3)}), {"num_heads": 4})
    (view,) = plan.tensors["model/k"].views
    assert (view.target_box, view.source_box) == (Box((0, 0), (2, 3)), Box((8, 0), (2, 3)))


def test_rank_reads_only_what_its_box_needs() -> None:
    plan = apply(rules_of(QKV), specs_of({"model/qkv": (12, 3)}), {"num_heads": 4})
    box = Box((6, 1), (2, 2))
    assert [view.source_box for view in plan.tensors["model/q"].views_in(box)] == [box]
    merged = apply(
        rules_of(QKV).inverted,
        specs_of({"model/q": (8, 3), "model/k": (2, 3), "model/v": (2, 3)}),
        {"num_heads": 4},
    )
    reads = merged.tensors["model/qkv"].views_in(Box((7, 0), (2, 3)))
    assert {(view.source, view.source_box) for view in reads} == {
        ("model/q", Box((7, 0), (1, 3))),
        ("model/k", Box((0, 0), (1, 3))),
    }


def test_rotated_slot_of_the_parameters_shape_follows_and_others_are_named() -> None:
    specs = specs_of(
        {"model/qkv": (12, 3), "optim/qkv/exp_avg": (12, 3), "optim/qkv/row": (12,)}
    ) | {"optim/qkv/step": TensorSpec("float32", ()), "averages/a": TensorSpec("float32", (2,))}
    plan = apply(rules_of(QKV), specs, {"num_heads": 4})
    assert plan.tensors["optim/v/exp_avg"].spec == TensorSpec("int64", (2, 3))
    assert plan.tensors["optim/v/step"].spec == TensorSpec("float32", ())
    assert plan.tensors["averages/a"].spec == TensorSpec("float32", (2,))
    assert [left.source for left in plan.left_out] == ["optim/qkv/row"]
    assert "[12] is not that of its parameter, [12, 3], which my.toml:4 rearranges" in (
        plan.left_out[0].why
    )
    assert "optim/v/row" not in plan.tensors


def test_slot_of_another_shape_is_carried_where_a_rule_only_renames() -> None:
    rules = rules_of('[[rule]]\nmatch = "a.{x}"\nrename = "b.{x}"')
    specs = specs_of({"model/a.w": (4, 3), "optim/a.w/row": (4,)})
    plan = apply(rules, specs, {})
    assert plan.tensors["optim/b.w/row"].spec.shape == (4,)
    assert not plan.left_out


def test_state_of_a_parameter_without_its_model_has_the_shape_of_its_largest_slot() -> None:
    specs = specs_of({"optim/qkv/exp_avg": (12, 3), "optim/qkv/step": ()})
    plan = apply(rules_of(QKV), specs, {"num_heads": 4})
    assert plan.tensors["optim/q/exp_avg"].spec.shape == (8, 3)


def test_steps_that_become_one_are_to_be_equal() -> None:
    shapes = {f"model/{part}": (rows, 3) for part, rows in (("q", 8), ("k", 2), ("v", 2))}
    steps: dict[str, Shape] = {f"optim/{part}/step": () for part in "qkv"}
    plan = apply(rules_of(QKV).inverted, specs_of(shapes | steps), {"num_heads": 4})
    assert [set(keys) for keys in plan.equal] == [set(steps)]
    back = apply(rules_of(QKV), plan.specs, {"num_heads": 4}).after(plan)
    assert [set(keys) for keys in back.equal] == [set(steps)]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_are_merged_along_a_dimension_of_the_fused_tensor(dim: int) -> None:
    """`dim` is the fused tensor's also where the parts are turned on their way there."""
    rules = rules_of(
        '[[rule]]\nmatch = ["a", "b"]\nrename = "fused"\ntranspose = [1, 2, 0]\n'
        f"parts = {{ a = 2, b = 3 }}\ndim = {dim}"
    )
    parts = []
    for size in (2, 3):
        turned = [4, 5, 6]
        turned[dim] = size
        parts.append(np.arange(math.prod(turned)).reshape(turned))
    arrays = {
        f"model/{name}": part.transpose(2, 0, 1) for name, part in zip("ab", parts, strict=True)
    }
    specs = {key: TensorSpec("int64", array.shape) for key, array in arrays.items()}
    plan = apply(rules, specs, {})
    fused = made(plan, arrays)["model/fused"]
    assert np.array_equal(fused, np.concatenate(parts, axis=dim))


PADDED = """
[[rule]]
match = "head"
rename = "lm_head"
pad = { size = "vocab", to = "round_up(vocab, 8)" }
"""


def test_padding_is_cut_off_and_listed_or_filled_with_zeros() -> None:
    config = {"vocab": 13}
    specs = specs_of({"model/head": (16, 2)})
    plan = apply(rules_of(PADDED), specs, config)
    assert plan.tensors["model/lm_head"].spec.shape == (13, 2)
    assert [(left.source, left.box) for left in plan.left_out] == [
        ("model/head", Box((13, 0), (3, 2)))
    ]
    padded = apply(rules_of(PADDED).inverted, plan.specs, config)
    head = made(padded.after(plan), arrays_of(specs))["model/head"]
    assert np.array_equal(head[:13], arrays_of(specs)["model/head"][:13])
    assert not head[13:].any()
    # What the first step cut off is what both together leave out.
    assert padded.after(plan).left_out == plan.left_out
    with pytest.raises(RulesInvalid, match=r"my\.toml:2: head: .*'round_up\(vocab, 8\)' is 24"):
        apply(rules_of(PADDED), specs, {"vocab": 17})


def test_dropped_tensors_are_listed_with_their_state_and_the_reason() -> None:
    rules = rules_of('[[rule]]\nmatch = "mask"\ndrop = "made anew"\n[[rule]]\nmatch = "{r...}"')
    specs = specs_of({"model/mask": (2, 2), "optim/mask/step": (), "model/w": (2,)})
    plan = apply(rules, specs, {})
    assert list(plan.tensors) == ["model/w"]
    assert {(left.source, left.why) for left in plan.left_out} == {
        ("model/mask", "made anew"), ("optim/mask/step", "made anew"),
    }  # fmt: skip


MATCHING = """
[[rule]]
match = "layers.{n:int}.{kind}"
[[rule]]
match = "layers.{n:int}.bias"
[[rule]]
match = "layers.{n:int}.never"
range = { n = [5] }
"""


def test_names_that_no_rule_or_several_match_are_reported_and_refused() -> None:
    rules = rules_of(MATCHING)
    specs = specs_of({"model/layers.0.w": (1,), "model/layers.0.bias": (1,), "model/norm": (1,)})
    report = match_names(rules, names_of(specs), {})
    assert report.unmatched == ("norm",)
    assert [(name, [rule.place for rule in found]) for name, found in report.doubly] == [
        ("layers.0.bias", ["my.toml:2", "my.toml:4"])
    ]
    assert report.lines() == [
        "no rule matches norm",
        "several rules match layers.0.bias:",
        "  my.toml:2: layers.{n:int}.{kind}",
        "  my.toml:4: layers.{n:int}.bias",
        "my.toml:2: layers.{n:int}.{kind}: 1 tensor",
        "  layers.0.w",
        "my.toml:4: layers.{n:int}.bias: nothing",
        "my.toml:6: layers.{n:int}.never: nothing",
    ]
    with pytest.raises(RulesInvalid, match=r"my\.toml: no rule matches norm"):
        apply(rules, specs, {})
    del specs["model/norm"]
    with pytest.raises(RulesInvalid, match=r"several rules match layers\.0\.bias: my\.toml:2"):
        apply(rules, specs, {})


def test_rest_takes_what_no_other_rule_takes() -> None:
    rules = rules_of('[[rule]]\nmatch = "a"\nrename = "b"\n[[rule]]\nmatch = "{rest...}"')
    report = match_names(rules, ["a", "c.d"], {})
    assert report.is_complete
    assert [[found.name for found in names] for _, names in report.taken] == [["a"], ["c.d"]]


STACKED = """
[[rule]]
match = "layers.w"
rename = "h.{layer:int}.w"
stacked = { axis = 0, placeholder = "layer" }
"""


def refused(rules: RuleSet, shapes: Mapping[str, Shape]) -> str:
    with pytest.raises(RulesInvalid) as raised:
        apply(rules, specs_of(shapes), {"num_heads": 4})
    return str(raised.value)


def test_missing_layer_and_missing_part_are_named() -> None:
    message = refused(rules_of(STACKED).inverted, {"model/h.0.w": (2,), "model/h.2.w": (2,)})
    assert "my.toml:2: h.{layer:int}.w: h.1.w is missing, though there is h.0.w" in message
    message = refused(rules_of(QKV).inverted, {"model/q": (8, 3), "model/v": (2, 3)})
    assert "k is missing, though there is q" in message


def test_layers_of_different_shapes_or_data_types_are_refused() -> None:
    message = refused(rules_of(STACKED).inverted, {"model/h.0.w": (2,), "model/h.1.w": (3,)})
    assert "layers.w would have shape [2, 2] by some tensors and [2, 3] by h.1.w" in message
    specs = {"model/h.0.w": TensorSpec("float32", (2,)), "model/h.1.w": TensorSpec("int8", (2,))}
    with pytest.raises(RulesInvalid, match="have different data types: float32, int8"):
        apply(rules_of(STACKED).inverted, specs, {})


def test_slot_that_only_some_of_the_parts_have_is_refused() -> None:
    shapes = {f"model/{part}": (rows, 3) for part, rows in (("q", 8), ("k", 2), ("v", 2))}
    message = refused(rules_of(QKV).inverted, {**shapes, "optim/k/exp_avg": (2, 3)})
    assert "q has no optimizer slot 'exp_avg', but k has" in message


def test_two_tensors_that_get_one_name_are_refused() -> None:
    with pytest.raises(RulesInvalid) as raised:
        rules_of('[[rule]]\nmatch = "a.{x}"\nrename = "c"')
    assert "my.toml:2: match: {x} is not in `rename`" in str(raised.value)
    rules = rules_of('[[rule]]\nmatch = "a"\nrename = "c"\n[[rule]]\nmatch = "b"\nrename = "c"')
    message = refused(rules, {"model/a": (1,), "model/b": (1,)})
    assert "model/c is made from model/b, and already from model/a by my.toml:1: a" in message
    rules = rules_of('[[rule]]\nmatch = "a"\nalso = "b"')
    assert "a and b are two names of one tensor" in refused(
        rules, {"model/a": (1,), "model/b": (1,)}
    )


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ('match = "t"\ntranspose = [1, 0]', (2, 2, 2), "transpose = [1, 0] does not fit"),
        ('match = "t"\nreorder = { shape = [2, 3], order = [1, 0] }', (7,), "is [2, 3], which"),
        ('match = "t"\nreorder = { dim = 1, shape = [2, 3], order = [1, 0] }', (6,), "dimension 1"),
        ('match = "t"\nrename = ["a", "b"]\nparts = { a = 2, b = 4 }', (7,), "is to have 6 el"),
        ('match = "t"\nrename = ["a", "b"]\nparts = { a = 2, b = 4 }\ndim = 1', (6,), "dimension"),
        ('match = "t"\nrename = ["a", "b"]\nparts = { a = 2, b = 3 }\ninterleave = 2', (5,),
         "a part of 3 elements is not a multiple of the 2 groups"),
        ('match = "t"\nrename = "{n:int}"\nstacked = { axis = 1, placeholder = "n" }', (5,),
         "has no axis 1 of n"),
        ('match = "t"\npad = { dim = 2, size = 5, to = 5 }', (5,), "dimension 2"),
    ],
)  # fmt: skip
def test_tensor_that_does_not_fit_its_rule_is_refused(
    text: str, shape: Shape, message: str
) -> None:
    error = refused(rules_of(f"[[rule]]\n{text}"), {"model/t": shape})
    assert error.startswith("my.toml:1: t: t: ")
    assert message in error


def test_range_whose_bound_is_unknown_is_refused_with_its_line() -> None:
    rules = rules_of('[[rule]]\nmatch = "h.{n:int}"\nrange = { n = [0, "dense"] }')
    assert "my.toml:1: h.{n:int}: range: 'dense': 'dense' is not known" in refused(
        rules, {"model/h.0": (1,)}
    )
