"""The monitor daemon: reads, asks, concludes, tells; and touches the job only by what its policy asks of the job's own runtime.

One daemon a node reads that node's rings. Daemons given children ask them for what is new; a tree of them (nodes under racks
under a root) keeps what any one process handles in proportion to its children. The root diagnoses. It opens nothing of the
job's for writing, and the job knows nothing of it: it may crash, hang and come back at any time.

Owners: the daemon owns two threads (one for the watch, one for what may block: publisher, enforcer, story), its HTTP server and
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
    Probe,
    Story,
    StoryTeller,
    VerdictPublisher,
)
from keepstep.monitor.diagnosis.policy import Action, ActionKind, Mode, Policy, decide, undone
from keepstep.monitor.diagnosis.subjects import begun_since, placed
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
from keepstep.monitor.tree.node_clocks import Clock, pause_s
from keepstep.monitor.verdicts import Verdict
from keepstep.monitor.views.events import EventFile
from keepstep.monitor.views.pages import absence
from keepstep.monitor.views.service import application
from keepstep.monitor.watch.state_file import Remembered, keep, recall
from keepstep.monitor.watch.verdict_log import HANGS, Entry
from keepstep.monitor.watch.watch import Limits, Turn, Watch

_LOG = logging.getLogger("keepstep.monitor")
_Result = TypeVar("_Result")
_STORY_EVERY_S = 2.0
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
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a daemon is made of; it owns and closes them.

    Args:
        probe: measures the node.
        reader: this node's rings; None for a daemon that only hears others.
        diagnosis: None for one that only relays.
        alignment: of clocks.
        publisher: where verdicts go besides the event file.
        teller: what the job's runtime knows.
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
    teller: StoryTeller | None = None
    policy: Policy | None = None
    enforcer: Enforcer | None = None
    children: Callable[[], Sequence[str]] = tuple
    recorded: Callable[[], Sequence[str]] = tuple


class _Standing(Enum):
    """How it stands with the job's own runtime."""

    ABSENT = "there is no such job there"
    UNREACHABLE = "it does not answer"
    PRESENT = "it tells of the job"


