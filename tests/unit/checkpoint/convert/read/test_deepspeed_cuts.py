"""Tests of the cuts in `universal_checkpoint_info`, and of their blocks."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.convert.read.deepspeed_cuts import UniversalInfo, universal_info
from keepstep.checkpoint.convert.rules.rank_merges import ShardMerge, ShardSpec, merge_of
from keepstep.checkpoint.convert.rules.rule import Sharding
from keepstep.checkpoint.errors import CheckpointDamaged, FormatUnsupported

Array = np.ndarray


def info(ranks: int = 2, **content: Any) -> UniversalInfo:
    return UniversalInfo("mp_rank_00", content, ranks)


def together(merge: ShardMerge, slices: list[Array]) -> Array:
    """Return what slices make, where each element is said to be of exactly one block."""
    whole = np.full(merge.shape, -1, slices[0].dtype)
    for part in merge.parts:
        assert part.source.shape == part.target.shape
        target = whole[part.target.slices]
        source = slices[part.rank][part.source.slices]
        assert ((target == -1) | (target == source)).all()
        whole[part.target.slices] = source
    assert not (whole == -1).any()
    return whole


def numbers(*shape: int) -> Array:
    return np.arange(math.prod(shape)).reshape(shape)


def check(said: UniversalInfo, whole: Array, slices: list[Array], name: str = "3.w") -> None:
    merge = said.merge(name, [part.shape for part in slices], is_buffer=False)
    assert np.array_equal(together(merge, slices), whole)


def test_parameter_without_a_pattern_is_cut_along_dimension_0() -> None:
    whole = numbers(6, 4)
    check(info(tp_replicated_parameter_patterns=["norm"]), whole, np.split(whole, 2))
    uneven = [whole[:4], whole[4:]]
    check(info(), whole, uneven)


def test_patterns_match_at_the_beginning_as_deepspeeds_do() -> None:
    said = info(
        parameter_with_row_parallelism_patterns=[r"\d+.dense"],
        tp_replicated_parameter_patterns=[r"\d+\.norm"],
    )
    whole = numbers(4, 6)
    check(said, whole, np.split(whole, 2, 1), "12.dense.weight")
    check(said, whole, np.split(whole, 2, 0), "h.dense.weight")
    check(said, whole, [whole, whole], "1.norm")


def test_patterns_with_groups_and_escaped_characters_are_read() -> None:
    said = info(
        parameter_with_row_parallelism_patterns=[
            r"\d+\.(dense|out|proj)\.(weight|scale)s?", r"3\)\*\+\(x\\?"
        ]
    )  # fmt: skip
    whole = numbers(4, 6)
    for name in ("12.proj.weight", "0.dense.scales", "3)*+(x", "3)*+(x\\"):
        check(said, whole, np.split(whole, 2, 1), name)


def test_copies_that_are_averaged_are_said_to_be() -> None:
    merge = info(parameter_to_average_patterns=["norm"]).merge(
        "norm", [(3,), (3,)], is_buffer=False
    )
    assert merge.is_mean
    assert [part.rank for part in merge.parts] == [0, 1]


def test_buffers_are_copies_unless_a_pattern_says_more() -> None:
    said = info(parameter_with_row_parallelism_patterns=["cut"])
    assert said.merge("mask", [(3,), (3,)], is_buffer=True).shape == (3,)
    assert said.merge("mask", [(3,), (3,)], is_buffer=False).shape == (6,)
    assert said.merge("cut", [(2, 3), (2, 3)], is_buffer=True).shape == (2, 6)


def test_two_halves_are_put_together_by_themselves() -> None:
    gate, up = numbers(6, 2), numbers(6, 2) + 100
    slices = [np.concatenate([gate[r * 3 : r * 3 + 3], up[r * 3 : r * 3 + 3]]) for r in (0, 1)]
    said = info(parameter_with_2_sub_params_cat_dim_0=["3.w"])
    check(said, np.concatenate([gate, up]), slices)
    with pytest.raises(CheckpointDamaged, match=r"3\.w: .*two halves .* have \(5, 2\)"):
        said.merge("3.w", [(5, 2), (5, 2)], is_buffer=False)


def fused(sizes: list[int], ranks: int, dim: int, whole: Array) -> list[Array]:
    """Return what ranks have of parts side by side."""
    starts = list(itertools.accumulate(sizes, initial=0))
    parts = [whole.take(range(a, b), dim) for a, b in itertools.pairwise(starts)]
    return [
        np.concatenate([np.split(part, ranks, dim)[rank] for part in parts], dim)
        for rank in range(ranks)
    ]


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from(["named", "rest", "flat"]),
)
def test_parts_of_any_dimension_are_put_together(
    sizes: list[int], ranks: int, dim: int, spelled: str
) -> None:
    sizes = [size * ranks for size in sizes]
    shape = [2, 3, 2]
    shape[dim] = sum(sizes)
    whole = numbers(*shape)
    slices = fused(sizes, ranks, dim, whole)
    view: list[Any] = list(shape)
    view[dim] = tuple(sizes)
    if spelled == "rest":
        view[(dim + 1) % 3] = -1
    if spelled == "flat":
        # Experts' matrices below each other are one matrix, as a view of three dimensions.
        whole = whole.reshape(-1, shape[2]) if dim < 2 else whole
        slices = [part.reshape(-1, shape[2]) if dim < 2 else part for part in slices]
    entry = {"patterns": ["3.w"], "shape": tuple(view), "partition_dim": dim}
    check(info(ranks, parameter_with_sub_params=[entry]), whole, slices)


def test_older_files_have_the_number_of_equal_parts() -> None:
    whole = numbers(12, 2)
    entry = {"patterns": ["3.w"], "shape": (3, -1), "partition_dim": 0}
    check(info(parameter_with_sub_params=[entry]), whole, fused([4, 4, 4], 2, 0, whole))
    bias = numbers(12)
    check(info(parameter_with_sub_params=[entry]), bias, fused([4, 4, 4], 2, 0, bias))


def test_recorded_widths_say_how_parts_are_cut_unevenly() -> None:
    whole = numbers(9, 2)
    q, kv = whole[:6], whole[6:]
    slices = [np.concatenate([q[:4], kv[:2]]), np.concatenate([q[4:], kv[2:]])]
    entry = {"patterns": ["3.w"], "shape": ((6, 3), 2), "partition_dim": 0}
    content = {"universal_checkpoint_version": 0.4, "parameter_with_sub_params": [entry]}
    check(info(**content, sub_param_shard_widths={"3.w": [[4, 2], [2, 1]]}), whole, slices)
    for widths, message in (
        ({}, "there are no sub_param_shard_widths"),
        ({"3.w": [[4, 1], [2, 1]]}, "are not those of 2 ranks"),
        ({"3.w": [[3, 3], [2, 1]]}, r"3\.w: ranks have \(6, 2\)"),
    ):
        with pytest.raises(CheckpointDamaged, match=message):
            check(info(**content, sub_param_shard_widths=widths), whole, slices)


def test_uneven_parts_without_recorded_widths_are_refused() -> None:
    entry = {"patterns": ["3.w"], "shape": ((3, 2), 2), "partition_dim": 0}
    with pytest.raises(CheckpointDamaged, match="do not divide by 2 ranks"):
        info(parameter_with_sub_params=[entry]).merge("3.w", [(3, 2), (2, 2)], is_buffer=False)


def piece(shape: Any, source: Any, dest: Any, **more: Any) -> dict[str, Any]:
    return {"shape": shape, "source": source, "dest": dest, "locations": [0], **more}


def affine(logical: Any, *ranks: tuple[Any, list[Any]]) -> UniversalInfo:
    entry = {
        "logical_shape": logical,
        "ranks": {n: {"shard_shape": shape, "pieces": p} for n, (shape, p) in enumerate(ranks)},
    }
    return info(affine_map={"version": 1, "params": {r"^3\.w$": entry}})


def test_blocks_that_files_list_count_before_patterns() -> None:
    whole = numbers(6, 4)
    # Queries are cut, keys and values are whole on both ranks.
    slices = [np.concatenate([whole[:2], whole[4:]]), np.concatenate([whole[2:4], whole[4:]])]
    shared = piece([2, 4], [16, [4, 1]], [8, [4, 1]])
    said = affine(
        [6, 4],
        ([4, 4], [piece([2, 4], [0, [4, 1]], [0, [4, 1]]), shared]),
        ([4, 4], [piece([2, 4], [8, [4, 1]], [0, [4, 1]]), shared]),
    )
    check(said, whole, slices)
    columns = affine(
        [2, 6],
        ([2, 2], [piece([2, 2], [0, [6, 1]], [0, [2, 1]])]),
        ([2, 4], [piece([2, 4], [2, [6, 1]], [0, [4, 1]])]),
    )
    whole = numbers(2, 6)
    check(columns, whole, [whole[:, :2], whole[:, 2:]])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            affine([4], ([2], [piece([2], [0, [1]], [0, [1]], scale=0.5)]), ([2], [])),
            "scaled by 0.5",
        ),
        (affine([4], ([2], [piece([2], [0, [2]], [0, [1]])]), ([2], [])), "is no block of"),
        (affine([4], ([2], [piece([2], [3, [1]], [0, [1]])]), ([2], [])), "is no block of"),
        (info(affine_map={"version": 2, "params": {}}), "has version 2"),
        (
            info(autotp_unsupported_parameter_patterns={"3.w": "of its own"}),
            "cannot be undone",
        ),
        (info(tp_replicated_parameter_patterns=["(a+)+"]), "may take very long"),
        (info(tp_replicated_parameter_patterns=["(?P<a>b)"]), "may take very long"),
        (info(tp_replicated_parameter_patterns=[".*.*.*.*.*.*.*.*"]), "may take very long"),
        (info(tp_replicated_parameter_patterns=[r"(a|aa|\\)*b"]), "may take very long"),
        (info(tp_replicated_parameter_patterns=["a?" * 40 + "a" * 40]), "may take very long"),
        (info(tp_replicated_parameter_patterns=["(a|aa)" * 40 + "b"]), "may take very long"),
    ],
)
def test_what_is_not_read_is_refused_by_name(said: UniversalInfo, message: str) -> None:
    name = "3.w" if "very long" not in message else "3." + "w" * 60
    with pytest.raises(FormatUnsupported, match=message):
        said.merge(name, [(2,), (2,)], is_buffer=False)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (affine([4], ([2], [])), "does not say of 3.w what rank 1 has"),
        (affine([4], ([2], []), ([3], [])), r"what rank 1 has, whose file has \(2,\)"),
        (info(tp_replicated_parameter_patterns=["["]), "is no pattern"),
        (info(tp_replicated_parameter_patterns=[7]), "are no text"),
        (info(parameter_with_row_parallelism_patterns=["3"]), "dimension 1 is said to be cut"),
        (
            info(parameter_with_sub_params=[{"patterns": ["3"], "shape": (2,)}]),
            "no dimension of it that is cut",
        ),
        (
            info(
                parameter_with_sub_params=[
                    {"patterns": ["3"], "shape": (2**30, -1), "partition_dim": 0}
                ]
            ),
            "parts are not equal",
        ),
    ],
)
def test_contradictions_name_the_file_and_the_parameter(said: UniversalInfo, message: str) -> None:
    with pytest.raises(CheckpointDamaged, match=f"mp_rank_00.*{message}"):
        said.merge("3.w", [(2,), (2,)], is_buffer=False)


def test_files_say_nothing_without_a_pattern() -> None:
    said = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    assert universal_info("f", said, 2) is None
    assert universal_info("f", {}, 2) is None
    said["universal_checkpoint_info"]["vocabulary_parameter_patterns"] = ["a"]  # type: ignore
    assert universal_info("f", said, 2) is not None


@pytest.mark.parametrize(
    ("shapes", "cut", "message"),
    [
        (
            [(2,), (3,)],
            ShardSpec(sharding=Sharding.REPLICATED),
            "copies of it have different shapes",
        ),
        ([(2, 3), (2, 4)], ShardSpec(sharding=Sharding.SHARD), "differ in another"),
        (
            [(2,), (2,)],
            ShardSpec(sharding=Sharding.SHARD, widths=((1, 1, 1),)),
            "its parts are of other ranks",
        ),
        ([(2,), (2,)], ShardSpec(sharding=Sharding.SHARD, widths=((1, 2),)), re.escape("[1, 2]")),
    ],
)
def test_shapes_that_contradict_the_cut_are_refused(
    shapes: list[tuple[int, ...]], cut: ShardSpec, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        merge_of(cut, shapes)
