"""Connects `keepstep monitor` to a job's coordinator: job status, published verdicts, enforcement.

Without a coordinator address, the monitor follows the job of its name on this machine. It may start
before the job, and keep running for the job's next run, which has another coordinator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.elastic.errors import ElasticError, StoreUnavailable
from keepstep.elastic.store.address import Address, parse_address
from keepstep.elastic.store.local_jobs import local_jobs
from keepstep.monitor.contracts import JobRuntime, JobStatus
from keepstep.monitor.diagnosis.policy import ActionKind, EnforcementAction
from keepstep.monitor.errors import MonitorError, RuntimeUnreachable
from keepstep.monitor.verdicts import Verdict

if TYPE_CHECKING:
    from keepstep.elastic.monitor_bridge.job_status import CoordinatorJobStatus
    from keepstep.elastic.monitor_bridge.verdicts import CoordinatorVerdicts


def runtime(store: str | None, job: str, secret_file: Path | None = None) -> JobRuntime:
    """Return the connection from the monitor to a job's coordinator.

    Args:
        store: the coordinator's address; None: that of the job of this name on this machine, once
            it runs.
        job: name of the job.
        secret_file: file with the secret of a coordinator `store` that keepstep started.

    Raises:
        UsageError: `store` is not a coordinator's address.
    """
    address = None if store is None else parse_address(store, secret_file)
    monitor_runtime = MonitorRuntime(address, job)
    return JobRuntime(
        job_status_source=monitor_runtime, publisher=monitor_runtime, enforcer=monitor_runtime
    )


@dataclass(frozen=True, slots=True)
class _Connection:
    address: Address
    job_status: CoordinatorJobStatus
    verdicts: CoordinatorVerdicts

    def close(self) -> None:
        self.job_status.close()
        self.verdicts.close()


class MonitorRuntime:
    """Implements the monitor's `JobStatusSource`, `VerdictPublisher` and `Enforcer`.

    It connects when it is first used, and may be used by one thread at a time. `close` may be
    called twice.
    """

    def __init__(self, store: Address | None, job: str) -> None:
        self._store = store
        self._job = job
        self._connection: _Connection | None = None

    def job_status(self) -> JobStatus | None:
        """Return the current job status; None if the job is not known or has no generation yet.

        Raises:
            RuntimeUnreachable: the coordinator does not answer.
            MonitorError: the coordinator rejects this client.
        """
        with _translate_errors():
            connection = self._connected()
            if connection is None:
                return None
            try:
                return connection.job_status.job_status()
            except StoreUnavailable:
                if self._address() != connection.address:
                    return None  # The job ended during the call.
                raise

    def publish(self, verdicts: Sequence[Verdict], generation: int, now_s: float) -> bool:
        """Publish verdicts at the coordinator that `job_status` last read; True if it has them.

        Raises as `job_status` does.
        """
        with _translate_errors():
            return self._connection is not None and self._connection.verdicts.publish(
                verdicts, generation, now_s
            )

    def enforce(self, action: EnforcementAction, generation: int) -> ActionKind | None:
        """Request an action from the job that `job_status` last read; return what it accepted.

        Raises as `job_status` does.
        """
        with _translate_errors():
            if self._connection is None:
                return None
            return self._connection.verdicts.enforce(action, generation)

    def close(self) -> None:
        """End the connections."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _address(self) -> Address | None:
        if self._store is not None:
            return self._store
        return next((entry.address for entry in local_jobs() if entry.job == self._job), None)

    def _connected(self) -> _Connection | None:
        address = self._address()
        if self._connection is not None and self._connection.address != address:
            self.close()
        if self._connection is None and address is not None:
            # Imported here, so that a monitor of a job without a coordinator does not load gRPC.
            from keepstep.elastic.monitor_bridge.job_status import CoordinatorJobStatus
            from keepstep.elastic.monitor_bridge.verdicts import CoordinatorVerdicts

            self._connection = _Connection(
                address,
                CoordinatorJobStatus(address, self._job),
                CoordinatorVerdicts(address, self._job),
            )
        return self._connection


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise errors of the coordinator's client as the monitor's errors."""
    try:
        yield
    except StoreUnavailable as error:
        raise RuntimeUnreachable(str(error)) from error
    except ElasticError as error:
        raise MonitorError(str(error)) from error
