"""Tracks a daemon's children in the tree: which URLs to query, and what each child reported.

`ChildrenFile` reads the URLs from a file that an operator maintains. `ChildRegistry` holds, for
each child, where to continue, its ranks and nodes, and why it does not answer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from keepstep.monitor.errors import MonitorError
from keepstep.monitor.tree.summary import Summary

_LOG = logging.getLogger("keepstep.monitor")


class ChildrenFile:
    """Reads children's URLs from a file: one a line; `#` begins a comment.

    If the file becomes unreadable later, that is logged once and the last valid list remains.

    Raises:
        MonitorError: it cannot be read at the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Of the last attempt to read it. The change time also shows new permissions.
        self._last_status: tuple[int, int, int] | None = None
        self._logged_error = ""
        try:
            self._urls = self._read()
        except (OSError, UnicodeDecodeError) as error:
            raise MonitorError(f"--children-file {path} cannot be read: {error}") from error

    def urls(self) -> tuple[str, ...]:
        """Return the list, read again if the file has changed."""
        try:
            stat = os.stat(self._path)
            status = (stat.st_ino, stat.st_size, stat.st_ctime_ns)
            if status != self._last_status:
                self._last_status, self._logged_error = status, ""
                self._urls = self._read()
        except FileNotFoundError:
            pass  # It is being replaced.
        except (OSError, UnicodeDecodeError) as error:
            if str(error) != self._logged_error:
                self._logged_error = str(error)
                _LOG.warning(
                    "--children-file %s cannot be read (%s); its last valid list remains in use",
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


_NEVER_S = float("-inf")
# Ranks that a child is taken to have until it has answered: those of eight nodes.
_RANKS_OF_A_CHILD = 64


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where to continue with a child.

    Attributes:
        incarnation: the child's; empty before its first answer.
        since: the number of this incarnation since which to request changes.
        records_since: the same for records; None to request none now.
    """

    incarnation: str
    since: int
    records_since: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChildRecord:
    """The last answer of a child: its incarnation and number, its ranks and nodes, and when.

    `records_number` and `records_at_s` are those of its last answer with records.
    """

    incarnation: str = ""
    number: int = 0
    records_number: int = 0
    records_at_s: float = _NEVER_S
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    answered_at_s: float = _NEVER_S


class ChildRegistry:
    """Holds the state of each child, by its URL."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}
        """Daemons that do not answer as they should, with the reason.

        Daemons further down are named by the URLs on the way to them.
        """
        self._children: dict[str, _ChildRecord] = {}
        self._url_of_rank: dict[int, str] = {}

    def cursors(self, urls: Sequence[str], record_ranks: int) -> dict[str, Cursor]:
        """Return where to continue with each child.

        Records are requested of at least one child and of about `record_ranks` ranks, first from
        those whose records are the oldest.
        """
        children = {url: self._children.setdefault(url, _ChildRecord()) for url in urls}
        left = record_ranks
        cursors: dict[str, Cursor] = {}
        for url in sorted(urls, key=lambda url: children[url].records_at_s):
            child = children[url]
            records_since = child.records_number if left > 0 else None
            left -= len(child.ranks) or _RANKS_OF_A_CHILD
            cursors[url] = Cursor(child.incarnation, child.number, records_since)
        return cursors

    def records_age_s(self, rank: int) -> float:
        """Return how much older the records of a rank are than its child's last answer."""
        child = self._children.get(self._url_of_rank.get(rank, ""))
        return child.answered_at_s - child.records_at_s if child is not None else 0.0

    def record_answer(self, url: str, summary: Summary, ranks: Sequence[int], now_s: float) -> bool:
        """Record an answer and the ranks accepted from it.

        Returns whether the child is the incarnation that answered before.
        """
        before = self._children.setdefault(url, _ChildRecord())
        is_same = before.incarnation == summary.incarnation
        self._clear_missing(url)
        self.missing.update({f"{url}, {name}": reason for name, reason in summary.missing.items()})
        accepted = tuple(ranks)
        if accepted != before.ranks:
            self._forget_ranks(url, before.ranks)
            self._url_of_rank.update(dict.fromkeys(accepted, url))
        self._children[url] = _ChildRecord(
            incarnation=summary.incarnation,
            number=summary.number,
            records_number=(
                summary.number if summary.has_records else before.records_number if is_same else 0
            ),
            records_at_s=(
                now_s if summary.has_records else before.records_at_s if is_same else _NEVER_S
            ),
            ranks=accepted,
            nodes=tuple(facts.node for facts in summary.nodes),
            answered_at_s=now_s,
        )
        return is_same

    def record_failure(self, url: str, reason: str) -> None:
        """Record that a child did not answer."""
        self.missing[url] = reason
        self._children.setdefault(url, _ChildRecord())

    def release(self, urls: Sequence[str]) -> set[str]:
        """Drop the children that are not among `urls`, and return them."""
        dropped = set(self._children) - set(urls)
        for url in dropped:
            self._forget_ranks(url, self._children.pop(url).ranks)
            self._clear_missing(url)
        return dropped

    def start_over(self, nodes: Collection[str]) -> None:
        """Request everything of the children that have these nodes, as if they had just begun."""
        for url, child in self._children.items():
            if not set(nodes).isdisjoint(child.nodes):
                self._children[url] = replace(child, incarnation="")

    def nodes(self) -> dict[str, tuple[str, ...]]:
        """Return each child's nodes."""
        return {url: child.nodes for url, child in self._children.items()}

    def active_since(self, since_s: float) -> tuple[set[int], set[str]]:
        """Return the ranks and the nodes of the children that have answered since then."""
        active = [child for child in self._children.values() if child.answered_at_s > since_s]
        ranks = {rank for child in active for rank in child.ranks}
        nodes = {node for child in active for node in child.nodes}
        return ranks, nodes

    def url_of_rank(self, rank: int) -> str | None:
        """Return the child that reported a rank, the last one if several did; None if none did."""
        return self._url_of_rank.get(rank)

    def _forget_ranks(self, url: str, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if self._url_of_rank.get(rank) == url:
                del self._url_of_rank[rank]

    def _clear_missing(self, url: str) -> None:
        for name in [name for name in self.missing if name == url or name.startswith(f"{url}, ")]:
            del self.missing[name]
