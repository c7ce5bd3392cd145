"""Follows a running job: its coordinator's documents, and its ranks' records.

Every wait is for a condition. Its limit grows with the slowness of the machine: it is a multiple of
the time that the job itself took from its start to its first steps, measured again at every start.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from keepstep.elastic.cli.follow import views
from keepstep.elastic.errors import StoreUnavailable
from keepstep.elastic.rendezvous.view import Keys, View
from keepstep.elastic.store.address import parse_address
from keepstep.elastic.store.etcd import EtcdStore
from ops.bench.chaos.oracle import Line, parse_lines

_AGAIN_S = 0.2
_LEAST_LIMIT_S = 180.0
_STARTS = 10.0


class NoProgress(Exception):
    """A condition did not come to hold within the limit."""


class Patience:
    """How long to wait for the job, which depends on how slow the machine is."""

    def __init__(self) -> None:
        self.start_s = 0.0

    def measured(self, start_s: float) -> None:
        """Note how long a start of the job took."""
        self.start_s = max(self.start_s, start_s)

    def wait_until(
        self, what: str, condition: Callable[[], bool], *, beyond_s: float = 0.0
    ) -> float:
        """Wait until a condition holds; return how many seconds it took.

        Args:
            what: the condition in words.
            condition: asked several times a second.
            beyond_s: seconds for which it cannot hold.

        Raises:
            NoProgress: it did not hold in time.
        """
        begun_s = time.monotonic()
        while not condition():
            limit_s = max(_LEAST_LIMIT_S, _STARTS * self.start_s) + beyond_s
            if time.monotonic() > begun_s + limit_s:
                raise NoProgress(f"not within {limit_s:.0f} s: {what}")
            time.sleep(_AGAIN_S)
        return time.monotonic() - begun_s


class Records:
    """Reads the lines of all ranks; each line once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self._entries: dict[int, dict[int, list[Line]]] = {}
        """By `entered_ns` and step."""
        self.lines: list[Line] = []

    def read(self) -> list[Line]:
        """Return all lines so far."""
        for path in sorted(self._directory.glob("rank-*.jsonl")):
            with path.open() as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            for line in parse_lines(whole.splitlines(keepends=True)):
                self.lines.append(line)
                entry = self._entries.setdefault(line.entered_ns, {})
                entry.setdefault(line.step, []).append(line)
        return self.lines

    def newest_entry_ns(self) -> int:
        """Return the time of the newest entry into a generation; 0 before the first."""
        self.read()
        return max(self._entries, default=0)

    def last_step(self) -> int:
        """Return the last step that all ranks of the newest entry have recorded."""
        return self.completed_at(0.0, 0)[0]

    def completed_at(self, after_s: float, after_entry_ns: int) -> tuple[int, int]:
        """Return the newest step that all ranks have recorded, and its world size; (0, 0) for none.

        It is of the newest entry into a generation, if that was after `after_entry_ns`, and all its
        lines were written after `after_s`.
        """
        newest_ns = self.newest_entry_ns()
        if newest_ns <= after_entry_ns:
            return 0, 0
        entry = self._entries[newest_ns]
        for step in sorted(entry, reverse=True):
            lines = entry[step]
            if min(line.at_s for line in lines) <= after_s:
                break
            if len(lines) == lines[0].world_size:
                return step, len(lines)
        return 0, 0

    def longest_stall_s(self, since_s: float) -> float:
        """Return the longest time since a moment in which no step was completed by all ranks."""
        times = [since_s]
        for entry in self._entries.values():
            for lines in entry.values():
                at_s = max(line.at_s for line in lines)
                if at_s > since_s and len(lines) == lines[0].world_size:
                    times.append(at_s)
        return max((after - before for before, after in pairwise(sorted(times))), default=0.0)


class Watcher:
    """Keeps the newest view of the job's documents in a thread; use it as a context manager."""

    def __init__(self, url: str, job: str) -> None:
        self._url, self._keys = url, Keys(job)
        self.view = View()
        self.went_back: list[str] = []
        """Checkpoints that were published after a newer one of the same run of the job."""

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def restart(self) -> None:
        """Forget what is known: the coordinator is another one, at the same address."""
        self._end()
        self.view = View()
        self._start()

    def committed(self) -> int:
        """Return the step of the committed snapshot; 0 if there is none."""
        return self.view.snapshot.snapshot.step if self.view.snapshot is not None else 0

    def _start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._following = self._loop.create_task(self._follow())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._following.cancel)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._following)
        except asyncio.CancelledError:
            pass  # The context has ended.
        finally:
            self._loop.close()

    async def _follow(self) -> None:
        while True:
            try:
                client = await EtcdStore.connect(parse_address(self._url))
                try:
                    async for view in views(client, self._keys):
                        self._compare(view)
                        self.view = view
                finally:
                    await client.close()
            except StoreUnavailable:
                await asyncio.sleep(_AGAIN_S)

    def _compare(self, view: View) -> None:
        before, now = self.view, view
        if before.secret != now.secret or before.checkpoint is None or now.checkpoint is None:
            return
        # Generation 0: one that the job has resumed from, as a newer one is damaged.
        if now.checkpoint.step < before.checkpoint.step and now.checkpoint.generation:
            self.went_back.append(
                f"checkpoint {now.checkpoint.step} published after {before.checkpoint.step}"
            )
