"""Converts the coordinator's view of a job to the monitor's `JobStatus`.

`job_status_of` is pure. `CoordinatorJobStatus` reads the view again at every call: the monitor
calls it every few seconds, from a thread that may block.
"""

from __future__ import annotations

from keepstep.elastic.rendezvous.records import Recovery
from keepstep.elastic.rendezvous.view import Keys, View, from_listing
from keepstep.elastic.store.address import Address
from keepstep.elastic.store.blocking import BlockingStore
from keepstep.monitor.contracts import JobStatus, MemberStatus, RecoveryStatus


def job_status_of(view: View) -> JobStatus | None:
    """Return the job's status; None before its first generation."""
    generation = view.generation
    if generation is None:
        return None
    places = {member.node: member for member in generation.members}
    members = []
    for node, joined in sorted(view.nodes.items()):
        member = places.get(node)
        members.append(
            MemberStatus(
                node=node,
                phase="leaving" if joined.record.leaving else joined.record.phase.value,
                ranks=tuple(member.ranks) if member else (),
                step=joined.record.step,
                snapshot_nbytes=joined.record.memory_nbytes,
            )
        )
    recoveries = tuple(map(_recovery_status, view.history.recoveries))
    limits = view.leadership.limits if view.leadership is not None else None
    failure = view.store_failure
    began_at_s = recoveries[0].detected_at_s if recoveries else generation.detected_at_s
    return JobStatus(
        began_at_s=began_at_s or generation.opened_at_s,
        generation=view.generation_number,
        members=tuple(members),
        recoveries=recoveries,
        snapshot_step=view.snapshot.snapshot.step if view.snapshot else None,
        checkpoint_step=view.checkpoint.step if view.checkpoint else None,
        checkpoint_url=view.checkpoint.url if view.checkpoint else "",
        checkpoint_at_s=view.checkpoint.at_s if view.checkpoint else 0.0,
        store_failure=f"step {failure.step}: {failure.reason}" if failure else "",
        store_failed_at_s=failure.at_s if failure else 0.0,
        changing=view.closing.reason if view.closing is not None and view.is_closing else "",
        parity=generation.parity,
        standstill_s=limits.standstill_s if limits is not None else 0.0,
        paused=view.pause.reason if view.pause else "",
        paused_at_s=view.pause.at_s if view.pause else 0.0,
    )


def _recovery_status(recovery: Recovery) -> RecoveryStatus:
    return RecoveryStatus(
        generation=recovery.generation,
        reason=recovery.reason,
        world_size=recovery.world_size,
        detected_at_s=recovery.detected_at_s,
        opened_at_s=recovery.opened_at_s,
        ready_at_s=recovery.ready_at_s,
        restored_at_s=recovery.restored_at_s,
        stepped_at_s=recovery.stepped_at_s,
        resumed_step=recovery.resumed_step,
        lost_steps=recovery.lost_steps,
        source=recovery.source,
    )


class CoordinatorJobStatus:
    """Implements the monitor's `JobStatusSource` over a coordinator.

    It may be used by one thread at a time. `close` ends its connection.
    """

    def __init__(self, address: Address, job: str) -> None:
        self._keys = Keys(job)
        self._store = BlockingStore(address)

    def job_status(self) -> JobStatus | None:
        """Return the current job status; None before the job's first generation."""
        return job_status_of(from_listing(self._keys, self._store.read(self._keys.prefix)))

    def close(self) -> None:
        """End the connection."""
        self._store.close()
