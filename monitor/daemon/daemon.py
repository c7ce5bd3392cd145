"""Runs the monitor daemon: reads rings, polls children, diagnoses, publishes, serves.

One daemon on each node reads that node's rings. A daemon with children polls them for changes; in a
tree of daemons (nodes under racks under a root) the work of each process is proportional to the
number of its children. The root diagnoses. The daemon affects the job only through the actions of
its policy, which the job's own runtime carries out. It opens nothing of the job's for writing, so
it may crash, hang and be restarted at any time.

The daemon owns two threads (`keepstep.monitor.daemon.threads`), its HTTP server and client, the
event file and the state file; `run` closes them all.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from keepstep.monitor.contracts import JobStatus
from keepstep.monitor.daemon.clock_aligner import ClockAligner
from keepstep.monitor.daemon.connection_limits import ConnectionLimits
from keepstep.monitor.daemon.otlp_export import OtlpExporter
from keepstep.monitor.daemon.runtime_link import RuntimeLink
from keepstep.monitor.daemon.settings import DaemonComponents, Settings
from keepstep.monitor.daemon.threads import BlockingThread, WatchThread
from keepstep.monitor.daemon.webhook import Webhook
from keepstep.monitor.diagnosis.policy import EnforcementAction
from keepstep.monitor.errors import MonitorError, MonitorUnreachable, ProtocolViolation
from keepstep.monitor.node.stacks import StackDumps
from keepstep.monitor.telemetry.clocks import ClockOffset
from keepstep.monitor.tree.child_registry import Cursor
from keepstep.monitor.tree.children import Children
from keepstep.monitor.tree.step_records import NO_RECORDS, merge_steps, with_missing
from keepstep.monitor.tree.summary import Summary
from keepstep.monitor.views.events import (
    Event,
    EventFile,
    EventSink,
    action_event,
    closed_event,
    note_event,
    opened_event,
    resource_of,
    stacks_event,
)
from keepstep.monitor.views.pages import no_ranks_text
from keepstep.monitor.views.service import application
from keepstep.monitor.watch.diagnosis_rounds import DiagnosisRound
from keepstep.monitor.watch.job_events import JobEvent
from keepstep.monitor.watch.state_file import SavedState, load_state, save_state
from keepstep.monitor.watch.verdict_log import HANGS, VerdictEntry
from keepstep.monitor.watch.verdict_notes import NoteRequest, VerdictNote
from keepstep.monitor.watch.watch import Watch

_LOG = logging.getLogger("keepstep.monitor")
_Result = TypeVar("_Result")
_JOB_STATUS_EVERY_S = 2.0
_RANKS_TO_DUMP = 4
"""Stacks to dump for one verdict: the root of a hang is one rank or two; more add no
information."""


class Daemon:
    """One monitor daemon. `run` returns when it is cancelled or `stop` was called."""

    def __init__(self, settings: Settings, components: DaemonComponents) -> None:
        self.job = settings.job
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The URL that the daemon serves, once it does."""
        self._settings = settings
        self._components = components
        saved = load_state(settings.state, time.monotonic(), time.time())
        watch = Watch(
            settings.node,
            components.reader,
            components.probe,
            components.diagnosis,
            settings.limits,
            saved.log,
        )
        self._faults = watch.component_faults
        self._watch_thread = WatchThread(watch)
        self._blocking_thread = BlockingThread(self._faults)
        self._runtime = RuntimeLink(
            self.job, components, saved.policy, self._blocking_thread, self._record_action
        )
        self._dumps: set[asyncio.Task[None]] = set()
        self._stack_dumps = StackDumps()
        # By node: a node refuses more than a few dumps at a time, and verdicts come all at once.
        self._dump_turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._stopped = asyncio.Event()
        self._event_sinks: list[EventSink] = []
        self._resource = resource_of(settings.job, settings.node)

    async def run(self) -> None:
        """Serve until `stop`.

        Raises:
            MonitorError: the daemon cannot listen on its address, open the event file, or read a
                certificate.
        """
        async with AsyncExitStack() as owned:
            owned.callback(self._watch_thread.shutdown)
            owned.callback(self._blocking_thread.shutdown)
            owned.push_async_callback(self._close_components)
            if self._settings.events is not None:
                file = EventFile(self._settings.events)
                self._event_sinks.append(file)
                owned.callback(file.close)
            pushers = self._pushers(owned)
            self._children = Children(self._settings.secret)
            owned.push_async_callback(self._children.close)
            owned.push_async_callback(self._stack_dumps.close)
            await self.on_watch(Watch.read)
            self.address.set_result(await self._serve(owned))
            await self._log_if_no_ranks()
            async with asyncio.TaskGroup() as group:
                pushing = [pusher.run() for pusher in pushers]
                loops = [group.create_task(loop) for loop in (*self._loops(), *pushing)]
                await self._stopped.wait()
                for task in (*loops, *self._dumps):
                    task.cancel()
                await asyncio.gather(*self._dumps, return_exceptions=True)

    def stop(self) -> None:
        """Make `run` return."""
        self._stopped.set()

    @property
    def job_status(self) -> JobStatus | None:
        """The last status of the job's runtime."""
        return self._runtime.job_status

    @property
    def events(self) -> Sequence[JobEvent]:
        """Events of the job since the daemon started, oldest first."""
        return tuple(self._runtime.events)

    def recorded(self) -> Sequence[str]:
        """Return the jobs that are recorded on this node."""
        return self._components.recorded()

    def other_pages(self) -> Mapping[str, str]:
        """Return the pages of other jobs' monitors on this node, by job."""
        return {
            monitor.job: monitor.url
            for monitor in self._components.monitors()
            if monitor.diagnoses and monitor.job != self.job
        }

    async def on_watch(self, function: Callable[[Watch], _Result]) -> _Result:
        """Return the result of a function of the watch, called on the watch's thread."""
        return await self._watch_thread.call(function)

    async def stacks(self, rank: int) -> dict[str, Any]:
        """Return the stacks of a rank on this node, or from the child that has it."""
        pid, url = await self.on_watch(lambda watch: watch.locate_rank(rank))
        if pid is not None:
            return await self._stack_dumps.dump(pid)
        if url is not None:
            return await self._children.stacks(url, rank)
        return {"error": f"rank {rank} is not known to this daemon or its children"}

    async def steps(self, first: int, last: int) -> Summary:
        """Return the records of steps `first` to `last` of all ranks, here and at the children."""
        reader = self._components.reader
        readings = () if reader is None else await asyncio.to_thread(reader.read_all)
        own = await self.on_watch(lambda watch: watch.steps(readings, first, last))
        urls = tuple(self._components.children())
        below = await asyncio.gather(*(self._steps_of(url, first, last) for url in urls))
        return await asyncio.to_thread(merge_steps, [own, *below])

    async def note_verdict(self, number: int, request: NoteRequest) -> VerdictNote | None:
        """Record a person's note on a verdict; return it, None if it ends one.

        Raises:
            KeyError: no verdict of this number holds, nor is one muted.
        """
        note = await self.on_watch(lambda watch: watch.note_verdict(number, request))
        self._write_event(note_event(number, note, time.time(), self._resource))
        text = "its note is removed" if note is None else note.text
        _LOG.info("verdict %d: %s", number, text)
        self._runtime.events.append(JobEvent(time.time(), f"verdict #{number}", text))
        await self._save_state()
        return note

    async def update_clocks(self, clocks: Mapping[str, ClockOffset]) -> None:
        """Set the offsets of nodes' clocks, and send them to the children."""
        await self.on_watch(lambda watch: watch.set_clocks(clocks))
        nodes_of_children = await self.on_watch(lambda watch: watch.child_registry.nodes())
        await asyncio.gather(*(
            self._send_clocks(url, {node: clocks[node] for node in nodes if node in clocks})
            for url, nodes in nodes_of_children.items()
        ))  # fmt: skip

    def _loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return what the daemon does at intervals."""
        settings, components = self._settings, self._components
        loops = [
            _every(settings.read_every_s, self._guarded("reading", self._read)),
            _every(settings.diagnose_every_s, self._guarded("diagnosis", self._diagnose)),
            _every(settings.poll_every_s, self._poll_children),
        ]
        if components.alignment is not None and components.diagnosis is not None:
            aligner = ClockAligner(
                node=settings.node,
                every_s=settings.align_every_s,
                alignment=components.alignment,
                watch=self._watch_thread,
                blocking=self._blocking_thread,
                update=self.update_clocks,
            )
            align = self._guarded("clocks", aligner.run_if_due)
            loops.append(_every(settings.poll_every_s, align))
        if components.job_status_source is not None:
            loops.append(_every(_JOB_STATUS_EVERY_S, self._runtime.refresh_status))
        return loops

    def _pushers(self, owned: AsyncExitStack) -> Sequence[OtlpExporter | Webhook]:
        """Return what pushes telemetry and verdicts to other programs."""
        settings = self._settings
        pushers: list[OtlpExporter | Webhook] = []
        if settings.otlp is not None:
            pushers.append(OtlpExporter(settings.otlp, self, settings.node, self._faults))
        if settings.webhook is not None:
            pushers.append(Webhook(settings.webhook, self._faults))
        for pusher in pushers:
            self._event_sinks.append(pusher)
            owned.push_async_callback(pusher.close)
        return pushers

    async def _serve(self, owned: AsyncExitStack) -> str:
        """Start the HTTP server; return its URL."""
        settings = self._settings
        limits = ConnectionLimits()
        served = application(
            self,
            settings.secret,
            opens_to_loopback=settings.opens_to_loopback,
            on_authorized=limits.admit,
        )
        runner = web.AppRunner(served, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        owned.push_async_callback(runner.cleanup)
        connections = runner.server
        assert connections is not None, "a runner that was set up has one"
        try:
            server = await asyncio.get_running_loop().create_server(
                lambda: limits.accept(connections()), settings.host, settings.port
            )
        except OSError as error:
            remedy = (
                "; another monitor may run here: give this one another --port"
                if error.errno == errno.EADDRINUSE
                else ""
            )
            raise MonitorError(
                f"cannot listen on {settings.host}:{settings.port}: {error}{remedy}"
            ) from error
        owned.callback(server.close)
        host, port = server.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _log_if_no_ranks(self) -> None:
        if self._components.reader is not None and not await self.on_watch(Watch.nodes_of_ranks):
            _LOG.info(no_ranks_text(self.job, self.recorded()))

    def _guarded(
        self, component: str, work: Callable[[], Awaitable[None]]
    ) -> Callable[[], Awaitable[None]]:
        """Return the work, but so that a failure is recorded and the next turn is taken."""

        async def guarded() -> None:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - the other components must go on
                self._faults.record(component, error)

        return guarded

    async def _read(self) -> None:
        await self.on_watch(Watch.read)

    async def _diagnose(self) -> None:
        """Diagnose; write, publish and act on the outcome."""
        diagnosis_round = await self.on_watch(_digest_and_diagnose)
        if diagnosis_round is None:
            return
        changes = diagnosis_round.changes
        for entry in changes.opened:
            is_muted = diagnosis_round.is_muted(entry.verdict)
            self._write_event(opened_event(entry, self._resource), alerts=not is_muted)
            if entry.verdict.syndrome in HANGS:
                task = asyncio.create_task(self._record_stacks(entry))
                self._dumps.add(task)
                task.add_done_callback(self._dumps.discard)
        for entry in changes.closed:
            is_muted = diagnosis_round.is_muted(entry.verdict)
            self._write_event(closed_event(entry, self._resource), alerts=not is_muted)
        if changes.opened or changes.closed:
            await self._save_state()
        if await self._runtime.handle(diagnosis_round):
            await self._save_state()

    def _record_action(self, action: EnforcementAction, outcome: str) -> None:
        self._write_event(action_event(action, outcome, time.time(), self._resource))

    def _write_event(self, event: Event, *, alerts: bool = True) -> None:
        """Write to the event file, and push. A failure is counted: log and page remain.

        Args:
            event: to write.
            alerts: whether people are alerted, by the webhook.
        """
        for sink in self._event_sinks:
            if not alerts and isinstance(sink, Webhook):
                continue
            try:
                sink.write(event)
            except OSError as error:
                self._faults.record("event file", error)

    async def _poll_children(self) -> None:
        """Request the changes of every child, all at once."""
        urls = tuple(self._components.children())
        await self.on_watch(lambda watch: watch.release(urls))
        ranks = round(self._settings.record_ranks_per_s * self._settings.poll_every_s)
        cursors = await self.on_watch(lambda watch: watch.child_registry.cursors(urls, ranks))
        await asyncio.gather(*(self._poll_child(url, cursors[url]) for url in urls))

    async def _poll_child(self, url: str, cursor: Cursor) -> None:
        try:
            summary = await self._children.summary(url, cursor, self._settings.budget)
            await self.on_watch(lambda watch: watch.receive(url, summary))
        except (MonitorUnreachable, ProtocolViolation) as error:
            reason = str(error)
            await self.on_watch(lambda watch: watch.record_failure(url, reason))
        except Exception as error:  # noqa: BLE001 - one child's summary must not end the tree
            self._faults.record(f"child at {url}", error)
            await self.on_watch(
                lambda watch: watch.record_failure(url, "its summary could not be merged; see log")
            )

    async def _steps_of(self, url: str, first: int, last: int) -> Summary:
        """Return a child's records of some steps; if it does not answer, none and the reason."""
        try:
            summary = await self._children.steps(url, first, last)
            return replace(summary, missing=with_missing(summary, url))
        except (MonitorUnreachable, ProtocolViolation) as error:
            return replace(NO_RECORDS, missing={url: str(error)})

    async def _send_clocks(self, url: str, clocks: Mapping[str, ClockOffset]) -> None:
        try:
            await self._children.send_clocks(url, clocks)
        except (MonitorUnreachable, ProtocolViolation) as error:
            # The child is polled every second, and that records it as missing.
            _LOG.debug("clock offsets not sent: %s", error)

    async def _record_stacks(self, entry: VerdictEntry) -> None:
        """Dump the stacks of a verdict's suspects while they hang."""
        for rank in entry.verdict.subject.ranks[:_RANKS_TO_DUMP]:
            async with self._dump_turns[entry.verdict.subject.node]:
                stacks = await self.stacks(rank)
            await self.on_watch(
                partial(Watch.record_stacks, number=entry.number, rank=rank, stacks=stacks)
            )
            self._write_event(stacks_event(entry, rank, stacks, time.time(), self._resource))
        await self._save_state()

    async def _save_state(self) -> None:
        path, policy = self._settings.state, self._runtime.policy_state
        if path is None:
            return

        def save(watch: Watch) -> None:
            self._faults.guard(
                "state file",
                lambda: save_state(
                    path, SavedState(watch.log, policy), time.monotonic(), time.time()
                ),
                None,
            )

        await self.on_watch(save)

    async def _close_components(self) -> None:
        await self.on_watch(Watch.close)
        await self._runtime.close()


async def _every(period_s: float, work: Callable[[], Awaitable[None]]) -> None:
    """Call a function at a steady pace; missed calls are not made up for."""
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    while True:
        await work()
        due_s = max(due_s + period_s, loop.time())
        await asyncio.sleep(due_s - loop.time())


def _digest_and_diagnose(watch: Watch) -> DiagnosisRound | None:
    watch.digest()
    return watch.diagnose()
