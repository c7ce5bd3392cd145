"""The daemons below one of the tree: where to go on asking each, whom each told of, and which do not answer."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.monitor.errors import MonitorError
from keepstep.monitor.tree.summary import Summary


@dataclass(slots=True)
class _ChildRecord:
    """What a daemon told: where to go on, its ranks and nodes, and when it last answered."""

    incarnation: str = ""
    number: int = 0
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    answered_at_s: float = float("-inf")


class ChildRegistry:
    """See the module. Daemons are known by their URLs."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}
        """Daemons that do not answer, or not as they should, with the reason; those further down are named by the way to them."""
        self._known: dict[str, _ChildRecord] = {}

    def cursor(self, url: str) -> tuple[str, int]:
        """Return what to ask a daemon for: news since which number, if it still is that incarnation."""
        known = self._known.setdefault(url, _ChildRecord())
        return known.incarnation, known.number

    def record_answer(self, url: str, summary: Summary, ranks: Sequence[int], now_s: float) -> bool:
        """Note that a daemon answered, and which ranks are its own; return whether it is the one that answered before."""
        known = self._known.setdefault(url, _ChildRecord())
        is_same = known.incarnation == summary.incarnation
        self._found(url)
        self.missing.update({f"{url}, {name}": reason for name, reason in summary.missing.items()})
        nodes = tuple(facts.node for facts in summary.nodes)
        self._known[url] = _ChildRecord(
            summary.incarnation, summary.number, tuple(ranks), nodes, now_s
        )
        return is_same

    def record_failure(self, url: str, reason: str) -> None:
        """Note that a daemon did not answer."""
        self.missing[url] = reason
        self._known.setdefault(url, _ChildRecord())

    def release(self, urls: Sequence[str]) -> set[str]:
        """Forget the daemons that are not among `urls`, and return them."""
        gone = set(self._known) - set(urls)
        for url in gone:
            del self._known[url]
            self._found(url)
        return gone

    def nodes(self) -> dict[str, tuple[str, ...]]:
        """Return each daemon's nodes."""
        return {url: known.nodes for url, known in self._known.items()}

    def active_since(self, since_s: float) -> tuple[set[int], set[str]]:
        """Return the ranks and the nodes of those that have answered since then."""
        known = [one for one in self._known.values() if one.answered_at_s > since_s]
        return {rank for one in known for rank in one.ranks}, {
            node for one in known for node in one.nodes
        }

    def url_of_rank(self, rank: int) -> str | None:
        """Return the daemon that told of a rank; None if none did."""
        return next((url for url, known in self._known.items() if rank in known.ranks), None)

    def _found(self, url: str) -> None:
        for old in [name for name in self.missing if name == url or name.startswith(f"{url}, ")]:
            del self.missing[old]


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
                _LOG.warning(
                    "--children-file %s cannot be read (%s); its last good list holds on",
                    self._path,
                    error,
                )
        return self._urls

    def _read(self) -> tuple[str, ...]:
        lines = [
            line.partition("#")[0].strip()
            for line in self._path.read_text(encoding="utf-8").splitlines()
        ]
        return tuple(line for line in lines if line)
