"""Nodes' own figures: what is a verdict, and what only explains one."""

from dataclasses import replace

from keepstep.monitor.diagnosis.metrics import GpuMetrics, NodeFindings, NodeMetrics, judge_nodes
from keepstep.monitor.diagnosis.thresholds import NodeThresholds
from keepstep.monitor.verdicts import Advice

NODES = {rank: "abcd"[rank // 2] for rank in range(8)}


def follow(*readings: dict[str, NodeMetrics]) -> NodeFindings:
    past, findings = {}, NodeFindings((), {})
    for now_s, metrics in enumerate(readings):
        past, findings = judge_nodes(metrics, past, NODES, float(now_s), NodeThresholds())
    return findings


def reading(at_s: float, **of_a: object) -> dict[str, NodeMetrics]:
    fine = NodeMetrics(
        "a",
        at_s,
        cpu_hz=3e9,
        memory_total=100 << 30,
        memory_available=60 << 30,
        gpus=(GpuMetrics(0, 60.0, 1.7e9, busy_share=0.9),),
    )
    return {name: replace(fine, node=name, **(of_a if name == "a" else {})) for name in "abcd"}


def test_healthy_nodes_have_no_findings() -> None:
    assert follow(*(reading(at_s, throttled_s=0.1 * at_s) for at_s in range(6))) == NodeFindings(
        (), {}
    )


def test_denied_processor_time_explains_and_is_no_verdict() -> None:
    findings = follow(*(reading(at_s, throttled_s=0.5 * at_s) for at_s in range(6)))
    assert findings.verdicts == ()
    assert "50%" in findings.throttled["a"]


def test_one_odd_reading_explains_nothing() -> None:
    assert follow(reading(0), reading(1), reading(2, cpu_hz=1e9)).throttled == {}
    assert "1.00 GHz" in follow(*(reading(at_s, cpu_hz=1e9) for at_s in range(3))).throttled["a"]


def test_hot_or_slow_device_explains() -> None:
    hot = (GpuMetrics(0, 93.0, 1.7e9, busy_share=0.9),)
    slow = (GpuMetrics(0, 60.0, 1.1e9, busy_share=0.9),)
    idle = (GpuMetrics(0, 60.0, 0.3e9, busy_share=0.0),)
    assert "93 degrees" in follow(*(reading(at_s, gpus=hot) for at_s in range(3))).throttled["a"]
    assert "1100 MHz" in follow(*(reading(at_s, gpus=slow) for at_s in range(3))).throttled["a"]
    assert follow(*(reading(at_s, gpus=idle) for at_s in range(3))).throttled == {}


def test_new_device_errors_are_verdicts_at_once_and_old_ones_are_not() -> None:
    old = (GpuMetrics(0, ecc_uncorrected=2, xids=(79,)),)
    new = (GpuMetrics(0, ecc_uncorrected=3, xids=(79, 13, 94)),)
    assert follow(reading(0, gpus=old), reading(1, gpus=old)).verdicts == ()
    (verdict,) = follow(reading(0, gpus=old), reading(1, gpus=new)).verdicts
    assert str(verdict.subject) == "node a (ranks 0, 1)"
    assert verdict.advice is Advice.REPLACE_NODE
    assert verdict.evidence == (
        "GPU 0 has 1 new uncorrectable memory errors",
        "GPU 0 reports Xid 94",
    )


def test_error_of_the_program_is_no_device_error() -> None:
    program = (GpuMetrics(0, xids=(31, 13)),)
    assert follow(reading(0), reading(1, gpus=program)).verdicts == ()


def test_memory_that_is_nearly_gone_or_soon_will_be_is_told() -> None:
    (low,) = follow(*(reading(at_s, memory_available=2 << 30) for at_s in range(4))).verdicts
    assert "2048 MiB" in low.evidence[0]
    (soon,) = follow(
        *(reading(at_s, memory_available=(12 - at_s) << 30) for at_s in range(4))
    ).verdicts
    assert "gone in 9 s" in soon.evidence[0]


def test_memory_that_shrinks_far_from_the_end_or_rests_near_it_is_not_told() -> None:
    assert (
        follow(*(reading(at_s, memory_available=(60 - at_s) << 30) for at_s in range(4))).verdicts
        == ()
    )
    assert follow(*(reading(at_s, memory_available=10 << 30) for at_s in range(4))).verdicts == ()


def test_repeated_reading_counts_once() -> None:
    same = reading(1, cpu_hz=1e9)
    assert follow(same, same, same, same).throttled == {}
