"""Tests of part tables: the stored tensor is the same whatever number of ranks sliced the parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.part_table import Part, PartTable
from tests.examples import examples

GATE_UP = PartTable(0, (Part("gate", 8), Part("up", 8)))


def fused(table: PartTable, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the unsharded dimension: the parts one after the other, group by group."""
    by_group = [np.split(part, table.groups) for part in parts]
    return np.concatenate([group for groups in zip(*by_group, strict=True) for group in groups])


def shards(table: PartTable, parts: Sequence[np.ndarray], degree: int) -> list[np.ndarray]:
    """Slice every part as tensor parallelism does: what each rank holds."""
    by_group = [np.split(part, table.groups) for part in parts]
    if degree <= table.groups:
        ranks = np.split(np.arange(table.groups), degree)
        return [np.concatenate([groups[g] for g in held for groups in by_group]) for held in ranks]
    sharers = degree // table.groups
    local = []
    for group in range(table.groups):
        for member in range(sharers):
            slices = []
            for part, groups in zip(table.parts, by_group, strict=True):
                count = sharers
                if part.most_slices is not None:
                    count = min(count, part.most_slices // table.groups)
                slices.append(np.split(groups[group], count)[member * count // sharers])
            local.append(np.concatenate(slices))
    return local


@st.composite
def tables(draw: st.DrawFn) -> tuple[PartTable, list[int]]:
    """Draw a table, and numbers of ranks that can slice it."""
    groups = draw(st.sampled_from([1, 2, 4]))
    degrees = [degree for degree in (1, 2, 4, 8) if not degree % groups or not groups % degree]
    parts = []
    for number in range(draw(st.integers(1, 4))):
        # Enough elements for 8 ranks, or as many slices as there are in all.
        most = draw(st.sampled_from([None, groups, 2 * groups]))
        cuts = max(8, groups) if most is None else most
        parts.append(Part(f"part{number}", cuts * draw(st.integers(1, 3)), most))
    return PartTable(draw(st.integers(0, 2)), tuple(parts), groups), degrees


@settings(max_examples=examples(100))
@given(tables(), st.data())
def test_what_n_ranks_save_is_what_m_ranks_load(case, data) -> None:
    table, degrees = case
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    parts = [rng.permutation(part.extent) + 1000 * n for n, part in enumerate(table.parts)]
    stored = np.full(table.extent, -1)
    degree = data.draw(st.sampled_from(degrees))
    for rank, local in enumerate(shards(table, parts, degree)):
        pieces = table.pieces(degree, rank)
        assert sum(piece.extent for piece in pieces) == len(local) == table.local_extent(degree)
        for piece in pieces:
            held = local[piece.local_offset : piece.local_offset + piece.extent]
            stored[piece.global_offset : piece.global_offset + piece.extent] = held
    assert np.array_equal(stored, fused(table, parts))
    degree = data.draw(st.sampled_from(degrees))
    for rank, expected in enumerate(shards(table, parts, degree)):
        loaded = [
            stored[piece.global_offset : piece.global_offset + piece.extent]
            for piece in table.pieces(degree, rank)
        ]
        assert np.array_equal(np.concatenate(loaded), expected)
    assert PartTable.from_json(table.to_json()) == table


def test_a_plain_split_of_rows_would_not_store_the_unsharded_tensor() -> None:
    parts = [np.arange(8), np.arange(8) + 100]
    local = shards(GATE_UP, parts, 2)
    assert not np.array_equal(np.concatenate(local), fused(GATE_UP, parts))
    assert [piece.global_offset for piece in GATE_UP.pieces(2, 1)] == [4, 12]


def test_ranks_beyond_the_groups_share_their_keys_and_values() -> None:
    table = PartTable(0, (Part("q", 8), Part("k", 2, 2), Part("v", 2, 2)), groups=2)
    held = [
        [
            row
            for p in table.pieces(4, rank)
            for row in range(p.global_offset, p.global_offset + p.extent)
        ]
        for rank in range(4)
    ]
    assert held == [[0, 1, 4, 5], [2, 3, 4, 5], [6, 7, 10, 11], [8, 9, 10, 11]]


@pytest.mark.parametrize(
    ("table", "degree", "message"),
    [
        (GATE_UP, 3, "part 'gate': its 8 elements cannot be cut into 3 equal slices"),
        (PartTable(0, (Part("q", 12), Part("k", 4, 4))), 6, "part 'k': 6 ranks cannot share its 4"),
        (PartTable(0, (Part("q", 12), Part("k", 4)), 4), 6, "q, k are interleaved in 4 groups"),
    ],
)
def test_parts_that_cannot_be_cut_evenly_are_refused_by_name(
    table: PartTable, degree: int, message: str
) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        table.pieces(degree, 0)


@pytest.mark.parametrize(
    ("parts", "groups", "message"),
    [
        ((Part("q", 8), Part("k", 3)), 2, "'k': its extent 3 is not a multiple of the 2 groups"),
        ((Part("q", 8, 1),), 2, "'q': most_slices=1"),
        ((Part("q", 8), Part("q", 8)), 1, "two parts have one name"),
        ((), 1, "one part or more"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(
    parts: tuple[Part, ...], groups: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PartTable(0, parts, groups)


ONE_PART = {"name": "q", "extent": 8, "most_slices": None}


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {"axis": 0, "groups": 1},
        {"axis": 0, "groups": 1, "parts": [ONE_PART], "more": 1},
        {"axis": -1, "groups": 1, "parts": [ONE_PART]},
        {"axis": True, "groups": 1, "parts": [ONE_PART]},
        {"axis": 0, "groups": 1.0, "parts": [ONE_PART]},
        {"axis": 0, "groups": 3, "parts": [ONE_PART]},
        {"axis": 0, "groups": 1, "parts": {}},
        {"axis": 0, "groups": 1, "parts": [["q", 8, None]]},
        {"axis": 0, "groups": 1, "parts": [{**ONE_PART, "name": ""}]},
        {"axis": 0, "groups": 1, "parts": [{**ONE_PART, "name": 7}]},
        {"axis": 0, "groups": 1, "parts": [{**ONE_PART, "extent": 0}]},
        {"axis": 0, "groups": 1, "parts": [{**ONE_PART, "extent": "8"}]},
        {"axis": 0, "groups": 1, "parts": [{**ONE_PART, "most_slices": 3}]},
        {"axis": 0, "groups": 1, "parts": [{**ONE_PART, "most_slices": True}]},
    ],
)
def test_anything_but_a_table_is_not_parsed(data: Json) -> None:
    with pytest.raises(ValueError, match=r"."):
        PartTable.from_json(data)
