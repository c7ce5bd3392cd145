"""The file with the daemons to gather from, which may be changed while the daemon above them runs."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from monitor.errors import MonitorError

_LOG = logging.getLogger("keepstep.monitor")


class ChildrenFile:
    """URLs, one a line; `#` begins a comment. What cannot be read later is said, and the last good list holds.

    Raises:
        MonitorError: it cannot be read now.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Of what was read last, or could not be: the change time also tells of new permissions.
        self._seen: tuple[int, int, int] | None = None
        self._said = ""
        try:
            self._urls = self._read()
        except (OSError, UnicodeDecodeError) as error:
            raise MonitorError(f"--children-file {path} cannot be read: {error}") from error

    def urls(self) -> tuple[str, ...]:
        """Return the list, read again if the file has changed."""
        try:
            status = os.stat(self._path)
            seen = (status.st_ino, status.st_size, status.st_ctime_ns)
            if seen != self._seen:
                self._seen, self._said = seen, ""
                self._urls = self._read()
        except FileNotFoundError:
            pass  # Being replaced.
        except (OSError, UnicodeDecodeError) as error:
            if str(error) != self._said:
                self._said = str(error)
                _LOG.warning("--children-file %s cannot be read (%s); its last good list holds on", self._path, error)
        return self._urls

    def _read(self) -> tuple[str, ...]:
        lines = [line.partition("#")[0].strip() for line in self._path.read_text(encoding="utf-8").splitlines()]
        return tuple(line for line in lines if line)
