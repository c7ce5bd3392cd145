"""Claims about which snapshot a generation can resume from, and who rebuilds what is lost of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.format.layout.integers import ceil_div
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.rendezvous.rank_assignment import (
    assign_groups,
    assign_ranks,
    completed_by_storage,
    group_nodes,
    newest_restorable,
    rank_limits,
    with_shard_rebuilds,
)
from keepstep.elastic.rendezvous.rank_limits import ANY_NUMBER, RankLimits
from keepstep.elastic.rendezvous.records import (
    CheckpointRecord,
    Generation,
    Member,
    NodeRecord,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.view import JoinedNode, View
from tests.unit.elastic.node_records import record_of

SNAPSHOT = SnapshotId(1, 6)


def record(
    name: str, *, sealed: bool = True, protected: bool = True, domain: str = ""
) -> NodeRecord:
    held = (SNAPSHOT,)
    return record_of(
        name,
        domain=domain,
        sealed=held if sealed else (),
        protected=held if protected else (),
    )


def members_of(groups: str) -> tuple[Member, ...]:
    """Nodes a, b, ... whose group is the number in their place."""
    return tuple(
        Member(chr(97 + n), "h", 2, 2 * n, "a", f"tcp:{chr(97 + n)}:2", int(group))
        for n, group in enumerate(groups)
    )


def resumed(groups: str, parity: int, *present: NodeRecord) -> SnapshotCommit | None:
    generation = Generation(1, members_of(groups), "h", 1, "start", parity=parity)
    nodes = {node.node: JoinedNode(node, n) for n, node in enumerate(present)}
    return newest_restorable(View(nodes=nodes, generation=generation), generation)


def test_a_loss_in_each_group_is_made_good() -> None:
    assert resumed("0101", 1, record("c"), record("d")) is not None
    assert resumed("0101", 1, record("b"), record("d")) is None


def test_what_is_older_than_a_commit_that_a_node_knows_of_is_freed_there() -> None:
    """Also if the newer snapshot's memory was found damaged before (simulator, seed 565)."""
    for step, is_there in ((6, True), (7, False)):
        knows = replace(record("a"), committed=SnapshotId(1, step))
        assert (resumed("0", 0, knows) is not None) is is_there


def test_unprotected_shards_will_do_while_none_is_missing() -> None:
    bare = [record(name, protected=False) for name in "abc"]
    assert resumed("000", 1, *bare) is not None
    assert resumed("000", 1, *bare[:2]) is None
    assert resumed("000", 1, record("a"), bare[1]) is None


def test_a_member_that_came_back_without_its_memory_counts_as_lost() -> None:
    assert (
        resumed("000", 1, record("a"), record("b"), record("c", sealed=False, protected=False))
        is not None
    )
    assert resumed("000", 1, record("a"), record("c", sealed=False, protected=False)) is None


def test_without_parity_every_shard_must_be_there() -> None:
    assert resumed("000", 0, record("a"), record("b")) is None


def test_what_more_losses_took_comes_from_storage_if_that_has_the_same_snapshot() -> None:
    commit = SnapshotCommit(SNAPSHOT, members_of("000"), 1)
    generation = Generation(1, members_of("000"), "h", 1, "start", parity=1)
    left = View(nodes={"b": JoinedNode(record("b"), 1)}, generation=generation, snapshot=commit)
    assert newest_restorable(left, generation) is None
    assert completed_by_storage(left) is None
    for step, is_same in ((6, True), (5, False)):
        found = completed_by_storage(replace(left, checkpoint=CheckpointRecord(step, 1, "/c", 0.0)))
        assert (found is not None) == is_same
    found = completed_by_storage(replace(left, checkpoint=CheckpointRecord(6, 1, "/c", 0.0)))
    assert found is not None
    assert ([holder.node for holder in found.holders], found.stored) == (["b"], "/c")


def test_a_snapshot_in_parts_is_never_rebuilt_from_parity() -> None:
    commit = SnapshotCommit(SNAPSHOT, members_of("000")[:2], 1, stored="/c")
    generation = Generation(2, members_of("00"), "h", 1, "lost c", parity=1)
    both = View(
        nodes={n: JoinedNode(record(n), 1) for n in "ab"}, generation=generation, snapshot=commit
    )
    assert newest_restorable(both, generation) == commit
    one = replace(
        both, nodes={"a": JoinedNode(record("a"), 1)}, checkpoint=CheckpointRecord(6, 1, "/c", 0.0)
    )
    assert newest_restorable(one, generation) is None
    found = completed_by_storage(one)
    assert found is not None
    assert [holder.node for holder in found.holders] == ["a"]


