"""Tests what a diagnosis remembers when the job's processes change."""

from dataclasses import dataclass
from typing import Any

import pytest

from keepstep.monitor.daemon.assembly import diagnose
from keepstep.monitor.diagnosis.metrics import GpuMetrics, NodeMetrics
from keepstep.monitor.records import Ending
from keepstep.monitor.telemetry.record_history import RankState
from keepstep.monitor.verdicts import Syndrome
from keepstep.monitor.watch.component_faults import ComponentFaults
from keepstep.monitor.watch.diagnosis_rounds import DiagnosisRunner


def state(incarnation: str) -> RankState:
    return RankState(
        rank=0, node="a", pid=1, incarnation=incarnation, is_alive=True, ending=Ending.NONE,
        read_at_s=1.0, progress_at_s=1.0,
    )  # fmt: skip


@dataclass
class Remembering:
    """A state of diagnosis that remembers something beyond its processes."""

    text: str

    def renewed(self) -> "Remembering":
        return Remembering(f"{self.text}, renewed")


@pytest.mark.parametrize(
    ("memory", "after"), [(Remembering("old"), Remembering("old, renewed")), (7, None)]
)
def test_new_processes_renew_what_is_remembered(memory: Any, after: Any) -> None:
    passed: list[Any] = []

    def diagnosis(*arguments: Any) -> Any:
        passed.append(arguments[4])
        return memory, ()

    runner = DiagnosisRunner(diagnosis, ComponentFaults())
    for incarnation in ("first", "first", "second"):
        runner.run([state(incarnation)], {}, {}, 1.0)
    assert passed == [None, memory, after]


def test_verdict_on_a_device_survives_the_restart_of_the_worker() -> None:
    runner = DiagnosisRunner(diagnose, ComponentFaults())

    def verdicts(incarnation: str, at_s: float, *xids: int) -> list[Syndrome]:
        gpu = GpuMetrics(0, xids=xids, ranks=(0,))
        metrics = {"a": NodeMetrics("a", at_s, gpus=(gpu,))}
        concluded = runner.run([state(incarnation)], {}, metrics, at_s)
        assert concluded is not None
        return [verdict.syndrome for verdict in concluded]

    assert verdicts("first", 1.0) == []
    assert verdicts("first", 2.0, 79) == [Syndrome.DEVICE_ERROR]
    assert verdicts("second", 3.0, 79) == [Syndrome.DEVICE_ERROR]
