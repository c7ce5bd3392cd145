"""All rings of one job on this node, as the monitor reads them again and again."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from monitor.errors import RingUnreadable
from monitor.records import Communicator, JobRecords, RankRecords
from monitor.telemetry.ring_files import ring_paths
from monitor.telemetry.ring_reader import RingReader

_log = logging.getLogger(__name__)


class JobRings:
    """Keeps the job's rings open; finds new ones and those that were replaced.

    Args:
        directory: where the job's rings lie; `monitor.telemetry.ring_files.job_directory`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._readers: dict[Path, RingReader] = {}
        self._refused: dict[Path, int] = {}

    def read(self, count: int) -> JobRecords:
        """Return the last `count` records of each lane of each rank of the newest generation that has a ring here."""
        self._refresh()
        ranks: dict[int, RankRecords] = {}
        communicators: dict[int, Communicator] = {}
        for reader in self._newest():
            # In this order: a process that was dead before its records were read tells nothing more.
            is_alive = reader.is_alive()
            records = reader.last(count)
            ranks[reader.identity.rank] = RankRecords(
                reader.identity.rank, reader.identity.node, records, time.monotonic(), is_alive, reader.ending
            )
            communicators |= reader.communicators()
        return JobRecords(ranks, communicators)

    def processes(self) -> dict[int, int]:
        """Return the process id of each rank, as of the last `read`."""
        return {reader.identity.rank: reader.process for reader in self._newest()}

    def incarnations(self) -> dict[int, str]:
        """Return for each rank what tells its ring from the one that the same rank had before."""
        return {
            reader.identity.rank: f"{reader.process}-{reader.process_started}-{reader.created_s:.6f}"
            for reader in self._readers.values()
        }

    def generation(self) -> int:
        """Return the generation of the rings that were read last; 0 if there are none, or nobody counts generations."""
        return max((reader.identity.generation for reader in self._readers.values()), default=0)

    def close(self) -> None:
        """Let all rings go."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _newest(self) -> list[RingReader]:
        """Return the rings of the newest generation; a process that lives through several leaves one for each."""
        newest = self.generation()
        return [reader for reader in self._readers.values() if reader.identity.generation == newest]

    def _refresh(self) -> None:
        paths = ring_paths(self.directory)
        for gone in self._readers.keys() - set(paths):
            self._readers.pop(gone).close()
        for path in paths:
            try:
                inode = path.stat().st_ino
                known = self._readers.get(path)
                if (known is not None and known.inode == inode) or self._refused.get(path) == inode:
                    continue
                self._refused[path] = inode
                self._readers[path] = RingReader(path)
                del self._refused[path]
            except FileNotFoundError:
                continue
            except RingUnreadable as error:
                # Said once for each file; the other ranks are read all the same.
                _log.warning("%s", error)
                known = self._readers.pop(path, None)
            if known is not None:
                known.close()
