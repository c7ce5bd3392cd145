"""What the monitor's page shows of a keepstep job beyond telemetry: the coordinator's view, told in the monitor's words.

`job_status_of` is pure. `CoordinatorJobStatus` reads the view anew whenever it is asked, for the monitor asks every few seconds and from a thread
of its own.
"""

from __future__ import annotations

from keepstep.elastic.rendezvous.view import Keys, View, from_listing
from keepstep.elastic.store.blocking import BlockingStore
from keepstep.monitor.contracts import JobStatus, MemberStatus, RecoveryStatus


def job_status_of(view: View) -> JobStatus | None:
    """Return the job's status; None before its first generation."""
    generation = view.generation
    if generation is None:
        return None
    members = []
    for node, joined in sorted(view.nodes.items()):
        place = generation.member(node)
        ranks = tuple(range(place.first_rank, place.first_rank + place.nproc)) if place else ()
        phase = "leaving" if joined.record.leaving else joined.record.phase.value
        members.append(
            MemberStatus(node, phase, ranks, joined.record.step, joined.record.memory_nbytes)
        )
    recoveries = tuple(
        RecoveryStatus(
            one.generation, one.reason, one.world_size, one.detected_at_s, one.opened_at_s, one.ready_at_s,
            one.restored_at_s, one.stepped_at_s, one.resumed_step, one.lost_steps, one.source,
        )
        for one in view.history.recoveries
    )  # fmt: skip
    began_at_s = recoveries[0].detected_at_s if recoveries else generation.detected_at_s
    return JobStatus(
        began_at_s=began_at_s or generation.opened_at_s,
        generation=view.generation_number,
        members=tuple(members),
        recoveries=recoveries,
        snapshot_step=view.snapshot.snapshot.step if view.snapshot else None,
        checkpoint_step=view.checkpoint.step if view.checkpoint else None,
        checkpoint_url=view.checkpoint.url if view.checkpoint else "",
        parity=generation.parity,
    )


class CoordinatorJobStatus:
    """The monitor's `JobStatusSource` over a coordinator. For one thread at a time; `close` ends its connection."""

    def __init__(self, url: str, job: str) -> None:
        self._keys = Keys(job)
        self._store = BlockingStore(url)

    def job_status(self) -> JobStatus | None:
        """Return the job status as the coordinator has it now."""
        return job_status_of(from_listing(self._keys, self._store.read(self._keys.prefix)))

    def close(self) -> None:
        """End the connection."""
        self._store.close()
