"""Claims about how the members on several nodes form one etcd, and replace those that are lost."""

import random
from collections.abc import Mapping

import pytest

from keepstep.elastic.errors import UsageError
from keepstep.elastic.store.members import (
    Add,
    Discard,
    Found,
    Join,
    Listed,
    Own,
    Remove,
    Seen,
    Start,
    Step,
    Wait,
    next_change,
    next_step,
    parse_members,
    token_of,
)

NAMES = ("h1:29400", "h2:29400", "h3:29400")
MEMBERS = parse_members(NAMES)
EMPTY = Own(None, runs=False)
SERVES, FOUNDING = Seen("t1", True, True), Seen("t1", False, False)
AWAY = Seen("t1", True, False)


@pytest.mark.parametrize("count", [2, 4, 6])
def test_number_of_names_that_is_of_no_use_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match=f"{count} members survive .* one name, or three or five"):
        parse_members([f"h{number}:29400" for number in range(count)])


@pytest.mark.parametrize(
    "names",
    [
        ("h:29400", "h:29400", "g:29400"),
        ("h:29400", "h:29401", "g:29400"),
        ("h:29401", "h:29400", "g:29400"),
        ("h:65535", "g:29400", "f:29400"),
    ],
)
def test_names_whose_ports_collide_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="its port and the next one"):
        parse_members(names)


def test_member_uses_its_port_and_the_next_one() -> None:
    on_one_host = parse_members(("[::1]:29400", "[::1]:29402", "[::1]:29404"))
    assert [member.endpoint for member in on_one_host] == [
        "[::1]:29400",
        "[::1]:29402",
        "[::1]:29404",
    ]
    assert on_one_host[0].peer_url == "https://[::1]:29401"
    assert token_of(["", MEMBERS[0].name("a1")]) == "a1"
    assert token_of([""]) == ""


def step(
    own: Own, seen: Mapping[int, Seen] | None = None, index: int = 0, waited_s: float = 0.0
) -> Step:
    return next_step(index, own, seen or {}, waited_s)


def test_first_name_that_finds_no_other_begins() -> None:
    assert step(EMPTY) == Found(None)
    assert step(EMPTY, index=1, waited_s=1.0) == Wait()
    assert step(EMPTY, index=1, waited_s=4.0) == Found(None)


def test_node_without_data_takes_part_in_what_another_has_begun() -> None:
    assert step(EMPTY, {1: FOUNDING, 2: Seen("t2", False, False)}) == Found("t1")


def test_node_without_data_never_takes_part_as_a_member_that_has_had_some() -> None:
    """The earlier one has voted, and confirmed writes, that this one does not know."""
    assert step(EMPTY, {1: SERVES, 2: FOUNDING}) == Join(1)
    # Nor where it does not work at present: its majority may come back.
    assert step(EMPTY, {1: AWAY}) == Found(None)


def test_member_with_data_starts_with_it() -> None:
    assert step(Own("t1", runs=False)) == Start()
    assert step(Own("t1", runs=False), {1: SERVES}) == Start()
    assert step(Own("t1", runs=True), {0: AWAY}) == Wait()


def test_member_leaves_an_etcd_that_does_not_work_for_one_that_does() -> None:
    other = Seen("t2", True, True)
    assert isinstance(step(Own("t1", runs=True), {0: AWAY, 1: other}), Discard)
    assert isinstance(step(Own("t1", runs=False), {1: other}), Discard)
    assert step(Own("t1", runs=True), {0: AWAY, 1: Seen("t2", False, False)}) == Wait()
    assert step(Own("t1", runs=True), {0: SERVES, 1: other}) == Wait()


def test_of_two_that_have_begun_the_later_name_gives_way() -> None:
    begun = {0: Seen("t0", False, False), 1: Seen("t1", False, False)}
    assert step(Own("t0", runs=True), begun, index=0) == Wait()
    assert isinstance(step(Own("t1", runs=True), begun, index=1), Discard)
    # Not once its etcd has worked: others have confirmed writes with it.
    assert step(Own("t1", runs=True), {**begun, 1: AWAY}, index=1) == Wait()


def test_data_with_which_a_member_cannot_start_is_given_up() -> None:
    assert step(Own("t1", runs=False, ends=1), {1: SERVES}) == Start()
    assert isinstance(step(Own("t1", runs=False, ends=2), {1: SERVES}), Discard)
    # Where no etcd works, the data may be needed for a majority.
    assert step(Own("t1", runs=False, ends=4)) == Start()
    assert isinstance(step(Own("t1", runs=False, ends=5)), Discard)


def test_member_is_removed_and_added_as_another_one() -> None:
    listed = [Listed(number, member.peer_url) for number, member in enumerate(MEMBERS, 1)]
    own = MEMBERS[0]
    assert next_change(listed, own, MEMBERS, [1]) == Remove(1)
    assert next_change(listed[1:], own, MEMBERS, [1]) == Add(own.peer_url)
    assert next_change([*listed[1:], Listed(9, own.peer_url)], own, MEMBERS, [1]) is None


@pytest.mark.parametrize("seed", range(20))
def test_nodes_that_replace_their_members_at_the_same_time_and_may_end_miss_one_at_most(
    seed: int,
) -> None:
    """Else a majority of the names could found an etcd next to one that works."""
    rng = random.Random(seed)
    members = parse_members([f"h{number}:29400" for number in range(5)])
    listed = {member.peer_url: number for number, member in enumerate(members)}
    earlier = {number: {listed[members[number].peer_url]} for number in (0, 1, 2)}
    done: set[int] = set()
    last = 5
    for _ in range(200):
        number = rng.choice((0, 1, 2))
        current = [Listed(it, url) for url, it in listed.items()]
        if rng.random() < 0.1:  # Its agent has ended, and another one begins without data.
            own_url = members[number].peer_url
            earlier[number] = {it.id for it in current if it.peer_url == own_url}
            done.discard(number)
        match next_change(current, members[number], members, earlier[number]):
            case Remove(removed):
                listed = {url: it for url, it in listed.items() if it != removed}
            case Add(url):
                listed[url] = last = last + 1
            case None:
                done.add(number)
        assert len(listed) >= 4
    assert done
