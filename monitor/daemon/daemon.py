"""The monitor daemon: reads, asks, concludes, tells; and touches the job only by what its policy asks of the job's own runtime.

One daemon a node reads that node's rings. Daemons given children ask them for what is new; a tree of them (nodes under racks
under a root) keeps what any one process handles in proportion to its children. The root diagnoses. It opens nothing of the
job's for writing, and the job knows nothing of it: it may crash, hang and come back at any time.

Owners: the daemon owns two threads (one for the watch, one for what may block: publisher, enforcer, job_status), its HTTP server and
client, the event file and the state file; `run` ends them all. Everything about the watch happens on the first thread, so it
needs no lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from keepstep.monitor.contracts import (
    Alignment,
    Diagnosis,
    Enforcer,
    JobReader,
    JobStatus,
    JobStatusSource,
    Probe,
    VerdictPublisher,
)
from keepstep.monitor.diagnosis.policy import (
    ActionKind,
    EnforcementAction,
    EnforcementPolicy,
    Mode,
    decide,
    revert_action,
)
from keepstep.monitor.diagnosis.subjects import begun_since, with_job_nodes
from keepstep.monitor.errors import (
    MonitorError,
    MonitorUnreachable,
    ProtocolViolation,
    RuntimeUnreachable,
)
from keepstep.monitor.node.stacks import dump
from keepstep.monitor.records import JobRecords
from keepstep.monitor.secret import is_loopback
from keepstep.monitor.tree.children import Children
from keepstep.monitor.tree.node_clocks import NodeClock, pause_s
from keepstep.monitor.verdicts import Verdict
from keepstep.monitor.views.events import EventFile
from keepstep.monitor.views.pages import no_ranks_text
from keepstep.monitor.views.service import application
from keepstep.monitor.watch.state_file import SavedState, load_state, save_state
from keepstep.monitor.watch.verdict_log import HANGS, VerdictEntry
from keepstep.monitor.watch.watch import DiagnosisRound, Watch, WatchLimits

_LOG = logging.getLogger("keepstep.monitor")
_Result = TypeVar("_Result")
_JOB_STATUS_EVERY_S = 2.0
_RANKS_TO_DUMP = 4
"""Of one verdict: a hang's root is one rank or two; more stacks say the same again."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a daemon runs.

    Args:
        job: the job's name.
        node: this node's name.
        secret: the job's secret.
        host: address to listen on.
        port: 0 for any.
        opens_to_loopback: whether requests from loopback need no token.
        read_every_s: seconds between readings.
        conclude_every_s: seconds between diagnoses.
        ask_every_s: seconds between asking the daemons below.
        align_every_s: seconds between measuring how far nodes' clocks are off each other; quartz drifts by a tenth of a millisecond meanwhile.
        budget: finished operations that a daemon below sends of each rank at a time, at most.
        events: file for events; None for none.
        state: file for what a restart must not lose; None for none.
        limits: what is kept.
    """

    job: str
    node: str
    secret: bytes
    host: str = "127.0.0.1"
    port: int = 0
    opens_to_loopback: bool = False
    read_every_s: float = 0.5
    conclude_every_s: float = 1.0
    ask_every_s: float = 1.0
    align_every_s: float = 10.0
    budget: int = 256
    events: Path | None = None
    state: Path | None = None
    limits: WatchLimits = field(default_factory=WatchLimits)


@dataclass(frozen=True, slots=True)
class DaemonComponents:
    """What a daemon is made of; it owns and closes them.

    Args:
        probe: measures the node.
        reader: this node's rings; None for a daemon that only hears others.
        diagnosis: None for one that only relays.
        alignment: of clocks.
        publisher: where verdicts go besides the event file.
        job_status_source: what the job's runtime knows.
        policy: what to do about verdicts; None for nothing.
        enforcer: who does it, other than telling people; None where there is only telling.
        children: URLs of the daemons below, asked for anew at every turn.
        recorded: the jobs that are recorded on this node, for whoever has the name wrong.
    """

    probe: Probe
    reader: JobReader | None = None
    diagnosis: Diagnosis | None = None
    alignment: Alignment | None = None
    publisher: VerdictPublisher | None = None
    job_status_source: JobStatusSource | None = None
    policy: EnforcementPolicy | None = None
    enforcer: Enforcer | None = None
    children: Callable[[], Sequence[str]] = tuple
    recorded: Callable[[], Sequence[str]] = tuple


class _RuntimeState(Enum):
    """How it stands with the job's own runtime."""

    ABSENT = "there is no such job there"
    UNREACHABLE = "it does not answer"
    PRESENT = "it tells of the job"


