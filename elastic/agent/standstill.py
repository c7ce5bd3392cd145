"""Watches whether a node's workers go on, and takes their stacks if they stand still.

What is too long is decided in `keepstep.elastic.rendezvous.standstill`. The workers are not asked:
one that hangs in native code answers nobody. Their progress is in shared memory, and their stacks
are read from outside.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from typing import Any

import keepstep
from keepstep.elastic.agent.local_node import LocalNode
from keepstep.elastic.agent.supervisor import Worker
from keepstep.elastic.rendezvous.standstill import NodeProgress, overdue_at_s
from keepstep.monitor.node.stacks import dump

log = logging.getLogger("keepstep")

_FRAMES = 12
"""How much of a rank's stack a message has: the coordinator has to hold it."""
_RANKS_IN_SHORT = 8
_BELOW_SCRIPT = "(<frozen runpy>:"
"""Frames of the code that runs the script, which tell nothing; innermost frames come first."""
_LIBRARIES = tuple(
    {*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))}
    | {os.path.dirname(path) for path in keepstep.__path__}
)


class StandstillWatch:
    """Reports a standstill of one node's workers to their group; `close` ends what it began.

    Args:
        node: whose workers.
        wake: called once a standstill is recorded.
    """

    def __init__(self, node: LocalNode, wake: Callable[[], None]) -> None:
        self._node = node
        self._wake = wake
        self._warned: tuple[int, float] = (0, 0.0)
        self._examining: asyncio.Task[None] | None = None

    @property
    def due_s(self) -> float | None:
        """When to look again although nothing else happens, in monotonic seconds; None: never."""
        progress = self._node.worker_group.progress
        until_s = self._overdue_at_s(progress)
        if progress is None or until_s is None or self._examining is not None:
            return None
        is_warned = self._warned == (self._node.worker_group.generation, progress.progressed_s)
        return until_s if is_warned else until_s - self._limit_s / 2

    def follow(self) -> None:
        """Warn at half of the limit; at the limit, begin to take the stacks."""
        group, now_s = self._node.worker_group, time.monotonic()
        progress = group.progress
        until_s = self._overdue_at_s(progress)
        if progress is None or until_s is None or self._examining is not None:
            return
        place = (group.generation, progress.progressed_s)
        if now_s >= until_s:
            self._examining = asyncio.create_task(self._examine(place))
            self._examining.add_done_callback(self._end_examination)
        elif now_s >= until_s - self._limit_s / 2 and self._warned != place:
            self._warned = place
            log.warning(
                "no rank of this node has gone on for %s, after step %d; in %s the ranks are "
                "restarted from memory (--standstill-limit)",
                _minutes(now_s - progress.progressed_s),
                group.step,
                _minutes(until_s - now_s),
            )

    async def stacks_of(self, worker: Worker) -> str:
        """Return the stack of a worker's main thread as lines of text, or why it is not known."""
        _, text = _described(worker, await dump(worker.pid))
        return text

    async def close(self) -> None:
        """Stop taking stacks."""
        if self._examining is not None:
            self._examining.cancel()
            await asyncio.wait([self._examining])

    @property
    def _limit_s(self) -> float:
        return self._node.config.policy.standstill_s

    def _overdue_at_s(self, progress: NodeProgress | None) -> float | None:
        return None if progress is None else overdue_at_s(progress, self._limit_s)

    async def _examine(self, place: tuple[int, float]) -> None:
        """Take the stacks of all workers, and report the standstill if it still lasts then."""
        group = self._node.worker_group
        workers = list(group.workers.values())
        dumped = await asyncio.gather(*(dump(worker.pid) for worker in workers))
        progress = group.progress
        if progress is None or (group.generation, progress.progressed_s) != place:
            return
        found = [_described(*each) for each in zip(workers, dumped, strict=True)]
        short = "; ".join(place for place, _ in found[:_RANKS_IN_SHORT])
        stood = _minutes(time.monotonic() - progress.progressed_s)
        stacks = "\n".join(stack for _, stack in found)
        reason = f"no rank on {self._node.config.node} has gone on for {stood}, "
        message = f"{reason}after step {group.step}: {short}\n{stacks}"
        log.error("%s", message)
        group.stand_still(message)

    def _end_examination(self, task: asyncio.Task[None]) -> None:
        self._examining = None
        if not task.cancelled():
            task.result()
            self._wake()


def _described(worker: Worker, dumped: Mapping[str, Any]) -> tuple[str, str]:
    """Return where a worker stands, in short and with its stack."""
    rank, title = worker.rank, f"rank {worker.rank}, process {worker.pid}"
    threads = dumped.get("threads")
    if not threads:
        reason = dumped.get("error", "it has no Python thread")
        return f"rank {rank}: stack not known", f"{title}: stack not known: {reason}"
    main = next((each for each in threads if each["name"] == "MainThread"), threads[0])
    frames = list(takewhile(lambda frame: _BELOW_SCRIPT not in frame, main["frames"]))
    shown = "".join(f"\n    {frame}" for frame in frames[:_FRAMES])
    return f"rank {rank} in {_place(frames)}", f"{title}, stands at:{shown or ' no Python frame'}"


def _place(frames: Iterable[str]) -> str:
    """Return the innermost frame, and the innermost one of the user's own code."""
    innermost = own = ""
    for frame in frames:
        name, _, file = frame.partition(" (")
        innermost = innermost or f"{name} ({os.path.basename(file)}"
        if not own and not file.startswith((*_LIBRARIES, "<")):
            own = f"{name} ({os.path.basename(file)}"
    if not own or own == innermost:
        return innermost or "no Python frame"
    return f"{innermost}, from {own}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
