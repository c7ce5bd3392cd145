"""Tests of the erasure code and the placement of its blocks."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.snapshot.parity.erasure import Combination, parity_rows, rebuilding_row
from keepstep.checkpoint.snapshot.parity.stripes import Stripes, plan_rebuilding

Bytes = npt.NDArray[np.uint8]


def combined(row: tuple[int, ...], blocks: list[Bytes]) -> Bytes:
    target = np.full(blocks[0].size, 0xEE, np.uint8)
    Combination(row).into(target, blocks)
    return target


def reference_product(a: int, b: int) -> int:
    """Multiply in GF(2^8) modulo x^8 + x^4 + x^3 + x^2 + 1, bit by bit."""
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(14, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << (bit - 8)
    return product


def test_combination_is_the_sum_of_products_in_the_field() -> None:
    blocks = [np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8)[::-1].copy()]
    expected = [
        reference_product(0x53, int(a)) ^ reference_product(0xCA, int(b))
        for a, b in zip(*blocks, strict=True)
    ]
    assert combined((0x53, 0xCA), blocks).tolist() == expected


def test_one_parity_block_is_xor() -> None:
    assert parity_rows(5, 1) == ((1,) * 5,)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 200), st.data())
def test_any_lost_blocks_up_to_the_parity_are_rebuilt(
    data: int, parity: int, nbytes: int, draw: st.DataObject
) -> None:
    generator = np.random.default_rng(data * 100 + parity)
    blocks = [generator.integers(0, 256, nbytes, np.uint8) for _ in range(data)]
    blocks += [combined(row, blocks[:data]) for row in parity_rows(data, parity)]
    lost = draw.draw(st.sets(st.integers(0, data + parity - 1), max_size=parity))
    present = tuple(n for n in range(data + parity) if n not in lost)[:data]
    for number in lost:
        if number < data:
            row = rebuilding_row(data, parity, present, number)
            assert np.array_equal(combined(row, [blocks[n] for n in present]), blocks[number])


def test_a_group_larger_than_the_field_is_refused() -> None:
    with pytest.raises(ValueError, match="255"):
        parity_rows(250, 6)


GEOMETRIES = [Stripes(size, parity) for size in range(1, 8) for parity in range(size)]


@pytest.mark.parametrize("stripes", GEOMETRIES)
def test_every_node_holds_the_same_share_and_one_block_of_every_stripe(stripes: Stripes) -> None:
    for stripe in range(stripes.size):
        holders = [stripes.holder(stripe, number) for number in range(stripes.size)]
        assert sorted(holders) == list(range(stripes.size))
        assert [stripes.number(stripe, position) for position in holders] == list(
            range(stripes.size)
        )
    for position in range(stripes.size):
        own = [stripes.stripe(position, block) for block in range(stripes.data)]
        kept = [stripe for stripe, _ in stripes.parity_stripes(position)]
        assert sorted(own + kept) == list(range(stripes.size))
        assert all(
            stripes.number(stripes.stripe(position, b), position) == b for b in range(stripes.data)
        )
        assert all(
            stripes.holder(s, stripes.data + row) == position
            for s, row in stripes.parity_stripes(position)
        )


class Group:
    """The memories of a group's nodes, with unequal amounts of data, and their parity blocks."""

    def __init__(self, stripes: Stripes, sizes: list[int]) -> None:
        self.stripes = stripes
        generator = np.random.default_rng(sum(sizes))
        self.own = [generator.integers(0, 256, nbytes, np.uint8) for nbytes in sizes]
        self.kept: dict[tuple[int, int], Bytes] = {}
        for position in range(stripes.size):
            for stripe, row in stripes.parity_stripes(position):
                length = max(self.block(stripe, n).size for n in range(stripes.data))
                blocks = [
                    self.padded(self.block(stripe, n), 0, length) for n in range(stripes.data)
                ]
                coefficients = parity_rows(stripes.data, stripes.parity)[row]
                self.kept[position, stripe] = (
                    combined(coefficients, blocks) if length else np.empty(0, np.uint8)
                )

    def block(self, stripe: int, number: int) -> Bytes:
        position = self.stripes.holder(stripe, number)
        if number >= self.stripes.data:
            return self.kept[position, stripe]
        start, stop = self.stripes.block_range(self.own[position].size, number)
        return self.own[position][start:stop]

    @staticmethod
    def padded(block: Bytes, start: int, count: int) -> Bytes:
        piece = block[start : start + count]
        return np.concatenate([piece, np.zeros(count - piece.size, np.uint8)])

    def rebuilt(self, lost: Collection[int], position: int, start: int, stop: int) -> Bytes:
        result = np.empty(stop - start, np.uint8)
        for part in plan_rebuilding(
            self.stripes, lost, position, self.own[position].size, start, stop
        ):
            assert not set(part.sources) & set(lost)
            sources = [
                self.padded(
                    self.block(part.stripe, self.stripes.number(part.stripe, p)),
                    part.block_offset,
                    part.count,
                )
                for p in part.sources
            ]
            result[part.offset - start : part.offset - start + part.count] = combined(
                part.coefficients, sources
            )
        return result


@given(st.sampled_from([s for s in GEOMETRIES if s.parity]), st.data())
def test_any_range_of_any_lost_node_is_rebuilt(stripes: Stripes, draw: st.DataObject) -> None:
    sizes = draw.draw(st.lists(st.integers(0, 900), min_size=stripes.size, max_size=stripes.size))
    group = Group(stripes, sizes)
    for lost in itertools.combinations(range(stripes.size), stripes.parity):
        for position in lost:
            start = draw.draw(st.integers(0, sizes[position]))
            stop = draw.draw(st.integers(start, sizes[position]))
            assert np.array_equal(
                group.rebuilt(lost, position, start, stop), group.own[position][start:stop]
            )


def test_more_losses_than_parity_are_refused() -> None:
    with pytest.raises(ValueError, match="2 nodes of a group are lost, 1 can be rebuilt"):
        plan_rebuilding(Stripes(4, 1), {0, 2}, 0, 1000, 0, 10)
