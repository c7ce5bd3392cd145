"""What `keepstep monitor` gets of a job that keepstep runs: its status, a place for verdicts, and hands.

Where no coordinator is named, it is that of the job of this name on this machine, whichever that is at the moment: a monitor may be there
before the job, and outlive it into the next run, whose coordinator is another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keepstep.elastic.errors import ElasticError, StoreUnavailable
from keepstep.elastic.store.address import parse_address
from keepstep.elastic.store.local_jobs import local_jobs
from keepstep.monitor.contracts import JobRuntime, JobStatus
from keepstep.monitor.diagnosis.policy import EnforcementAction
from keepstep.monitor.errors import MonitorError, RuntimeUnreachable
from keepstep.monitor.verdicts import Verdict

if TYPE_CHECKING:
    from keepstep.elastic.monitor_bridge.job_status import CoordinatorJobStatus
    from keepstep.elastic.monitor_bridge.verdicts import CoordinatorVerdicts


def runtime(store: str | None, job: str) -> JobRuntime:
    """Return what the coordinator at `store` offers, else that of the job of this name on this machine, once there is one.

    Raises:
        UsageError: `store` is no coordinator's address.
    """
    if store is not None:
        parse_address(store)
    monitor_runtime = MonitorRuntime(store, job)
    return JobRuntime(monitor_runtime, monitor_runtime, monitor_runtime)


@dataclass(frozen=True, slots=True)
class _Connection:
    url: str
    job_status: CoordinatorJobStatus
    verdicts: CoordinatorVerdicts

    def close(self) -> None:
        self.job_status.close()
        self.verdicts.close()


class MonitorRuntime:
    """The monitor's `JobStatusSource`, `VerdictPublisher` and `Enforcer`. For one thread at a time; `close` may be called twice."""

    def __init__(self, store: str | None, job: str) -> None:
        self._store = store
        self._job = job
        self._connection: _Connection | None = None

    def job_status(self) -> JobStatus | None:
        """Return the job status as the coordinator has it now; None if none is known.

        Raises:
            RuntimeUnreachable: the coordinator does not answer.
            MonitorError: it refuses us.
        """
        with _translate_errors():
            connection = self._connected()
            if connection is None:
                return None
            try:
                return connection.job_status.job_status()
            except StoreUnavailable:
                if self._url() != connection.url:
                    return None  # The job ended while it was asked.
                raise

    def publish(self, verdicts: Sequence[Verdict], generation: int, now_s: float) -> None:
        """Publish at the coordinator that told the job status. Raises as `job_status` does."""
        with _translate_errors():
            if self._connection is not None:
                self._connection.verdicts.publish(verdicts, generation, now_s)

    def enforce(self, action: EnforcementAction, generation: int) -> bool:
        """Have an action carried out by the job whose status was read. Raises as `job_status` does."""
        with _translate_errors():
            return self._connection is not None and self._connection.verdicts.enforce(
                action, generation
            )

    def close(self) -> None:
        """End the connections."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _url(self) -> str | None:
        if self._store is not None:
            return self._store
        return next((entry.store for entry in local_jobs() if entry.job == self._job), None)

    def _connected(self) -> _Connection | None:
        url = self._url()
        if self._connection is not None and self._connection.url != url:
            self.close()
        if self._connection is None and url is not None:
            # A monitor of a job without a coordinator has no use for the coordinator's client.
            from keepstep.elastic.monitor_bridge.job_status import CoordinatorJobStatus
            from keepstep.elastic.monitor_bridge.verdicts import CoordinatorVerdicts

            self._connection = _Connection(
                url, CoordinatorJobStatus(url, self._job), CoordinatorVerdicts(url, self._job)
            )
        return self._connection


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Have errors of the coordinator's client raised as the monitor's own."""
    try:
        yield
    except StoreUnavailable as error:
        raise RuntimeUnreachable(str(error)) from error
    except ElasticError as error:
        raise MonitorError(str(error)) from error
