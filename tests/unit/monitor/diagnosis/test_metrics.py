"""Tests which metrics of nodes are verdicts, and which only explain slow ranks."""

from dataclasses import replace

import pytest

from keepstep.monitor.diagnosis.metrics import GpuMetrics, NodeFindings, NodeMetrics, judge_nodes
from keepstep.monitor.diagnosis.thresholds import NodeThresholds
from keepstep.monitor.verdicts import Advice

NODES = {rank: "abcd"[rank // 2] for rank in range(8)}


def follow(*readings: dict[str, NodeMetrics]) -> NodeFindings:
    past, findings = {}, NodeFindings((), {})
    for now_s, metrics in enumerate(readings):
        past, findings = judge_nodes(metrics, past, NODES, float(now_s), NodeThresholds())
    return findings


def reading(at_s: float, **changes_of_a: object) -> dict[str, NodeMetrics]:
    healthy = NodeMetrics(
        "a",
        at_s,
        cpu_hz=3e9,
        memory_total=100 << 30,
        memory_available=60 << 30,
        gpus=(GpuMetrics(0, 60.0, 1.7e9, busy_share=0.9),),
    )
    return {
        name: replace(healthy, node=name, **(changes_of_a if name == "a" else {}))
        for name in "abcd"
    }


def test_healthy_nodes_have_no_findings() -> None:
    readings = (reading(at_s, throttled_s=0.1 * at_s, cgroup_cpu_s=0.9 * at_s) for at_s in range(6))
    assert follow(*readings) == NodeFindings((), {})


def test_denied_processor_time_explains_slowness_and_is_not_a_verdict() -> None:
    findings = follow(
        *(reading(at_s, throttled_s=0.5 * at_s, cgroup_cpu_s=0.5 * at_s) for at_s in range(6))
    )
    assert findings.verdicts == ()
    assert "50%" in findings.throttled["a"]


def test_a_little_time_denied_on_each_of_many_processors_explains_nothing() -> None:
    """On 64 processors, each denied for 0.8 % of the time, the sum is half of the time."""
    busy = (reading(at_s, throttled_s=0.5 * at_s, cgroup_cpu_s=50.0 * at_s) for at_s in range(6))
    assert follow(*busy).throttled == {}
    unknown = (reading(at_s, throttled_s=0.5 * at_s) for at_s in range(6))
    assert follow(*unknown).throttled == {}


def test_single_anomalous_reading_explains_nothing() -> None:
    assert follow(reading(0), reading(1), reading(2, cpu_hz=1e9)).throttled == {}
    assert "1.00 GHz" in follow(*(reading(at_s, cpu_hz=1e9) for at_s in range(3))).throttled["a"]


def test_hot_or_slow_device_explains_slowness() -> None:
    hot = (GpuMetrics(0, 93.0, 1.7e9, busy_share=0.9),)
    slow = (GpuMetrics(0, 60.0, 1.1e9, busy_share=0.9),)
    idle = (GpuMetrics(0, 60.0, 0.3e9, busy_share=0.0),)
    assert "93 degrees" in follow(*(reading(at_s, gpus=hot) for at_s in range(3))).throttled["a"]
    assert "1100 MHz" in follow(*(reading(at_s, gpus=slow) for at_s in range(3))).throttled["a"]
    assert follow(*(reading(at_s, gpus=idle) for at_s in range(3))).throttled == {}


def gpu(*xids: int, ecc: int = 0, ranks: tuple[int, ...] | None = (0,)) -> tuple[GpuMetrics, ...]:
    return (GpuMetrics(0, ecc_uncorrected=ecc, xids=xids, ranks=ranks),)


def test_errors_of_before_the_first_reading_are_no_verdicts() -> None:
    old = gpu(79, ecc=2)
    assert follow(reading(0, gpus=old), reading(1, gpus=old)).verdicts == ()


def test_error_that_a_device_cannot_contain_calls_for_another_node() -> None:
    (verdict,) = follow(reading(0, gpus=gpu(63)), reading(1, gpus=gpu(63, 13, 79))).verdicts
    assert str(verdict.subject) == "node a (ranks 0, 1)"
    assert verdict.advice is Advice.REPLACE_NODE
    assert verdict.evidence == ("GPU 0 reports Xid 79",)


@pytest.mark.parametrize("after", [gpu(63), gpu(94), gpu(48), gpu(92), gpu(ecc=1)])
def test_contained_error_is_alerted_and_calls_for_no_other_node(
    after: tuple[GpuMetrics, ...],
) -> None:
    (verdict,) = follow(reading(0, gpus=gpu()), reading(1, gpus=after)).verdicts
    assert verdict.advice is Advice.ALERT


def test_contained_errors_that_repeat_call_for_another_node() -> None:
    after = [reading(at_s, gpus=gpu(*[94] * at_s)) for at_s in range(4)]
    assert [verdict.advice for verdict in follow(*after[:3]).verdicts] == [Advice.ALERT]
    assert [verdict.advice for verdict in follow(*after).verdicts] == [Advice.REPLACE_NODE]


def test_error_of_a_device_that_the_job_does_not_use_is_no_verdict() -> None:
    free, taken = gpu(ranks=()), gpu(79, ranks=())
    assert follow(reading(0, gpus=free), reading(1, gpus=taken)).verdicts == ()
    # Its process has ended by the error: the device was used until then.
    (verdict,) = follow(reading(0, gpus=gpu()), reading(1, gpus=taken)).verdicts
    assert verdict.advice is Advice.REPLACE_NODE


def test_error_of_a_device_whose_users_are_not_known_is_only_alerted() -> None:
    free, taken = gpu(ranks=None), gpu(79, ranks=None)
    (verdict,) = follow(reading(0, gpus=free), reading(1, gpus=taken)).verdicts
    assert verdict.advice is Advice.ALERT


def test_verdict_on_a_device_ends_some_time_after_its_last_error() -> None:
    before = [reading(0, gpus=gpu()), reading(1, gpus=gpu(79))]
    held_s = NodeThresholds().error_held_s
    assert len(follow(*before, reading(held_s, gpus=gpu(79))).verdicts) == 1
    assert follow(*before, reading(held_s + 1, gpus=gpu(79))).verdicts == ()


def test_errors_of_a_device_that_fails_continuously_are_remembered_in_bounded_number() -> None:
    past = {}
    for at_s in range(5):
        xids = gpu(*[94] * (1000 * at_s))
        past, _ = judge_nodes(reading(at_s, gpus=xids), past, NODES, float(at_s), NodeThresholds())
    assert len(past["a"].errors) == NodeThresholds().errors_kept


def test_error_is_new_though_older_ones_are_no_longer_reported() -> None:
    before, after = (
        (GpuMetrics(0, xids=xids, earlier_xids=earlier, ranks=(0,)),)
        for earlier, xids in ((5, (31, 31, 31)), (7, (31, 31, 79)))
    )
    assert follow(reading(0, gpus=before), reading(1, gpus=before)).verdicts == ()
    (verdict,) = follow(reading(0, gpus=before), reading(1, gpus=after)).verdicts
    assert "Xid 79" in verdict.evidence[0]
    assert follow(reading(0, gpus=after), reading(1, gpus=after)).verdicts == ()


def test_xid_of_the_program_is_not_a_device_error() -> None:
    assert follow(reading(0, gpus=gpu()), reading(1, gpus=gpu(31, 13))).verdicts == ()


def test_memory_that_is_low_or_will_soon_run_out_is_reported() -> None:
    (low,) = follow(*(reading(at_s, memory_available=2 << 30) for at_s in range(4))).verdicts
    assert "2048 MiB" in low.evidence[0]
    (soon,) = follow(
        *(reading(at_s, memory_available=(12 - at_s) << 30) for at_s in range(4))
    ).verdicts
    assert "gone in 9 s" in soon.evidence[0]


def test_memory_that_shrinks_from_a_high_level_or_is_constant_is_not_reported() -> None:
    assert (
        follow(*(reading(at_s, memory_available=(60 - at_s) << 30) for at_s in range(4))).verdicts
        == ()
    )
    assert follow(*(reading(at_s, memory_available=10 << 30) for at_s in range(4))).verdicts == ()


def test_repeated_reading_counts_once() -> None:
    same = reading(1, cpu_hz=1e9)
    assert follow(same, same, same, same).throttled == {}
