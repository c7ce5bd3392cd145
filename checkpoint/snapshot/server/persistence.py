"""Writes a committed snapshot from the memory of its holders to storage, without the workers.

Runs in the snapshot servers, on one thread of each. The holders plan together (`plan_exchange`).
Every holder writes the chunks whose writers are its ranks, and reads pieces of chunks that only
other nodes hold from those. One server then publishes the manifest. An attempt ends with its
generation.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from keepstep.checkpoint.errors import CheckpointError, CheckpointExists
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.content_digest import DIGEST, digest_document, sum_of
from keepstep.checkpoint.format.layout.retention import Retention
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.format.stored.housekeeping import collect_garbage, remove
from keepstep.checkpoint.format.stored.last_part import LastPart
from keepstep.checkpoint.format.stored.manifest import StoredObject
from keepstep.checkpoint.format.stored.object_names import Attempt, StoredStep
from keepstep.checkpoint.format.stored.pruning import older_to_remove
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.format.stored.transfer_memory import TransferPool
from keepstep.checkpoint.format.stored.writer import publish, write_part
from keepstep.checkpoint.snapshot.arena import Bytes
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient
from keepstep.checkpoint.snapshot.memory.messages import (
    AlreadyStored,
    PartListing,
    Persisted,
    PersistFailed,
    PersistTask,
    Published,
    PublishFailed,
    ServerEvent,
)
from keepstep.checkpoint.snapshot.server.chunk_pieces import ChunkPieces
from keepstep.checkpoint.snapshot.server.limits import RateLimiter
from keepstep.checkpoint.snapshot.server.plan_exchange import PlanExchange
from keepstep.checkpoint.snapshot.server.plan_outbox import PlanOutbox
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory
from keepstep.processes import yield_to_training
from keepstep.transport import Identity

log = logging.getLogger("keepstep")

_GARBAGE_EVERY_S = 600.0
"""How often the bytes of removed checkpoints are looked for: it lists all objects at the URL."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An attempt to write a part, not over yet. `stop`, once set, ends it before its next chunk."""

    name: str
    snapshot: SnapshotId
    stop: threading.Event
    writing: Future[None]


