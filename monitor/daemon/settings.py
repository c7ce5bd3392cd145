"""Defines how a daemon runs, and the components that it consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.monitor.contracts import (
    Alignment,
    Diagnosis,
    Enforcer,
    JobReader,
    JobStatusSource,
    Probe,
    VerdictPublisher,
)
from keepstep.monitor.daemon.local_monitors import LocalMonitor
from keepstep.monitor.daemon.otlp_settings import OtlpSettings
from keepstep.monitor.diagnosis.policy import EnforcementPolicy
from keepstep.monitor.errors import MonitorError
from keepstep.monitor.secret import is_loopback
from keepstep.monitor.views.webhook import WebhookAddress
from keepstep.monitor.watch.rank_store import WatchLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The configuration of a daemon.

    Args:
        job: the job's name.
        node: this node's name.
        secret: the job's secret.
        host: address to listen on.
        port: 0 for any.
        opens_to_loopback: whether requests from loopback need no token.
        read_every_s: seconds between readings.
        diagnose_every_s: seconds between diagnoses.
        poll_every_s: seconds between requests to the child daemons.
        align_every_s: seconds between measurements of clock offsets; quartz drifts by a tenth of a
            millisecond meanwhile.
        budget: ended operations that a child sends of each rank at a time, at most.
        record_ranks_per_s: of how many ranks children send the records in a second; more ranks take
            turns, and what the page shows of them is older.
        events: file for events; None for none.
        state: file for the state that survives a restart; None for none.
        otlp: where telemetry is pushed to; None for nowhere.
        webhook: where verdicts are posted to; None for nowhere.
        limits: of what is kept.

    Raises:
        MonitorError: no token is required, and the address is not loopback.
    """

    job: str
    node: str
    secret: bytes
    host: str = "127.0.0.1"
    port: int = 0
    opens_to_loopback: bool = False
    read_every_s: float = 0.5
    diagnose_every_s: float = 1.0
    poll_every_s: float = 1.0
    align_every_s: float = 10.0
    budget: int = 256
    record_ranks_per_s: int = 1000
    events: Path | None = None
    state: Path | None = None
    otlp: OtlpSettings | None = None
    webhook: WebhookAddress | None = None
    limits: WatchLimits = field(default_factory=WatchLimits)

    def __post_init__(self) -> None:
        if self.opens_to_loopback and not is_loopback(self.host):
            raise MonitorError(
                f"access without a token is for loopback only, not for {self.host}; "
                "omit --host or --open-page"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonComponents:
    """The components of a daemon, which owns and closes them.

    Args:
        probe: measures the node.
        reader: this node's rings; None for a daemon that only receives summaries.
        diagnosis: None for a daemon that only relays.
        alignment: of clocks.
        publisher: takes verdicts, besides the event file.
        job_status_source: the job's runtime.
        policy: what to do about verdicts; None for nothing.
        enforcer: carries out actions other than alerts; None where there are only alerts.
        children: returns the URLs of the child daemons; called in every round.
        recorded: returns the jobs recorded on this node, for a user who has the wrong name.
        monitors: returns the monitors on this node, for a user who has several jobs.
    """

    probe: Probe
    reader: JobReader | None = None
    diagnosis: Diagnosis | None = None
    alignment: Alignment | None = None
    publisher: VerdictPublisher | None = None
    job_status_source: JobStatusSource | None = None
    policy: EnforcementPolicy | None = None
    enforcer: Enforcer | None = None
    children: Callable[[], Sequence[str]] = tuple
    recorded: Callable[[], Sequence[str]] = tuple
    monitors: Callable[[], Sequence[LocalMonitor]] = tuple
