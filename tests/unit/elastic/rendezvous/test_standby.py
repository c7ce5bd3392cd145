"""Claims about who takes a lost node's place; the rules one by one are in `cases/standby_*.txt`."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.elastic.rendezvous.records import DomainLoss, Generation, Member, NodeRecord
from keepstep.elastic.rendezvous.standby import by_preference, losses_until
from tests.unit.elastic.node_records import record_of

DOMAINS = st.lists(st.sampled_from(["", "r1", "r2", "r3"]), max_size=6)


def records(domains: list[str], prefix: str) -> list[NodeRecord]:
    return [record_of(f"{prefix}{n}", domain=domain) for n, domain in enumerate(domains)]


@given(DOMAINS, DOMAINS, st.integers(0, 6))
def test_places_go_where_a_failing_domain_takes_the_fewest(
    staying: list[str], standby: list[str], places: int
) -> None:
    ordered = by_preference(records(standby, "s"), records(staying, "m"), (), places)
    assert sorted(record.node for record in ordered) == [f"s{n}" for n in range(len(standby))]
    members = Counter(domain for domain in staying if domain)
    for number, record in enumerate(ordered[:places]):
        others = [other.domain for other in ordered[number:]]
        assert members[record.domain] == min(members[domain] for domain in others)
        members[record.domain] += bool(record.domain)


def test_equals_are_taken_in_the_order_in_which_they_joined() -> None:
    for domain in ("", "r1"):
        standby = records([domain] * 4, "s")
        assert by_preference(standby, records([domain], "m"), (), 2) == standby


@pytest.mark.parametrize(("count", "first"), [(1, "s0"), (2, "s1")])
def test_nodes_of_a_domain_with_two_recent_losses_come_last(count: int, first: str) -> None:
    losses = [DomainLoss("r1", 5.0)] * count
    ordered = by_preference(records(["r1", "r2"], "s"), records(["r2"], "m"), losses, 1)
    assert ordered[0].node == first


def test_losses_are_remembered_for_an_hour_where_the_domain_is_known() -> None:
    members = tuple(
        Member(name, "h", 2, 2 * n, "a", f"tcp:{name}", domain=domain)
        for n, (name, domain) in enumerate([("a", "r1"), ("b", "r2"), ("c", "")])
    )
    old = Generation(
        3, members, "h", 1, "start", losses=(DomainLoss("r8", 400.0), DomainLoss("r9", 600.0))
    )
    assert losses_until(old, {"a"}, 4100.0) == (DomainLoss("r9", 600.0), DomainLoss("r2", 4100.0))
    many = Generation(3, members, "h", 1, "start", losses=(DomainLoss("r9", 600.0),) * 99)
    assert len(losses_until(many, {"a"}, 700.0)) == 64
