"""Claims about the nodes and links that are named after an examination."""

from __future__ import annotations

import pytest

from keepstep.monitor.preflight.examination import (
    DiskResult,
    LinkResult,
    MatmulResult,
    NodeExamination,
)
from keepstep.monitor.preflight.judgement import judge
from keepstep.monitor.preflight.messages import PROTOCOL, Examined


def link(
    rate: float = 1e9, back: float | None = None, latency_s: float = 1e-4, offset_s: float = 0.0
) -> LinkResult:
    return LinkResult(
        latency_s=latency_s,
        send_rate=rate,
        receive_rate=rate if back is None else back,
        clock_offset_s=offset_s,
        clock_error_s=1e-5,
    )


def cluster(count: int, **links: LinkResult) -> list[NodeExamination]:
    """Return healthy nodes a, b, c...; `ab=link(...)` is what a measured of b."""
    names = "abcdefgh"[:count]
    return [
        NodeExamination(
            address=name,
            name=name,
            memory_rate=1e10,
            disk=DiskResult(write_rate=1e9, fsync_s=1e-3),
            matmuls=(MatmulResult(device="cpu", flops=1e11, is_right=True, is_repeatable=True),),
            loopback=link(3e9),
            links={other: links.get(name + other, link()) for other in names if other > name},
        )
        for name in names
    ]


def named(
    examinations: list[NodeExamination], missing: dict[str, str] | None = None
) -> list[tuple[str, str]]:
    return [(finding.subject, finding.what) for finding in judge(examinations, missing or {})]


def test_healthy_cluster_has_no_findings() -> None:
    assert named(cluster(5)) == []


def test_sender_that_is_slow_to_all_is_named_and_not_its_links() -> None:
    slow = {pair: link(1e9, 1e8) for pair in ("ac", "bc")} | {
        pair: link(1e8, 1e9) for pair in ("cd", "ce")
    }
    assert named(cluster(5, **slow)) == [("c", "slow sending")]


def test_receiver_that_is_slow_from_all_is_named_among_three_nodes_too() -> None:
    slow = {"ac": link(1e8, 1e9), "bc": link(1e8, 1e9)}
    assert named(cluster(3, **slow)) == [("c", "slow receiving")]


def test_single_slow_direction_is_named_as_a_link() -> None:
    assert named(cluster(4, bd=link(1e9, 2e8))) == [("d -> b", "slow link")]


def test_single_link_of_long_latency_is_named() -> None:
    assert named(cluster(4, bd=link(latency_s=6e-4))) == [("b -> d", "long latency")]


def test_node_of_long_latency_and_node_with_a_wrong_clock_are_named() -> None:
    slow = {pair: link(latency_s=0.05) for pair in ("ab", "bc", "bd")}
    assert named(cluster(4, **slow)) == [("b", "long latency")]
    ahead = {"ab": link(offset_s=5.0), "bc": link(offset_s=-5.0), "bd": link(offset_s=-5.0)}
    assert named(cluster(4, **ahead)) == [("b", "clock is off")]
    # Of three nodes, each healthy one disagrees with half of the others.
    del ahead["bd"]
    assert named(cluster(3, **ahead)) == [("b", "clock is off")]


def test_wrong_product_missing_peer_and_failed_disk_need_no_comparison() -> None:
    wrong = NodeExamination(
        address="a",
        name="a",
        memory_rate=1e10,
        disk=None,
        matmuls=(MatmulResult(device="cuda:0", flops=1e12, is_right=False, is_repeatable=False),),
        loopback=link(),
        errors={"disk": "/x: full"},
    )
    assert named([cluster(1)[0]]) == []
    assert named([wrong], {"z": "no doctor answers"}) == [
        ("z", "does not answer"),
        ("a", "wrong matrix product"),
        ("a", "product does not repeat"),
        ("a", "disk failed"),
    ]


def test_examination_survives_the_codec() -> None:
    codec = PROTOCOL.replies
    for examination in cluster(3):
        message = Examined(examination=examination)
        assert codec.decode(codec.encode(message), "doctor") == message


@pytest.mark.parametrize("bad", [link(1e8), link(latency_s=0.05)], ids=["slow", "long latency"])
def test_node_that_was_measured_but_gives_no_results_is_named_by_its_address(
    bad: LinkResult,
) -> None:
    """It made the doctor of every node die without an answer."""
    examined = cluster(4, ad=bad, bd=bad, cd=bad)[:3]
    findings = judge(examined, {"d": "it gives no results"})
    assert "d" in {finding.subject for finding in findings}, findings
    linked = cluster(6, af=bad)[:5]
    assert any("f" in finding.subject for finding in judge(linked, {"f": "gone"}))