class Daemon:
    """See the module. `run` does everything and returns when it is cancelled or `stop` was called."""

    def __init__(self, settings: Settings, parts: Parts) -> None:
        if settings.opens_to_loopback and not is_loopback(settings.host):
            raise MonitorError(
                f"a page without token is for loopback only, not for {settings.host}; leave --host or --open-page away"
            )
        self.job = settings.job
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The URL it serves, once it does."""
        self._settings = settings
        self._parts = parts
        self._story: Story | None = None
        self._standing: _Standing | None = None
        # As the runtime has them, of which generation: they hold on while it is away.
        self._places: tuple[int, Mapping[int, str]] = (0, {})
        # Nothing yet: what an earlier daemon published may not hold any more.
        self._told: tuple[int, tuple[Verdict, ...]] | None = None
        remembered = recall(settings.state, time.monotonic(), time.time())
        self._policy_state = remembered.policy
        self._align_due_s = 0.0
        self._aligned: frozenset[str] = frozenset()
        self._dumping: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Event()
        self._events: EventFile | None = None
        self._watch_thread = ThreadPoolExecutor(1, "watch")
        self._talk_thread = ThreadPoolExecutor(1, "talk")
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
            owned.callback(self._talk_thread.shutdown)
            owned.push_async_callback(self._close_parts)
            if self._settings.events is not None:
                self._events = EventFile(self._settings.events, self.job, self._settings.node)
                owned.callback(self._events.close)
            self._children = Children(self._settings.secret)
            owned.push_async_callback(self._children.close)
            await self.ask(Watch.read)
            address = await self._serve(owned)
            self.address.set_result(address)
            if self._parts.reader is not None and not await self.ask(Watch.nodes_of_ranks):
                _LOG.info(absence(self.job, self.recorded()))
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
                if self._parts.teller is not None:
                    loops.append(tasks.create_task(self._every(_STORY_EVERY_S, self._ask_story)))
                await self._ending.wait()
                for task in (*loops, *self._dumping):
                    task.cancel()
                await asyncio.gather(*self._dumping, return_exceptions=True)

    def stop(self) -> None:
        """Have `run` end."""
        self._ending.set()

    @property
    def story(self) -> Story | None:
        """What the job's runtime told last."""
        return self._story

    def recorded(self) -> Sequence[str]:
        """Return the jobs that are recorded on this node."""
        return self._parts.recorded()

    async def ask(self, question: Callable[[Watch], _Result]) -> _Result:
        """Have a question answered on the thread that owns the watch."""
        return await asyncio.get_running_loop().run_in_executor(
            self._watch_thread, question, self._watch
        )

    async def stacks(self, rank: int) -> dict[str, Any]:
        """Return the stacks of a rank: from here, or from the daemon below that has it."""
        pid, url = await self.ask(lambda watch: watch.place_of(rank))
        if pid is not None:
            return await dump(pid)
        if url is not None:
            return await self._children.stacks(url, rank)
        return {"error": f"no daemon below knows rank {rank}"}

    async def take_clocks(self, clocks: Mapping[str, Clock]) -> None:
        """Hear how far nodes' clocks are off the job's, and tell the daemons below."""
        await self.ask(lambda watch: watch.set_clocks(clocks))
        below = await self.ask(lambda watch: watch.below.nodes())
        await asyncio.gather(*(
            self._tell_clocks(url, {node: clocks[node] for node in nodes if node in clocks})
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
        await self.ask(Watch.read)

    async def _conclude(self) -> None:
        """Conclude, and tell."""
        turn = await self.ask(_diagnose)
        if turn is None:
            return
        for entry in turn.changes.opened:
            self._write(partial(EventFile.opened, entry=entry))
            if entry.verdict.syndrome in HANGS:
                task = asyncio.create_task(self._keep_stacks(entry))
                self._dumping.add(task)
                task.add_done_callback(self._dumping.discard)
        for entry in turn.changes.closed:
            self._write(partial(EventFile.closed, entry=entry))
        if turn.changes.opened or turn.changes.closed:
            await self._remember()
        await self._tell_and_act(turn)

    async def _tell_and_act(self, turn: Turn) -> None:
        """Publish what holds, and do about it what the policy says."""
        verdicts, nodes, story = turn.current, turn.nodes, self._story
        # Where ranks are placed anew, the runtime is to do nothing about the old ones. People are told all the same: a job that hangs
        # while its coordinator is away, or that another one is asked about, hangs.
        is_of_now = self._parts.teller is None or (
            story is not None and story.generation == turn.generation
        )
        if story is not None and is_of_now:
            self._places = story.generation, story.places()
            verdicts = begun_since(story.began_at_s - time.time() + turn.now_s, verdicts)
        generation, places = self._places
        if places and generation == turn.generation:
            nodes, verdicts = places, placed(verdicts, places)
        publisher = self._parts.publisher
        told = (turn.generation if verdicts else 0, verdicts)
        if publisher is not None and is_of_now and told != self._told:

            def publish() -> bool:
                publisher.publish(verdicts, turn.generation, turn.now_s)
                return True

            if await self._talk("publisher", publish):
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
                await self._remember()

    async def _act(self, action: Action, generation: int) -> None:
        outcome = "told"
        enforcer = self._parts.enforcer
        if action.kind is not ActionKind.ALERT:
            done = await self._talk(
                "enforcer", lambda: enforcer is not None and enforcer.enforce(action, generation)
            )
            if not done:
                # The job is changing, or its coordinator is away: if the verdict still stands then, it is tried again.
                self._policy_state = undone(self._policy_state, action)
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
        await self.ask(lambda watch: watch.release(urls))
        await asyncio.gather(*map(self._ask_child, urls))

    async def _ask_child(self, url: str) -> None:
        incarnation, since = await self.ask(lambda watch: watch.below.cursor(url))
        try:
            told = await self._children.summary(url, incarnation, since, self._settings.budget)
        except (MonitorUnreachable, ProtocolViolation) as error:
            reason = str(error)
            await self.ask(lambda watch: watch.miss(url, reason))
        else:
            await self.ask(lambda watch: watch.hear(url, told))

    async def _align(self) -> None:
        loop = asyncio.get_running_loop()
        nodes = await self.ask(Watch.nodes_of_ranks)
        if nodes == self._aligned and loop.time() < self._align_due_s:
            return
        self._aligned = nodes
        asked, took_s = await self.ask(Watch.to_align), 0.0
        reference, measured = self._settings.node, dict[str, Clock]()
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
            aligned = await self._talk("alignment", measure)
            for one in aligned.ranks.values() if aligned is not None else ():
                if math.isfinite(one.offset_error_s):
                    measured[one.node] = Clock(one.offset_s, one.offset_error_s)
        clocks = await self.ask(lambda watch: watch.agree(reference, measured))
        if not clocks:
            self._align_due_s = loop.time() + self._settings.align_every_s
            return
        is_complete = asked is None or clocks.keys() <= {*measured, self._settings.node}
        self._align_due_s = loop.time() + pause_s(
            self._settings.align_every_s, took_s, is_complete=is_complete
        )
        await self.take_clocks(clocks)

    async def _tell_clocks(self, url: str, clocks: Mapping[str, Clock]) -> None:
        try:
            await self._children.tell_clocks(url, clocks)
        except (MonitorUnreachable, ProtocolViolation) as error:
            # It is asked for its news every second, and noted as missing there.
            _LOG.debug("clocks not told: %s", error)

    async def _ask_story(self) -> None:
        teller = self._parts.teller
        if teller is None:
            return
        told = await self._talk("story", lambda: (teller.story(),))
        self._story = told[0] if told is not None else None
        if told is None:
            return
        if self._story is not None:
            self._stands(
                _Standing.PRESENT,
                logging.INFO,
                "its coordinator tells of generation %d",
                self._story.generation,
            )
            return
        self._places = (0, {})
        policy = self._parts.policy
        if self._standing is not None:
            self._stands(
                _Standing.ABSENT,
                logging.INFO,
                "it has ended, and its coordinator with it; looking for the next",
            )
        elif policy is not None and policy.mode in (Mode.RESTART, Mode.REPLACE):
            self._stands(
                _Standing.ABSENT,
                logging.WARNING,
                "no coordinator of it was found here yet, so people are told and no more is done until there is one; "
                "--store names one elsewhere",
            )

    def _stands(self, standing: _Standing, level: int, text: str, *facts: object) -> None:
        """Say how it stands with the job's runtime, if that is news."""
        if standing is not self._standing:
            self._standing = standing
            _LOG.log(level, f"job %s: {text}", self.job, *facts)

    async def _keep_stacks(self, entry: Entry) -> None:
        """Look at the suspects while they hang."""
        for rank in entry.verdict.subject.ranks[:_RANKS_TO_DUMP]:
            found = await self.stacks(rank)
            await self.ask(partial(Watch.keep_stacks, number=entry.number, rank=rank, stacks=found))
            self._write(
                partial(EventFile.stacks, entry=entry, rank=rank, stacks=found, wall_s=time.time())
            )
        await self._remember()

    async def _remember(self) -> None:
        path, policy = self._settings.state, self._policy_state
        if path is None:
            return

        def write(watch: Watch) -> None:
            watch.guarded(
                "state file",
                lambda: keep(path, Remembered(watch.log, policy), time.monotonic(), time.time()),
                None,
            )

        await self.ask(write)

    async def _talk(self, part: str, call: Callable[[], _Result]) -> _Result | None:
        """Call what may block on the thread for that; count it if it fails."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._talk_thread, call)
        except RuntimeUnreachable as error:
            self._stands(
                _Standing.UNREACHABLE,
                logging.WARNING,
                "%s; until it answers, people are told and no more is done",
                error,
            )
            return None
        except Exception as error:  # noqa: BLE001 - a part that fails must not take the others along; it is logged and counted
            self._watch.fault(part, error)
            return None

    async def _close_parts(self) -> None:
        await self.ask(Watch.close)
        for part in (self._parts.publisher, self._parts.enforcer, self._parts.teller):
            if part is not None:
                await self._talk("end", part.close)


def _diagnose(watch: Watch) -> Turn | None:
    watch.digest()
    return watch.diagnose()