def test_who_is_a_lost_rank_now_rebuilds_its_shard_and_the_rest_is_dealt_in_turn() -> None:
    commit = SnapshotCommit(SNAPSHOT, members_of("000"), 1)
    view = View(nodes={node: JoinedNode(record(node), n) for n, node in enumerate("abx")})
    newcomer = Member("x", "h", 2, 4, "a", "tcp:x:1")
    same_size = with_shard_rebuilds(commit, view, (*members_of("00"), newcomer))
    assert [(adoption.rank, adoption.node) for adoption in same_size.shard_rebuilds] == [
        (4, "x"),
        (5, "x"),
    ]
    smaller = with_shard_rebuilds(commit, view, members_of("00"))
    assert [(adoption.rank, adoption.node) for adoption in smaller.shard_rebuilds] == [
        (4, "a"),
        (5, "b"),
    ]
    assert smaller.shard_rebuilds[0].server == "tcp:a:2"


def test_groups_carry_no_more_parity_than_they_can() -> None:
    view = View(nodes={name: JoinedNode(record(name), n) for n, name in enumerate("abc")})
    assert assign_groups(members_of("0"), view, 8, 2)[1] == 0
    assert assign_groups(members_of("00"), view, 8, 2)[1] == 1
    assert assign_groups(members_of("000"), view, 8, 2)[1] == 2


def test_nodes_of_one_domain_are_in_different_groups() -> None:
    view = View(
        nodes={
            name: JoinedNode(record(name, domain=f"rack{n // 2}"), n)
            for n, name in enumerate("abcd")
        }
    )
    members, parity = assign_groups(members_of("0000"), view, 2, 1)
    assert parity == 1
    assert members[0].group != members[1].group
    assert members[2].group != members[3].group


@pytest.mark.parametrize(
    ("sizes", "limits", "max_nodes", "expected"),
    [
        ("8888", RankLimits(), 4, "8888"),
        ("8888", RankLimits(), 3, "888"),
        ("8888888", RankLimits(32), 9, "8888"),
        ("888", RankLimits(32), 9, ""),
        ("8888", RankLimits(16, 16), 9, "88"),
        ("8888", RankLimits(3), 9, "888"),
        # With nodes of several sizes: those that have the most ranks together.
        ("848", RankLimits(4), 9, "848"),
        ("488", RankLimits(8), 9, "88"),
        ("844", RankLimits(8), 9, "844"),
        ("84", RankLimits(8), 9, "8"),
        ("1322", RankLimits.of([5]), 9, "122"),
        ("3322", RankLimits.of([5, 7]), 9, "322"),
        ("4888", RankLimits.of([16]), 2, "88"),
        ("884", RankLimits.of([12]), 2, "84"),
        ("662", RankLimits(8), 2, "62"),
        ("4488", RankLimits.of([20]), 3, "488"),
        ("1224", RankLimits(), 2, "24"),
    ],
)
def test_as_many_nodes_are_members_as_the_mesh_has_places_for(
    sizes: str, limits: RankLimits, max_nodes: int, expected: str
) -> None:
    nodes = [replace(record(f"n{n}"), nproc=int(size)) for n, size in enumerate(sizes)]
    members = assign_ranks((), nodes, max_nodes, limits)
    assert "".join(str(member.nproc) for member in members) == expected
    assert [member.first_rank for member in members] == [
        sum(before.nproc for before in members[:n]) for n in range(len(members))
    ]


def test_mesh_limits_the_ranks_from_when_one_nodes_workers_know_it() -> None:
    assert rank_limits(View()) == ANY_NUMBER
    nodes = {"a": JoinedNode(record("a"), 1)}
    assert rank_limits(View(nodes=nodes)) == ANY_NUMBER
    nodes["b"] = JoinedNode(replace(record("b"), rank_multiple=4, max_ranks=8), 2)
    assert rank_limits(View(nodes=nodes)) == RankLimits(4, 8)


def worst_loss(domains: Sequence[str], groups: Sequence[int]) -> int:
    """Return the largest number of nodes that one group loses when one domain fails."""
    nodes_per_group_and_domain = Counter(
        (group, domain or n) for n, (domain, group) in enumerate(zip(domains, groups, strict=True))
    )
    return max(nodes_per_group_and_domain.values(), default=0)


@given(
    st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(0, 3),
)
def test_groups_are_even_and_large_enough_and_separate_domains(
    domains: list[str], size: int, parity: int
) -> None:
    groups = group_nodes(domains, size, parity)
    sizes = Counter(groups)
    assert max(sizes.values()) - min(sizes.values()) <= 1
    assert min(sizes.values()) > min(parity, len(domains) - 1)
    assert max(sizes.values()) <= max(size, 2 * parity + 1) or len(sizes) == 1
    largest = max([n for domain, n in Counter(domains).items() if domain], default=1)
    assert worst_loss(domains, groups) == max(1, ceil_div(largest, len(sizes)))


def test_nodes_of_one_rack_are_in_different_groups() -> None:
    groups = group_nodes(["rack1"] * 4 + ["rack2"] * 4, 2, 1)
    assert worst_loss(["rack1"] * 4 + ["rack2"] * 4, groups) == 1
