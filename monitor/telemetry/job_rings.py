"""Reads all rings of one job on this node, repeatedly, and selects those of the current launch.

Rings of an earlier launch of the same name, or of an earlier generation, remain next to the current
ones until they are replaced. Their ranks no longer exist, but may have later steps, and a higher
generation if that launch was restarted more often. The ring that was created last identifies the
current launch: it belongs to it, and so do the rings of the same generation and number of ranks
whose processes were alive when its process started. A launcher starts all workers of a node at
once, and the processes that it replaced were dead by then. Workers that died later, even all of
them, are included. A ring gives only a bound on when its process died: not before its last record.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from keepstep.monitor.errors import RingUnreadable
from keepstep.monitor.records import Communicator, JobRecords, RankRecords
from keepstep.monitor.telemetry.ring import WorkerIdentity
from keepstep.monitor.telemetry.ring_files import ring_paths
from keepstep.monitor.telemetry.ring_reader import Records, RingReader

_log = logging.getLogger(__name__)


class JobRings:
    """Keeps the job's rings open; opens new and replaced ones.

    Args:
        directory: the job's, from `keepstep.monitor.telemetry.ring_files.job_directory`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._readers: dict[Path, RingReader] = {}
        self._present: list[RingReader] = []
        self._refused: dict[Path, int] = {}

    def read(self, count: int) -> JobRecords:
        """Return the last `count` records of each lane of each rank of the current launch."""
        self._refresh()
        self._present = []
        # If the directory outlives a reboot of the node, it holds rings whose creation time is in
        # the future of the new monotonic clock.
        rings = [
            reader for reader in self._readers.values() if reader.created_s <= time.monotonic()
        ]
        newest = max(rings, key=lambda reader: reader.created_s, default=None)
        ranks: dict[int, RankRecords] = {}
        communicators: dict[int, Communicator] = {}
        for reader in rings:
            if newest is None or not _are_of_one_launch(reader.identity, newest.identity):
                continue
            try:
                # In this order: a process that was dead before its records were read adds no more.
                is_alive = reader.is_alive()
                records = reader.last(count)
                if not is_alive and _last_alive_s(reader, records) < newest.process_started_s:
                    continue
                ending, groups = reader.ending, reader.communicators()
            except RingUnreadable as error:
                self._refuse(reader.path, reader.inode, error)
                continue
            self._present.append(reader)
            ranks[reader.identity.rank] = RankRecords(
                rank=reader.identity.rank,
                node=reader.identity.node,
                records=records,
                read_at_s=time.monotonic(),
                is_alive=is_alive,
                ending=ending,
            )
            communicators |= groups
        return JobRecords(ranks, communicators)

    def processes(self) -> dict[int, int]:
        """Return the process id of each rank, as of the last `read`."""
        return {reader.identity.rank: reader.process for reader in self._present}

    def incarnations(self) -> dict[int, str]:
        """Return for each rank a text that differs between successive rings of the rank."""
        return {reader.identity.rank: _incarnation(reader) for reader in self._present}

    def created_s(self) -> dict[int, float]:
        """Return when each rank's ring was created, in monotonic seconds."""
        return {reader.identity.rank: reader.created_s for reader in self._present}

    def generation(self) -> int:
        """Return the generation of the rings read last; 0 if there are none, or it is not known."""
        return self._present[0].identity.generation if self._present else 0

    def world_size(self) -> int:
        """Return the job's number of ranks, from the rings read last; 0 if it is not known."""
        return self._present[0].identity.world_size if self._present else 0

    def close(self) -> None:
        """Close all rings."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._present.clear()

    def _refuse(self, path: Path, inode: int, error: Exception) -> None:
        """Log why a ring, or the directory, is not read: once, though reading is tried again."""
        if self._refused.get(path) != inode:
            self._refused[path] = inode
            _log.warning("%s", error)

    def _refresh(self) -> None:
        try:
            paths = ring_paths(self.directory)
        except RingUnreadable as error:
            self._refuse(self.directory, 0, error)
            paths = []
        for gone in self._readers.keys() - set(paths):
            self._readers.pop(gone).close()
        for path in paths:
            inode, known = -1, self._readers.get(path)
            try:
                inode = path.lstat().st_ino
                if known is not None and known.inode == inode:
                    continue
                self._readers[path] = RingReader(path)
                self._refused.pop(path, None)
            except FileNotFoundError:
                continue
            except (RingUnreadable, OSError) as error:
                # The other ranks are read.
                self._refuse(path, inode, error)
                self._readers.pop(path, None)
            if known is not None:
                known.close()


def _incarnation(reader: RingReader) -> str:
    return f"{reader.process}-{reader.process_started}-{reader.created_s:.6f}"


def _are_of_one_launch(one: WorkerIdentity, other: WorkerIdentity) -> bool:
    """Return whether generations, and numbers of ranks where both are known, are equal.

    A process that survives several generations leaves a ring for each.
    """
    sizes = {one.world_size, other.world_size} - {0}
    return one.generation == other.generation and len(sizes) <= 1


def _last_alive_s(reader: RingReader, records: Records) -> float:
    """Return the latest known time at which a process was alive, in monotonic seconds."""
    times = (
        [float(records[name].max()) for name in ("enqueued_s", "ended_s")] if len(records) else []
    )
    return max([reader.created_s, *times])
