"""Claims about what is said of the mesh: fixed sizes, and rules of the user's own."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.rank_limits import MOST_RANKS, RankLimits
from keepstep.elastic.trainer.mesh_rule import MeshRule, data_share, has_own_samples


@pytest.mark.parametrize(
    ("mesh", "ranks", "sizes"),
    [
        (None, 6, {"dp": 6}),
        ({"dp": -1, "tp": 2}, 6, {"dp": 3, "tp": 2}),
        ({"dp": -1, "tp": 4}, 6, None),
        ({"pp": 2, "tp": 2}, 4, {"pp": 2, "tp": 2}),
        ({"pp": 2, "tp": 2}, 8, None),
        ({"dp": -1, "pp": 3}, 3, {"dp": 1, "pp": 3}),
    ],
)
def test_fixed_sizes_give_the_mesh_or_do_not_fit(
    mesh: Mapping[str, int] | None, ranks: int, sizes: dict[str, int] | None
) -> None:
    rule = MeshRule(mesh)
    assert rule.sizes(ranks) == sizes
    assert rule.limits().allow(ranks) is (sizes is not None)


@pytest.mark.parametrize(
    ("mesh", "limits"),
    [
        ({"dp": -1}, RankLimits()),
        ({"dp_shard": -1, "tp": 2, "pp": 4}, RankLimits(8)),
        ({"dp": 2, "tp": 2}, RankLimits(4, 4)),
    ],
)
def test_fixed_sizes_limit_ranks_by_their_product(
    mesh: Mapping[str, int], limits: RankLimits
) -> None:
    assert MeshRule(mesh).limits() == limits


def two_or_three(ranks: int) -> dict[str, int] | None:
    if ranks % 4 == 0:
        return {"dp_replicate": 2, "dp_shard": ranks // 4, "tp": 2}
    return {"dp_shard": -1} if ranks in (1, 3) else None


def test_a_rule_gives_each_number_of_ranks_its_own_mesh() -> None:
    rule = MeshRule(two_or_three)
    assert rule.sizes(8) == {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    assert rule.sizes(3) == {"dp_shard": 3}
    assert rule.sizes(2) is None
    limits = rule.limits()
    assert [ranks for ranks in range(20) if limits.allow(ranks)] == [1, 3, 4, 8, 12, 16]
    assert limits.allow(MOST_RANKS)


@given(st.sets(st.integers(1, 64), min_size=1))
def test_what_agents_hear_of_a_rule_is_what_it_says(fitting: set[int]) -> None:
    rule = MeshRule(lambda ranks: {"dp": ranks} if ranks in fitting else None)
    limits = rule.limits()
    for ranks in range(1, 70):
        assert limits.allow(ranks) is (rule.sizes(ranks) is not None) is (ranks in fitting)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"dp": -1, "tp": -1}, "at most one may be -1"),
        ({"dp": 0}, "sizes must be positive"),
        ({"dp": -2}, "sizes must be positive"),
        ({"dp": 2.0}, "sizes must be positive"),
        ({}, "give sizes by name"),
        ({"mine": -1}, "whether ranks of dimension 'mine' compute the same samples"),
        (lambda ranks: {"dp": ranks // 8, "tp": 8} if ranks > 7 else None, "for 9 ranks"),
        (lambda ranks: {"dp": 8 // (ranks - 4)} if ranks == 4 else None, "ZeroDivisionError"),
        (lambda ranks: None, "returned None for each number of ranks"),
        (lambda ranks: ranks, "give sizes by name"),
    ],
)
def test_what_is_no_mesh_is_refused_when_joining(
    mesh: Mapping[str, int] | Callable[[int], Any], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        MeshRule(mesh).limits()


def test_ranks_of_data_and_expert_dimensions_have_samples_of_their_own() -> None:
    data = {name for name in ("dp", "dp_replicate", "dp_shard", "ep") if has_own_samples(name)}
    assert data == {"dp", "dp_replicate", "dp_shard", "ep"}
    assert not any(has_own_samples(name) for name in ("cp", "tp", "pp", "sp", "etp"))


NAMES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")


@given(st.permutations(NAMES), st.lists(st.integers(1, 3), min_size=6, max_size=6))
def test_shares_of_a_batch_are_dealt_to_ranks_by_their_place_in_the_data_dimensions(
    names: list[str], counts: list[int]
) -> None:
    sizes = dict(zip(names, counts, strict=True))
    ranks = np.arange(np.prod(counts)).reshape(counts)
    shares = np.array([data_share(sizes, int(rank)) for rank in ranks.flat])
    data_size = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["ep"]
    assert set(shares[:, 1]) == {data_size}
    data_ranks = shares[:, 0].reshape(counts)
    others = tuple(names.index(name) for name in ("cp", "tp", "pp"))
    # All ranks of one computation have one share, and each share is one such computation's.
    assert (data_ranks.min(others) == data_ranks.max(others)).all()
    assert sorted(data_ranks.min(others).flat) == list(range(data_size))
