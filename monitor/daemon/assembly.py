"""Which parts a daemon of the command is made of. The only place that knows them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from keepstep.monitor.contracts import Runtime
from keepstep.monitor.daemon.daemon import Parts
from keepstep.monitor.diagnosis.conclusion import NO_PAST, Past, conclude
from keepstep.monitor.diagnosis.metrics import NodeMetrics
from keepstep.monitor.diagnosis.policy import Policy
from keepstep.monitor.diagnosis.tables import Digest
from keepstep.monitor.diagnosis.thresholds import Thresholds
from keepstep.monitor.node.probes import NodeProbe
from keepstep.monitor.node.ring_source import RingSource
from keepstep.monitor.records import Communicator
from keepstep.monitor.telemetry.clocks import align
from keepstep.monitor.telemetry.ring_files import job_directory, recorded_jobs
from keepstep.monitor.verdicts import Verdict


def assemble(
    job: str,
    node: str,
    *,
    diagnoses: bool,
    reads_rings: bool = True,
    children: Callable[[], Sequence[str]] = tuple,
    runtime: Runtime | None = None,
    policy: Policy | None = None,
) -> Parts:
    """Return the parts for a job's daemon on this node; whoever gets them closes them."""
    return Parts(
        probe=NodeProbe(node),
        reader=RingSource(job_directory(job)) if reads_rings else None,
        diagnosis=diagnose if diagnoses else None,
        alignment=align,
        publisher=runtime.publisher if runtime else None,
        teller=runtime.teller if runtime else None,
        policy=policy if diagnoses else None,
        enforcer=runtime.enforcer if runtime else None,
        children=children,
        recorded=recorded_jobs,
    )


def diagnose(
    told: Digest,
    communicators: Mapping[int, Communicator],
    nodes: Mapping[int, str],
    metrics: Mapping[str, NodeMetrics],
    past: Past | None,
    now_s: float,
) -> tuple[Past, Sequence[Verdict]]:
    """Diagnose, with the usual thresholds: the daemon's `Diagnosis`."""
    return conclude(told, communicators, nodes, metrics, past or NO_PAST, now_s, Thresholds())
