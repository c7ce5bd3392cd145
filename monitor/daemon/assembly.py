"""Assembles the components of the command's daemon: the only module that imports them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from keepstep.monitor.contracts import JobRuntime
from keepstep.monitor.daemon.local_monitors import local_monitors
from keepstep.monitor.daemon.settings import DaemonComponents
from keepstep.monitor.diagnosis.conclusion import NO_DIAGNOSIS_STATE, DiagnosisState, conclude
from keepstep.monitor.diagnosis.metrics import NodeMetrics
from keepstep.monitor.diagnosis.policy import EnforcementPolicy
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
    runtime: JobRuntime | None = None,
    policy: EnforcementPolicy | None = None,
) -> DaemonComponents:
    """Return the components of a job's daemon on this node; the caller closes them.

    Args:
        job: its name.
        node: this node's name.
        diagnoses: whether the daemon diagnoses, rather than only relays.
        reads_rings: whether it reads this node's rings.
        children: returns the URLs of its children.
        runtime: the job's own, if keepstep runs the job.
        policy: what to do about verdicts.
    """
    return DaemonComponents(
        probe=NodeProbe(node),
        reader=RingSource(job_directory(job)) if reads_rings else None,
        diagnosis=diagnose if diagnoses else None,
        alignment=align,
        publisher=runtime.publisher if runtime else None,
        job_status_source=runtime.job_status_source if runtime else None,
        policy=policy if diagnoses else None,
        enforcer=runtime.enforcer if runtime else None,
        children=children,
        recorded=recorded_jobs,
        monitors=local_monitors,
    )


def diagnose(
    new_digest: Digest,
    communicators: Mapping[int, Communicator],
    nodes: Mapping[int, str],
    metrics: Mapping[str, NodeMetrics],
    past: DiagnosisState | None,
    now_s: float,
) -> tuple[DiagnosisState, Sequence[Verdict]]:
    """Diagnose, with the usual thresholds: the daemon's `Diagnosis`."""
    return conclude(
        new_digest, communicators, nodes, metrics, past or NO_DIAGNOSIS_STATE, now_s, Thresholds()
    )
