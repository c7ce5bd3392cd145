"""Follows a running job: its coordinator's documents, and what its ranks have recorded.

Waiting is for a condition. Its limit grows with the slowness of the machine: it is a multiple of
the time that the job itself took from its start to its first steps, measured anew at every start.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
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
        self.lines: list[Line] = []

    def read(self) -> list[Line]:
        """Return all lines so far."""
        for path in sorted(self._directory.glob("rank-*.jsonl")):
            with path.open() as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            self.lines += parse_lines(whole.splitlines(keepends=True))
        return self.lines

    def newest_entry_ns(self) -> int:
        """Return the time of the newest entry into a generation; 0 before the first."""
        return max((line.entered_ns for line in self.read()), default=0)

    def last_step(self) -> int:
        """Return the last step that all ranks of the newest entry have recorded."""
        return self.completed_at(0.0, 0)[0]

    def completed_at(self, after_s: float, after_entry_ns: int) -> tuple[int, float, int]:
        """Return the newest completed step, when it was first completed, and its world size.

        Only lines that were written after `after_s`, in entries after `after_entry_ns`, count; of
        these the time of the first completed step is returned. (0, 0.0, 0) if there is none.
        """
        found = [
            line for line in self.read() if line.at_s > after_s and line.entered_ns > after_entry_ns
        ]
        if not found:
            return 0, 0.0, 0
        newest_ns = max(line.entered_ns for line in found)
        whole: dict[tuple[int, int], list[Line]] = {}
        for line in found:
            whole.setdefault((line.entered_ns, line.step), []).append(line)
        completed = {
            key: max(line.at_s for line in lines)
            for key, lines in whole.items()
            if len(lines) == lines[0].world_size
        }
        newest = [step for entered_ns, step in completed if entered_ns == newest_ns]
        if not newest:
            return 0, 0.0, 0
        step = max(newest)
        return step, min(completed.values()), whole[newest_ns, step][0].world_size


class Watcher:
    """Keeps the newest view of the job's documents in a thread; use it as a context manager."""

    def __init__(self, url: str, job: str) -> None:
        self._url, self._keys = url, Keys(job)
        self._loop = asyncio.new_event_loop()
        self._following = self._loop.create_task(self._follow())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.view = View()
        self.went_back: list[str] = []
        """Checkpoints that were published after a newer one of the same run of the job."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._following.cancel)
        self._thread.join(30)

    def committed(self) -> int:
        """Return the step of the committed snapshot; 0 if there is none."""
        return self.view.snapshot.snapshot.step if self.view.snapshot is not None else 0

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
        if now.checkpoint.step < before.checkpoint.step:
            self.went_back.append(
                f"checkpoint {now.checkpoint.step} published after {before.checkpoint.step}"
            )
