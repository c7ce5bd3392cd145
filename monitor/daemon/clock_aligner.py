"""Measures the offsets of the nodes' clocks at intervals."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping

from keepstep.monitor.contracts import Alignment
from keepstep.monitor.daemon.threads import BlockingThread, WatchThread
from keepstep.monitor.records import JobRecords
from keepstep.monitor.telemetry.clocks import ClockOffset
from keepstep.monitor.tree.node_clocks import pause_s
from keepstep.monitor.watch.watch import Watch


class ClockAligner:
    """Measures clock offsets when they are due, or when the set of nodes has changed.

    Args:
        node: this node, whose clock is the job's.
        every_s: seconds between measurements, if all clocks can be measured.
        alignment: estimates the offsets.
        watch: holds the records.
        blocking: measures; for hundreds of nodes that takes a second, too long for the watch's
            thread.
        update: takes the offsets of all nodes.
    """

    def __init__(
        self,
        *,
        node: str,
        every_s: float,
        alignment: Alignment,
        watch: WatchThread,
        blocking: BlockingThread,
        update: Callable[[Mapping[str, ClockOffset]], Awaitable[None]],
    ) -> None:
        self._node = node
        self._every_s = every_s
        self._alignment = alignment
        self._watch = watch
        self._blocking = blocking
        self._update = update
        self._nodes: frozenset[str] = frozenset()
        self._due_s = 0.0

    async def run_if_due(self) -> None:
        """Measure the offsets and pass them on, unless that is not due."""
        loop = asyncio.get_running_loop()
        nodes = await self._watch.call(Watch.nodes_of_ranks)
        if nodes == self._nodes and loop.time() < self._due_s:
            return
        self._nodes = nodes
        job_and_reference = await self._watch.call(Watch.to_align)
        reference, measured, took_s = self._node, dict[str, ClockOffset](), 0.0
        if job_and_reference is not None:
            job, reference = job_and_reference
            measured, took_s = await self._measure(job, reference)
        clocks = await self._watch.call(lambda watch: watch.resolve_clocks(reference, measured))
        if not clocks:
            self._due_s = loop.time() + self._every_s
            return
        is_complete = job_and_reference is None or clocks.keys() <= {*measured, self._node}
        self._due_s = loop.time() + pause_s(self._every_s, took_s, is_complete=is_complete)
        await self._update(clocks)

    async def _measure(
        self, job: JobRecords, reference: str
    ) -> tuple[dict[str, ClockOffset], float]:
        """Return the offsets with a finite error, and the seconds that measuring took."""
        took_s = 0.0

        def align() -> JobRecords:
            nonlocal took_s
            began_s = time.monotonic()
            try:
                return self._alignment(job, reference)
            finally:
                took_s = time.monotonic() - began_s

        aligned = await self._blocking.call("alignment", align)
        all_records = aligned.ranks.values() if aligned is not None else ()
        measured = {
            records.node: ClockOffset(records.offset_s, records.offset_error_s)
            for records in all_records
            if math.isfinite(records.offset_error_s)
        }
        return measured, took_s
