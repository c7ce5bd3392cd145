"""Components for daemons under test: probe, diagnosis, publisher, enforcer, job status source."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from keepstep.monitor.contracts import JobStatus, MemberStatus
from keepstep.monitor.daemon.settings import Settings
from keepstep.monitor.diagnosis.metrics import NodeMetrics
from keepstep.monitor.diagnosis.policy import ActionKind, EnforcementAction
from keepstep.monitor.diagnosis.tables import Digest
from keepstep.monitor.records import Communicator
from keepstep.monitor.verdicts import Verdict
from tests.integration.monitor.running import SECRET
from tests.integration.monitor.sample import Plan

PLAN = Plan(ranks=8, steps=300, step_s=0.1)


def settings(node: str = "node-a", **more: Any) -> Settings:
    return Settings(
        job="run7",
        node=node,
        secret=SECRET,
        read_every_s=0.05,
        diagnose_every_s=0.1,
        poll_every_s=0.05,
        **more,
    )


class Probe:
    def __init__(self) -> None:
        self.closed = False

    def sample(self, workers: Mapping[int, int]) -> NodeMetrics:
        return NodeMetrics("node", time.monotonic(), load=float(len(workers)))

    def close(self) -> None:
        self.closed = True


class FixedDiagnosis:
    """A diagnosis that returns given verdicts, and keeps its arguments."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts = verdicts
        self.digests: list[Digest] = []
        self.nodes: dict[int, str] = {}
        self.communicators: dict[int, Communicator] = {}
        self.metrics: list[Any] = []

    def __call__(
        self,
        new_digest: Digest,
        communicators: Any,
        nodes: Any,
        metrics: Any,
        past: Any,
        now_s: float,
    ) -> tuple[Any, Sequence[Verdict]]:
        self.digests.append(new_digest)
        self.metrics.append(metrics)
        self.nodes, self.communicators = dict(nodes), dict(communicators)
        return (past or 0) + 1, self.verdicts


class Publisher:
    def __init__(self) -> None:
        self.published: list[tuple[Verdict, ...]] = []
        self.closed = False

    def publish(self, verdicts: Sequence[Verdict], generation: int, now_s: float) -> bool:
        self.published.append(tuple(verdicts))
        return True

    def close(self) -> None:
        self.closed = True


class Enforcer:
    def __init__(self) -> None:
        self.requested: list[tuple[EnforcementAction, int]] = []

    def enforce(self, action: EnforcementAction, generation: int) -> ActionKind | None:
        self.requested.append((action, generation))
        return action.kind

    def close(self) -> None:
        pass


class FixedJobStatus:
    def __init__(self, generation: int) -> None:
        self.generation = generation

    def job_status(self) -> JobStatus:
        members = (
            MemberStatus("a", "running", (0, 1, 2, 3), 5, 0),
            MemberStatus("b", "running", (4, 5, 6, 7), 5, 0),
        )
        return JobStatus(0.0, self.generation, members, ())

    def close(self) -> None:
        pass