class Persistence:
    """Owns the thread that writes. `stop` gives up what is under way, `close` also ends the thread.

    The thread's owner makes all calls, from one thread at a time.

    Args:
        memory: holds the node's shards.
        plan_outbox: gets what other servers need to plan with this one.
        identity: this node, as other servers see it.
        bytes_per_s: how fast to write; 0 is as fast as it goes.
        send_event: sends an event to the agent.
    """

    def __init__(
        self,
        memory: SnapshotMemory,
        plan_outbox: PlanOutbox,
        identity: Identity,
        bytes_per_s: int,
        send_event: Callable[[ServerEvent], None],
    ) -> None:
        self._rate_limiter = RateLimiter(bytes_per_s)
        self._memory = memory
        self._identity = identity
        self._send_event = send_event
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="keepstep-persist", initializer=yield_to_training
        )
        self._plan_outbox = plan_outbox
        self._plan_exchange = PlanExchange(memory, plan_outbox, self._connect)
        self._write_memory = TransferPool()
        self._last_part = LastPart()
        self._attempt: _Attempt | None = None
        self._garbage_due_s = time.monotonic()
        self._is_closing = threading.Event()

    def start(self, task: PersistTask, part: int) -> None:
        """Begin to write this server's part, numbered `part`; the attempt before is given up.

        `Persisted`, `AlreadyStored` or `PersistFailed` is sent to the agent, with the attempt's
        name. The snapshot is kept until `end` or `stop`: when this part is written, other holders
        may still need pieces of it.

        Raises:
            SnapshotUnavailable: nothing of the snapshot is held here.
        """
        self.stop()
        # Pinned for the attempt, and for the thread, which ends later than it if it is stopped.
        self._memory.pin(task.snapshot)
        self._memory.pin(task.snapshot)
        self._plan_outbox.begin(task.attempt)
        stop = threading.Event()
        writing = self._pool.submit(self._write, task, part, stop)
        self._attempt = _Attempt(task.attempt, task.snapshot, stop, writing)

    def end(self, attempt: str) -> None:
        """End the attempt of this name, if it is not over: it is published, or cancelled."""
        if self._attempt is not None and self._attempt.name == attempt:
            self.stop()

    def publish(self, task: PersistTask, listings: Sequence[PartListing]) -> None:
        """Begin to write the manifest, given the listings of all parts.

        `Published` or `PublishFailed` is sent to the agent.
        """
        self._pool.submit(self._publish, task, tuple(listings))

    def stop(self) -> None:
        """Give up the attempt that is not over."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.stop.set()
            self._memory.unpin(attempt.snapshot)
            if attempt.writing.cancel():
                # It waited behind one that storage does not answer, which may be for ever.
                self._memory.unpin(attempt.snapshot)

    def close(self) -> None:
        """Give up and end."""
        self.stop()
        self._is_closing.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _write(self, task: PersistTask, part: int, stop: threading.Event) -> None:
        snapshot = task.snapshot
        event: ServerEvent
        try:
            plan = self._plan_exchange.plan(task, stop.is_set)
            addresses = {rank: holder.address for holder in task.holders for rank in holder.ranks}
            pieces = ChunkPieces(self._memory, snapshot, addresses, plan, self._connect)

            def read_box(key: str, box: Box) -> Bytes:
                data = pieces.read(key, box)
                if wait_s := self._rate_limiter.reserve(data.nbytes, time.monotonic()):
                    stop.wait(wait_s)
                return data

            part_entry = write_part(
                open_storage(task.url),
                _attempt_of(task),
                plan.chunks,
                range(len(plan.own)),
                read_box,
                name=part,
                stop=stop.is_set,
                memory=self._write_memory,
                with_content=True,
                last=self._last_part,
            )
            listing = PartListing(
                part_entry.name, part_entry.nbytes, part_entry.crc32c, part_entry.content
            )
            event = Persisted(snapshot=snapshot, attempt=task.attempt, listing=listing)
        except CheckpointExists as error:
            if _is_stored_by_this_run(task):
                event = AlreadyStored(snapshot=snapshot, attempt=task.attempt)
            else:
                event = PersistFailed(
                    snapshot=snapshot, attempt=task.attempt, reason=_reason(error)
                )
        except Exception as error:  # noqa: BLE001 - the thread's edge: the agent waits for an event
            event = PersistFailed(snapshot=snapshot, attempt=task.attempt, reason=_reason(error))
        finally:
            self._memory.unpin(snapshot)
        self._send_event(event)

    def _publish(self, task: PersistTask, listings: tuple[PartListing, ...]) -> None:
        snapshot = task.snapshot
        event: ServerEvent
        try:
            content = self._plan_exchange.content(task, self._is_closing.is_set)
            total = sum_of(part.content for part in listings)
            publish(
                open_storage(task.url),
                _attempt_of(task),
                [StoredObject(part.name, part.nbytes, part.crc32c) for part in listings],
                content.tensors,
                content.chunk_parts,
                {**content.documents, DIGEST: digest_document(total)},
            )
            event = Published(snapshot=snapshot)
        except CheckpointExists as error:
            if _is_stored_by_this_run(task):
                event = Published(snapshot=snapshot)
            else:
                event = PublishFailed(snapshot=snapshot, reason=_reason(error))
        except Exception as error:  # noqa: BLE001 - as above
            event = PublishFailed(snapshot=snapshot, reason=_reason(error))
        self._send_event(event)
        if isinstance(event, Published) and task.retention is not None:
            self._clean_up(task, task.retention)

    def _clean_up(self, task: PersistTask, retention: Retention) -> None:
        """Remove older checkpoints, and now and then delete the bytes of those that were.

        What fails is tried again with the next checkpoint.
        """
        published = StoredStep(task.snapshot.step, task.generation)
        try:
            storage = open_storage(task.url)
            for stored in older_to_remove(list_steps(storage), published, retention):
                remove(storage, stored, now=time.time())
            if time.monotonic() >= self._garbage_due_s and not self._is_closing.is_set():
                self._garbage_due_s = time.monotonic() + _GARBAGE_EVERY_S
                collect_garbage(storage, now=time.time())
        except Exception as error:  # noqa: BLE001 - the thread's edge: the checkpoint is complete
            log.warning(
                "%s: older checkpoints than step %s are not removed as keep_last=%s says; it is "
                "tried again with the next one: %s",
                task.url,
                published.step,
                retention.last,
                _reason(error),
            )

    def _connect(self, address: str) -> SnapshotClient:
        return SnapshotClient(address, self._identity.secret, node=self._identity.node)


def _is_stored_by_this_run(task: PersistTask) -> bool:
    """Whether another attempt of the same run has committed the checkpoint.

    That is so if a leader was lost between the manifest and the coordinator. Otherwise another job
    stores under this URL, and what it has stored is not this job's state.
    """
    stored = StoredStep(task.snapshot.step, task.generation)
    try:
        storage = open_storage(task.url)
        manifest = StoredCheckpoint.open(storage, stored.step, stored.generation).manifest
    except CheckpointError:
        return False
    return _run_of(manifest.attempt) == _run_of(task.attempt)


def _run_of(attempt: str) -> str:
    """Return the run of the job that an attempt's name ends with."""
    return attempt.rpartition("-")[2]


def _attempt_of(task: PersistTask) -> Attempt:
    return Attempt(StoredStep(task.snapshot.step, task.generation), task.attempt)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else repr(error)
