"""All rings of one job on this node, as the monitor reads them again and again.

What an earlier launch of the same name, or an earlier generation, has left and nobody has replaced lies beside the rings of the present
one: ranks that exist no more, with later steps perhaps, and with a higher generation if that launch was restarted more often. The ring
that was created last tells them apart. It is of the present launch, and so are those of its generation and number of ranks whose
processes were alive when its own process started: a launcher starts a node's workers at once, and whatever it replaced was dead by
then. A worker that died later, or all of them, stay in sight. Of when a process died its ring tells little: not before its last record.
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
    """Keeps the job's rings open; finds new ones and those that were replaced.

    Args:
        directory: where the job's rings lie; `keepstep.monitor.telemetry.ring_files.job_directory`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._readers: dict[Path, RingReader] = {}
        self._present: list[RingReader] = []
        self._refused: dict[Path, int] = {}

    def read(self, count: int) -> JobRecords:
        """Return the last `count` records of each lane of each rank of the present launch and generation."""
        self._refresh()
        self._present = []
        # Where the directory outlives a restart of the node, so do rings that were created later than now.
        rings = [
            reader for reader in self._readers.values() if reader.created_s <= time.monotonic()
        ]
        newest = max(rings, key=lambda reader: reader.created_s, default=None)
        ranks: dict[int, RankRecords] = {}
        communicators: dict[int, Communicator] = {}
        for reader in rings:
            if newest is None or not _are_of_one_launch(reader.identity, newest.identity):
                continue
            # In this order: a process that was dead before its records were read tells nothing more.
            is_alive = reader.is_alive()
            records = reader.last(count)
            if not is_alive and _last_alive_s(reader, records) < newest.process_started_s:
                continue
            self._present.append(reader)
            ranks[reader.identity.rank] = RankRecords(
                reader.identity.rank,
                reader.identity.node,
                records,
                time.monotonic(),
                is_alive,
                reader.ending,
            )
            communicators |= reader.communicators()
        return JobRecords(ranks, communicators)

    def processes(self) -> dict[int, int]:
        """Return the process id of each rank, as of the last `read`."""
        return {reader.identity.rank: reader.process for reader in self._present}

    def incarnations(self) -> dict[int, str]:
        """Return for each rank what tells its ring from the one that the same rank had before."""
        return {
            reader.identity.rank: f"{reader.process}-{reader.process_started}-{reader.created_s:.6f}"
            for reader in self._present
        }

    def created_s(self) -> dict[int, float]:
        """Return when each rank's ring was created, in monotonic seconds."""
        return {reader.identity.rank: reader.created_s for reader in self._present}

    def generation(self) -> int:
        """Return the generation of the rings that were read last; 0 if there are none, or nobody counts generations."""
        return self._present[0].identity.generation if self._present else 0

    def world_size(self) -> int:
        """Return the number of ranks that the rings that were read last tell; 0 if there are none, or they do not know."""
        return self._present[0].identity.world_size if self._present else 0

    def close(self) -> None:
        """Let all rings go."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._present.clear()

    def _refresh(self) -> None:
        paths = ring_paths(self.directory)
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
                # Said once for each file, though it is tried again; the other ranks are read all the same.
                if self._refused.get(path) != inode:
                    self._refused[path] = inode
                    _log.warning("%s", error)
                self._readers.pop(path, None)
            if known is not None:
                known.close()


def _are_of_one_launch(one: WorkerIdentity, other: WorkerIdentity) -> bool:
    """Return whether generation and number of ranks agree, where both are known; who lives through generations leaves a ring for each."""
    sizes = {one.world_size, other.world_size} - {0}
    return one.generation == other.generation and len(sizes) <= 1


def _last_alive_s(reader: RingReader, records: Records) -> float:
    """Return when, at least, a process was still alive, in monotonic seconds."""
    times = (
        [float(records[name].max()) for name in ("enqueued_s", "ended_s")] if len(records) else []
    )
    return max([reader.created_s, *times])