class Daemon:
    """See the module. `run` does everything and returns when it is cancelled or `stop` was called."""

    def __init__(self, settings: Settings, parts: DaemonComponents) -> None:
        if settings.opens_to_loopback and not is_loopback(settings.host):
            raise MonitorError(
                f"a page without token is for loopback only, not for {settings.host}; leave --host or --open-page away"
            )
        self.job = settings.job
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The URL it serves, once it does."""
        self._settings = settings
        self._parts = parts
        self._job_status: JobStatus | None = None
        self._runtime_state: _RuntimeState | None = None
        # As the runtime has them, of which generation: they hold on while it is away.
        self._places: tuple[int, Mapping[int, str]] = (0, {})
        # Nothing yet: what an earlier daemon published may not hold any more.
        self._told: tuple[int, tuple[Verdict, ...]] | None = None
        remembered = load_state(settings.state, time.monotonic(), time.time())
        self._policy_state = remembered.policy
        self._align_due_s = 0.0
        self._aligned: frozenset[str] = frozenset()
        self._dumping: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Event()
        self._events: EventFile | None = None
        self._watch_thread = ThreadPoolExecutor(1, "watch")
        self._blocking_thread = ThreadPoolExecutor(1, "talk")
        self._watch = Watch(
            settings.node,
            parts.reader,
            parts.probe,
            parts.diagnosis,
            settings.limits,
            remembered.log,
        )

    async def run(self) -> None:
        """Serve until `stop`.

        Raises:
            MonitorError: the address cannot be listened on.
        """
        async with AsyncExitStack() as owned:
            owned.callback(self._watch_thread.shutdown)
            owned.callback(self._blocking_thread.shutdown)
            owned.push_async_callback(self._close_parts)
            if self._settings.events is not None:
                self._events = EventFile(self._settings.events, self.job, self._settings.node)
                owned.callback(self._events.close)
            self._children = Children(self._settings.secret)
            owned.push_async_callback(self._children.close)
            await self.on_watch(Watch.read)
            address = await self._serve(owned)
            self.address.set_result(address)
            if self._parts.reader is not None and not await self.on_watch(Watch.nodes_of_ranks):
                _LOG.info(no_ranks_text(self.job, self.recorded()))
            async with asyncio.TaskGroup() as tasks:
                loops = [
                    tasks.create_task(self._every(self._settings.read_every_s, self._read)),
                    tasks.create_task(self._every(self._settings.conclude_every_s, self._conclude)),
                    tasks.create_task(self._every(self._settings.ask_every_s, self._ask_children)),
                ]
                if self._parts.alignment is not None and self._parts.diagnosis is not None:
                    loops.append(
                        tasks.create_task(self._every(self._settings.ask_every_s, self._align))
                    )
                if self._parts.job_status_source is not None:
                    loops.append(
                        tasks.create_task(
                            self._every(_JOB_STATUS_EVERY_S, self._refresh_job_status)
                        )
                    )
                await self._ending.wait()
                for task in (*loops, *self._dumping):
                    task.cancel()
                await asyncio.gather(*self._dumping, return_exceptions=True)

    def stop(self) -> None:
        """Have `run` end."""
        self._ending.set()

    @property
    def job_status(self) -> JobStatus | None:
        """What the job's runtime told last."""
        return self._job_status

    def recorded(self) -> Sequence[str]:
        """Return the jobs that are recorded on this node."""
        return self._parts.recorded()

    async def on_watch(self, function: Callable[[Watch], _Result]) -> _Result:
        """Have a function answered on the thread that owns the watch."""
        return await asyncio.get_running_loop().run_in_executor(
            self._watch_thread, function, self._watch
        )

    async def stacks(self, rank: int) -> dict[str, Any]:
        """Return the stacks of a rank: from here, or from the daemon below that has it."""
        pid, url = await self.on_watch(lambda watch: watch.locate_rank(rank))
        if pid is not None:
            return await dump(pid)
        if url is not None:
            return await self._children.stacks(url, rank)
        return {"error": f"no daemon below knows rank {rank}"}

    async def update_clocks(self, clocks: Mapping[str, NodeClock]) -> None:
        """Hear how far nodes' clocks are off the job's, and tell the daemons below."""
        await self.on_watch(lambda watch: watch.set_clocks(clocks))
        below = await self.on_watch(lambda watch: watch.child_registry.nodes())
        await asyncio.gather(*(
            self._send_clocks(url, {node: clocks[node] for node in nodes if node in clocks})
            for url, nodes in below.items()
        ))  # fmt: skip

    async def _serve(self, owned: AsyncExitStack) -> str:
        served = application(
            self, self._settings.secret, opens_to_loopback=self._settings.opens_to_loopback
        )
        runner = web.AppRunner(served, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        owned.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, self._settings.host, self._settings.port)
        try:
            await site.start()
        except OSError as error:
            raise MonitorError(
                f"cannot listen on {self._settings.host}:{self._settings.port}: {error}"
            ) from error
        host, port = runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _every(self, period_s: float, turn: Callable[[], Any]) -> None:
        """Take turns at a steady pace; turns that were missed are not made up for."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            await turn()
            due_s = max(due_s + period_s, loop.time())
            await asyncio.sleep(due_s - loop.time())

    async def _read(self) -> None:
        await self.on_watch(Watch.read)

    async def _conclude(self) -> None:
        """Conclude, and tell."""
        turn = await self.on_watch(_diagnose)
        if turn is None:
            return
        for entry in turn.changes.opened:
            self._write(partial(EventFile.opened, entry=entry))
            if entry.verdict.syndrome in HANGS:
                task = asyncio.create_task(self._record_stacks(entry))
                self._dumping.add(task)
                task.add_done_callback(self._dumping.discard)
        for entry in turn.changes.closed:
            self._write(partial(EventFile.closed, entry=entry))
        if turn.changes.opened or turn.changes.closed:
            await self._save_state()
        await self._publish_and_act(turn)

    async def _publish_and_act(self, turn: DiagnosisRound) -> None:
        """Publish what holds, and do about it what the policy says."""
        verdicts, nodes, job_status = turn.current, turn.nodes, self._job_status
        # Where ranks are with_job_nodes anew, the runtime is to do nothing about the old ones. People are told all the same: a job that hangs
        # while its coordinator is away, or that another one is asked about, hangs.
        is_of_now = self._parts.job_status_source is None or (
            job_status is not None and job_status.generation == turn.generation
        )
        if job_status is not None and is_of_now:
            self._places = job_status.generation, job_status.places()
            verdicts = begun_since(job_status.began_at_s - time.time() + turn.now_s, verdicts)
        generation, places = self._places
        if places and generation == turn.generation:
            nodes, verdicts = places, with_job_nodes(verdicts, places)
        publisher = self._parts.publisher
        told = (turn.generation if verdicts else 0, verdicts)
        if publisher is not None and is_of_now and told != self._told:

            def publish() -> bool:
                publisher.publish(verdicts, turn.generation, turn.now_s)
                return True

            if await self._call_runtime("publisher", publish):
                self._told = told
        policy = self._parts.policy
        if policy is not None:
            if not is_of_now and policy.mode in (Mode.RESTART, Mode.REPLACE):
                policy = replace(policy, mode=Mode.ALERT)
            self._policy_state, actions = decide(
                policy, self._policy_state, verdicts, nodes, turn.step_s, turn.now_s
            )
            for action in actions:
                await self._act(action, turn.generation)
            if actions:
                await self._save_state()

    async def _act(self, action: EnforcementAction, generation: int) -> None:
        outcome = "told"
        enforcer = self._parts.enforcer
        if action.kind is not ActionKind.ALERT:
            done = await self._call_runtime(
                "enforcer", lambda: enforcer is not None and enforcer.enforce(action, generation)
            )
            if not done:
                # The job is changing, or its coordinator is away: if the verdict still stands then, it is tried again.
                self._policy_state = revert_action(self._policy_state, action)
                return
            outcome = "asked for"
        _LOG.warning("%s; %s", action, outcome)
        self._write(partial(EventFile.acted, action=action, outcome=outcome, wall_s=time.time()))

    def _write(self, event: Callable[[EventFile], None]) -> None:
        """Append to the event file, if there is one; what cannot be written is counted, for the log and the page still have it."""
        if self._events is None:
            return
        try:
            event(self._events)
        except OSError as error:
            self._watch.fault("event file", error)

    async def _ask_children(self) -> None:
        """Ask every daemon below for what is new, all at once."""
        urls = tuple(self._parts.children())
        await self.on_watch(lambda watch: watch.release(urls))
        await asyncio.gather(*map(self._ask_child, urls))

    async def _ask_child(self, url: str) -> None:
        incarnation, since = await self.on_watch(lambda watch: watch.child_registry.cursor(url))
        try:
            told = await self._children.summary(url, incarnation, since, self._settings.budget)
        except (MonitorUnreachable, ProtocolViolation) as error:
            reason = str(error)
            await self.on_watch(lambda watch: watch.record_failure(url, reason))
        else:
            await self.on_watch(lambda watch: watch.receive(url, told))

    async def _align(self) -> None:
        loop = asyncio.get_running_loop()
        nodes = await self.on_watch(Watch.nodes_of_ranks)
        if nodes == self._aligned and loop.time() < self._align_due_s:
            return
        self._aligned = nodes
        asked, took_s = await self.on_watch(Watch.to_align), 0.0
        reference, measured = self._settings.node, dict[str, NodeClock]()
        alignment = self._parts.alignment
        if asked is not None and alignment is not None:
            job, reference = asked

            def measure() -> JobRecords:
                nonlocal took_s
                began_s = time.monotonic()
                try:
                    return alignment(job, reference)
                finally:
                    took_s = time.monotonic() - began_s

            # Not on the watch's thread: of hundreds of nodes it takes a second.
            aligned = await self._call_runtime("alignment", measure)
            for one in aligned.ranks.values() if aligned is not None else ():
                if math.isfinite(one.offset_error_s):
                    measured[one.node] = NodeClock(one.offset_s, one.offset_error_s)
        clocks = await self.on_watch(lambda watch: watch.resolve_clocks(reference, measured))
        if not clocks:
            self._align_due_s = loop.time() + self._settings.align_every_s
            return
        is_complete = asked is None or clocks.keys() <= {*measured, self._settings.node}
        self._align_due_s = loop.time() + pause_s(
            self._settings.align_every_s, took_s, is_complete=is_complete
        )
        await self.update_clocks(clocks)

    async def _send_clocks(self, url: str, clocks: Mapping[str, NodeClock]) -> None:
        try:
            await self._children.send_clocks(url, clocks)
        except (MonitorUnreachable, ProtocolViolation) as error:
            # It is asked for its news every second, and noted as missing there.
            _LOG.debug("clocks not told: %s", error)

    async def _refresh_job_status(self) -> None:
        job_status_source = self._parts.job_status_source
        if job_status_source is None:
            return
        told = await self._call_runtime("job_status", lambda: (job_status_source.job_status(),))
        self._job_status = told[0] if told is not None else None
        if told is None:
            return
        if self._job_status is not None:
            self._report_runtime_state(
                _RuntimeState.PRESENT,
                logging.INFO,
                "its coordinator tells of generation %d",
                self._job_status.generation,
            )
            return
        self._places = (0, {})
        policy = self._parts.policy
        if self._runtime_state is not None:
            self._report_runtime_state(
                _RuntimeState.ABSENT,
                logging.INFO,
                "it has ended, and its coordinator with it; looking for the next",
            )
        elif policy is not None and policy.mode in (Mode.RESTART, Mode.REPLACE):
            self._report_runtime_state(
                _RuntimeState.ABSENT,
                logging.WARNING,
                "no coordinator of it was found here yet, so people are told and no more is done until there is one; "
                "--store names one elsewhere",
            )

    def _report_runtime_state(
        self, standing: _RuntimeState, level: int, text: str, *facts: object
    ) -> None:
        """Say how it stands with the job's runtime, if that is news."""
        if standing is not self._runtime_state:
            self._runtime_state = standing
            _LOG.log(level, f"job %s: {text}", self.job, *facts)

    async def _record_stacks(self, entry: VerdictEntry) -> None:
        """Look at the suspects while they hang."""
        for rank in entry.verdict.subject.ranks[:_RANKS_TO_DUMP]:
            found = await self.stacks(rank)
            await self.on_watch(
                partial(Watch.record_stacks, number=entry.number, rank=rank, stacks=found)
            )
            self._write(
                partial(EventFile.stacks, entry=entry, rank=rank, stacks=found, wall_s=time.time())
            )
        await self._save_state()

    async def _save_state(self) -> None:
        path, policy = self._settings.state, self._policy_state
        if path is None:
            return

        def write(watch: Watch) -> None:
            watch.guarded(
                "state file",
                lambda: save_state(
                    path, SavedState(watch.log, policy), time.monotonic(), time.time()
                ),
                None,
            )

        await self.on_watch(write)

    async def _call_runtime(self, part: str, call: Callable[[], _Result]) -> _Result | None:
        """Call what may block on the thread for that; count it if it fails."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._blocking_thread, call)
        except RuntimeUnreachable as error:
            self._report_runtime_state(
                _RuntimeState.UNREACHABLE,
                logging.WARNING,
                "%s; until it answers, people are told and no more is done",
                error,
            )
            return None
        except Exception as error:  # noqa: BLE001 - a part that fails must not take the others along; it is logged and counted
            self._watch.fault(part, error)
            return None

    async def _close_parts(self) -> None:
        await self.on_watch(Watch.close)
        for part in (self._parts.publisher, self._parts.enforcer, self._parts.job_status_source):
            if part is not None:
                await self._call_runtime("end", part.close)


def _diagnose(watch: Watch) -> DiagnosisRound | None:
    watch.digest()
    return watch.diagnose()
