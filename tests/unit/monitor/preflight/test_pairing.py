"""Everybody meets everybody, never two at once; and who stands out is named, whoever it is."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.monitor.preflight.judgement import NodeExamination, judge
from keepstep.monitor.preflight.link_probe import LinkResult
from keepstep.monitor.preflight.pairing import LEAST_NODES, outliers, rounds
from keepstep.monitor.preflight.selftests import DiskResult, MatmulResult


@given(st.integers(0, 65))
def test_every_pair_meets_once_in_as_few_rounds_as_can_be(count: int) -> None:
    scheduled = rounds(count)
    met = [pair for pairs in scheduled for pair in pairs]
    assert sorted(met) == list(combinations(range(count), 2))
    assert len(scheduled) == (0 if count < 2 else count - 1 if count % 2 == 0 else count)
    for pairs in scheduled:
        busy = [place for pair in pairs for place in pair]
        assert len(busy) == len(set(busy))


@given(
    st.lists(st.floats(0.97, 1.03), min_size=LEAST_NODES, max_size=40),
    st.integers(0, 39),
    st.floats(0.05, 0.7),
    st.floats(1e-6, 1e12),
)
def test_one_that_is_much_worse_is_named_alone_in_any_unit(
    healthy: list[float], place: int, share: float, unit: float
) -> None:
    values = {f"n{index}": value * unit for index, value in enumerate(healthy)}
    assert outliers(values, 0.2, low_is_bad=True) == ()
    assert outliers(values, 0.2, low_is_bad=False) == ()
    sick = f"n{place % len(healthy)}"
    slow = {**values, sick: unit * share}
    assert [one.name for one in outliers(slow, 0.2, low_is_bad=True)] == [sick]
    assert outliers(slow, 0.2, low_is_bad=False) == ()


def test_fast_one_is_no_outlier_and_two_decide_nothing() -> None:
    assert outliers({"a": 1.0, "b": 1.0, "c": 9.0}, 0.2, low_is_bad=True) == ()
    assert outliers({"a": 1.0, "b": 0.1}, 0.2, low_is_bad=True) == ()


def link(
    rate: float = 1e9, back: float | None = None, latency_s: float = 1e-4, offset_s: float = 0.0
) -> LinkResult:
    return LinkResult(latency_s, rate, rate if back is None else back, offset_s, 1e-5)


def cluster(count: int, **links: LinkResult) -> list[NodeExamination]:
    """Healthy nodes a, b, c...; `ab=link(...)` says what a measured of b."""
    names = "abcdefgh"[:count]
    return [
        NodeExamination(
            name, name, 1e10, DiskResult(1e9, 1e-3), (MatmulResult("cpu", 1e11, True, True),), link(3e9),
            {other: links.get(name + other, link()) for other in names if other > name},
        )
        for name in names
    ]  # fmt: skip


def told(
    found: list[NodeExamination], missing: dict[str, str] | None = None
) -> list[tuple[str, str]]:
    return [(finding.subject, finding.what) for finding in judge(found, missing or {})]


def test_healthy_cluster_has_no_findings() -> None:
    assert told(cluster(5)) == []


def test_sender_that_is_slow_to_everybody_is_the_node_and_not_its_links() -> None:
    slow = {pair: link(1e9, 1e8) for pair in ("ac", "bc")} | {
        pair: link(1e8, 1e9) for pair in ("cd", "ce")
    }
    assert told(cluster(5, **slow)) == [("c", "slow sending")]


def test_receiver_that_is_slow_from_everybody_is_named_with_three_nodes_too() -> None:
    slow = {"ac": link(1e8, 1e9), "bc": link(1e8, 1e9)}
    assert told(cluster(3, **slow)) == [("c", "slow receiving")]


def test_one_slow_cell_is_a_link_in_that_direction() -> None:
    assert told(cluster(4, bd=link(1e9, 2e8))) == [("d -> b", "slow link")]


def test_late_answers_everywhere_are_a_node_and_one_clock_that_is_off_is_named() -> None:
    slow = {pair: link(latency_s=0.05) for pair in ("ab", "bc", "bd")}
    assert told(cluster(4, **slow)) == [("b", "long latency")]
    ahead = {"ab": link(offset_s=5.0), "bc": link(offset_s=-5.0), "bd": link(offset_s=-5.0)}
    assert told(cluster(4, **ahead)) == [("b", "clock is off")]


def test_wrong_product_missing_peer_and_failed_disk_need_no_comparison() -> None:
    one = cluster(1)[0]
    wrong = NodeExamination(
        "a",
        "a",
        1e10,
        None,
        (MatmulResult("cuda:0", 1e12, False, False),),
        link(),
        {},
        {"disk": "/x: full"},
    )
    assert told([one]) == []
    assert told([wrong], {"z": "no doctor answers"}) == [
        ("z", "does not answer"),
        ("a", "wrong matrix product"),
        ("a", "product does not repeat"),
        ("a", "disk failed"),
    ]


def test_examination_survives_the_wire() -> None:
    for one in cluster(3):
        assert NodeExamination.from_json(one.to_json()) == one
