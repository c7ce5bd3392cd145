"""Measures what a job's coordination costs as it grows: bytes, operations, agreement, leader.

`python ops/bench/coordination.py --json [--quick]`. The last line is one JSON object. Memberships
are production's, with a real etcd; workers and snapshot servers are played: a node enters, drains
and reports at once. The leader is alone in this process, all followers share another one and a few
of its connections to etcd. Bytes are counted at the store's contract: keys and values that were
asked for, written and watched, and reports. `pure` measures the functions without any coordinator,
`root_daemon` the monitor's topmost daemon, fed by played children.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from traces import Shape, Simulation  # noqa: E402

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId  # noqa: E402
from keepstep.elastic.agent.membership import Membership  # noqa: E402
from keepstep.elastic.rendezvous.actions import Commit, Open  # noqa: E402
from keepstep.elastic.rendezvous.decide import decide  # noqa: E402
from keepstep.elastic.rendezvous.decision import LeaderState  # noqa: E402
from keepstep.elastic.rendezvous.placements import decode_commit, encode_commit  # noqa: E402
from keepstep.elastic.rendezvous.policy import RendezvousPolicy  # noqa: E402
from keepstep.elastic.rendezvous.records import (  # noqa: E402
    Closing,
    CommitAnnouncement,
    History,
    Leadership,
    NodePhase,
    NodeRecord,
    NodeReport,
    Recovery,
)
from keepstep.elastic.rendezvous.reports import Reports  # noqa: E402
from keepstep.elastic.rendezvous.transactions import lead, preview  # noqa: E402
from keepstep.elastic.rendezvous.view import (  # noqa: E402
    JoinedNode,
    Keys,
    View,
    apply,
    with_reports,
)
from keepstep.elastic.store import etcd as etcd_store  # noqa: E402
from keepstep.elastic.store.address import Access, Address, parse_address  # noqa: E402
from keepstep.elastic.store.contract import (  # noqa: E402
    Change,
    Committed,
    Created,
    Delete,
    KeyValue,
    Listing,
    Modified,
    Put,
    Reset,
    Store,
)
from keepstep.elastic.store.credentials import Credentials, coordinator_secret  # noqa: E402
from keepstep.elastic.store.embedded import EmbeddedEtcd  # noqa: E402
from keepstep.elastic.store.etcd import EtcdStore  # noqa: E402
from keepstep.monitor.daemon.assembly import diagnose  # noqa: E402
from keepstep.monitor.daemon.settings import Settings  # noqa: E402
from keepstep.monitor.diagnosis.digest import EMPTY_DIGEST_STATE, DigestState, digest  # noqa: E402
from keepstep.monitor.records import Ending  # noqa: E402
from keepstep.monitor.telemetry.record_history import RankState  # noqa: E402
from keepstep.monitor.tree.summary import Summary, decode, encode  # noqa: E402
from keepstep.monitor.watch.watch import Watch  # noqa: E402

T = TypeVar("T")

JOB = "bench"
etcd_store._CHANNEL_OPTIONS += (("grpc.use_local_subchannel_pool", 1),)
RANKS_PER_CHILD, RECORDS_PER_ROUND, ROUNDS = 256, 16, 20
RECORD_RANKS_PER_S = Settings(job="", node="", secret=b"").record_ranks_per_s
LEASE_S = 1800.0
"""Longer than a measurement, so that no renewal is counted: each costs the same at any size."""
LINE_NBYTES = 1 << 22
FOLLOWERS_PER_CONNECTION = 64
HEADER_NBYTES = 16
"""Bytes counted for each key in addition to key and value: revisions and lease."""


@dataclass(slots=True)
class Counts:
    """The traffic of agents."""

    nbytes: int = 0
    operations: int = 0

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.operations += 1

    def since(self, before: Counts) -> Counts:
        return Counts(self.nbytes - before.nbytes, self.operations - before.operations)


def size_of(item: KeyValue | Put | Delete | Modified | Created | Change) -> int:
    """Return the bytes that one item of a request or an answer counts."""
    if isinstance(item, Change):
        return size_of(item.value) if item.value is not None else len(item.key) + HEADER_NBYTES
    value = item.value if isinstance(item, KeyValue | Put) else b""
    return len(item.key) + len(value) + HEADER_NBYTES


class CountingStore:
    """Counts one agent's requests to a store, and the answers."""

    def __init__(self, store: Store, counts: Counts) -> None:
        self._store = store
        self._counts = counts

    async def read(self, prefix: str, **options: Any) -> Listing:
        listing = await self._store.read(prefix, **options)
        self._counts.add(len(prefix) + sum(map(size_of, listing.items)))
        return listing

    async def commit(
        self, conditions: Sequence[Modified | Created], operations: Sequence[Put | Delete]
    ) -> Committed:
        self._counts.add(sum(map(size_of, (*conditions, *operations))))
        return await self._store.commit(conditions, operations)

    async def grant(self, ttl_s: float) -> int:
        self._counts.add(HEADER_NBYTES)
        return await self._store.grant(ttl_s)

    async def renew(self, lease: int) -> float:
        self._counts.add(HEADER_NBYTES)
        return await self._store.renew(lease)

    async def revoke(self, lease: int) -> None:
        self._counts.add(HEADER_NBYTES)
        await self._store.revoke(lease)

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[tuple[Change, ...] | Reset]:
        async for item in self._store.watch(prefix, after):
            listed = item.listing.items if isinstance(item, Reset) else item
            self._counts.add(sum(map(size_of, listed)))
            yield item

    async def close(self) -> None:
        pass


@dataclass
class Agent:
    """A membership whose node does at once whatever the job asks for."""

    membership: Membership
    entered: int = 0
    drained: int = 0
    committed: int = -1
    running: asyncio.Task[None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def follow(self) -> None:
        """Enter or drain the generation that the view shows."""
        view, membership = self.membership.view, self.membership
        if view.generation is None:
            return
        number = view.generation_number
        if number > self.entered:
            self.entered = number
            now_s = time.time()
            times = {"ready": now_s, "restored": now_s, "stepped": now_s, "resumed_step": 0.0}
            asyncio.get_running_loop().call_soon(
                lambda: membership.update(phase=NodePhase.RUNNING, times=times)
            )
            membership.update(
                generation=number, phase=NodePhase.STARTING, times={}, failure=None,
            )  # fmt: skip
        elif view.is_closing and self.drained < number:
            self.drained = number
            held = (view.snapshot.snapshot,) if view.snapshot is not None else ()
            membership.update(phase=NodePhase.DRAINED, sealed=held, protected=held)
        if view.snapshot is not None:
            self.committed = max(self.committed, view.snapshot.snapshot.step)

    def report(self, step: int) -> NodeReport:
        """Say that a step is protected here."""
        record, generation = self.membership.record, self.entered
        return NodeReport(
            node=record.node, lease=record.lease, generation=generation, server=record.server,
            step=step, protected=(SnapshotId(generation, step),),
        )  # fmt: skip


def record_of(number: int) -> NodeRecord:
    """Return a node's record; names and addresses are as long as in a cluster."""
    host = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
    return NodeRecord(
        node=f"gpu-node-{number:05}", host=host, nproc=8, agent=f"{host}:{20000 + number % 997}",
        server=f"tcp:{host}:{40000 + number * 7919 % 20011}", store_port=30000 + number * 31 % 9973,
        lease=0, digest="0" * 64, warm=True, checkpoint_every=0, memory_nbytes=40 << 30,
    )  # fmt: skip


async def new_agent(
    store: Store,
    number: int,
    nodes: int,
    on_change: Callable[[], None],
    announce: Callable[[CommitAnnouncement], None] = lambda _: None,
) -> Agent:
    """Join the job as its node of a number."""
    record = record_of(number)
    # With parity, so that nobody waits for the lost node's return.
    policy = RendezvousPolicy(min_nodes=nodes - 1, max_nodes=nodes, last_call_s=30.0, parity=1)

    async def publish(_: object) -> None:
        raise AssertionError("nothing is stored here")

    agents: list[Agent] = []

    def changed() -> None:
        agents[0].follow()
        on_change()

    membership = Membership(
        store, JOB, policy, record, LEASE_S, changed, publish, announce=announce
    )
    agents.append(Agent(membership))
    for attempt in range(5):
        try:
            await membership.join()
            break
        except Exception:
            if attempt == 4:
                raise
    agents[0].running = asyncio.create_task(membership.run())
    agents[0].follow()
    return agents[0]


async def connect(url: str) -> EtcdStore:
    """Connect as an agent does, with patience for a machine that is busy.

    Each store has a connection of its own, as agents have: gRPC would share one among those of a
    process, and etcd takes 250 streams on a connection.
    """
    address = parse_address(url)
    return await EtcdStore.connect(
        address, deadline_s=120.0, credentials=Credentials.for_address(address, os.environ)
    )


# The process of all followers: orders come as lines on its socket, answers go back.


async def follow(url: str, path: str, nodes: int) -> None:
    """Play all nodes but the leader."""
    reader, writer = await asyncio.open_unix_connection(path, limit=LINE_NBYTES)
    counts = Counts()
    changed = asyncio.Event()
    stores = [await connect(url) for _ in range(nodes // FOLLOWERS_PER_CONNECTION + 1)]
    agents: list[Agent] = []
    numbers = list(range(1, nodes))
    for first in range(0, len(numbers), 32):
        agents += await asyncio.gather(
            *(
                new_agent(
                    CountingStore(stores[number % len(stores)], counts), number, nodes, changed.set
                )
                for number in numbers[first : first + 32]
            )
        )

    async def wait_until(is_reached: Callable[[Agent], bool]) -> None:
        waiting = list(agents)
        while waiting := [agent for agent in waiting if not is_reached(agent)]:
            for agent in waiting:
                if agent.running is not None and agent.running.done():
                    agent.running.result()
            changed.clear()
            try:
                await asyncio.wait_for(changed.wait(), 1.0)
            except TimeoutError:
                continue

    def answer(**values: Any) -> None:
        values |= {"nbytes": counts.nbytes, "operations": counts.operations}
        writer.write(json.dumps(values).encode() + b"\n")

    answer(joined=len(agents))
    while line := await reader.readline():
        order = json.loads(line)
        if "protect" in order:
            step = order["protect"]
            for agent in agents:
                encoded = agent.report(step).encode()
                counts.add(len(encoded))
                writer.write(b"R" + encoded + b"\n")
        elif "announce" in order:
            announcement = CommitAnnouncement(SnapshotId(order["generation"], order["announce"]))
            for agent in agents:
                counts.add(len(announcement.encode()))
                agent.committed = max(agent.committed, announcement.snapshot.step)
            answer(committed=announcement.snapshot.step)
        elif "enter" in order:
            generation = order["enter"]
            await wait_until(lambda agent, g=generation: agent.entered >= g)
            answer(entered=generation, at_s=time.monotonic())
        elif "lose" in order:
            lost = agents.pop()
            assert lost.running is not None
            lost.running.cancel()
            answer(lost=lost.membership.record.lease, at_s=time.monotonic())
        elif "count" in order:
            answer()
    os._exit(0)


# The leader's process.


class Followers:
    """The other process, as the leader sees it."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.on_report: Callable[[NodeReport], None] = lambda _: None
        self.ended = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        while line := await reader.readline():
            if line.startswith(b"R"):
                self.on_report(NodeReport.decode(line[1:-1]))
            else:
                await self.answers.put(json.loads(line))
        await self.answers.put({"ended": True})
        self.ended.set()

    def order(self, **order: Any) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(order).encode() + b"\n")

    async def answer(self, name: str) -> dict[str, Any]:
        while True:
            answer = await self.answers.get()
            if "ended" in answer:
                raise RuntimeError("the process of the followers has ended")
            if name in answer:
                return answer

    async def ask(self, name: str, **order: Any) -> dict[str, Any]:
        self.order(**order)
        return await self.answer(name)


async def measure(nodes: int, snapshots: int, url: str, directory: Path) -> dict[str, Any]:
    """Measure one job of `nodes` nodes."""
    followers = Followers()
    path = str(directory / f"followers-{nodes}")
    server = await asyncio.start_unix_server(followers.serve, path, limit=LINE_NBYTES)
    own = Counts()
    changed = asyncio.Event()

    def announce(announcement: CommitAnnouncement) -> None:
        found = announcement.snapshot
        followers.order(announce=found.step, generation=found.generation)

    leader = await new_agent(
        CountingStore(await connect(url), own), 0, nodes, changed.set, announce
    )
    followers.on_report = leader.membership.receive_report
    child = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--follow", str(nodes), "--url", url, "--path", path, cwd=ROOT
    )

    async def leader_has(is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            assert leader.running is not None
            if leader.running.done():
                leader.running.result()
            changed.clear()
            try:
                await asyncio.wait_for(changed.wait(), 0.5)
            except TimeoutError:
                continue

    async def totals() -> Counts:
        theirs = await followers.ask("nbytes", count=True)
        return Counts(own.nbytes + theirs["nbytes"], own.operations + theirs["operations"])

    began_s = time.monotonic()
    await followers.answer("joined")
    joined_s = time.monotonic() - began_s
    await followers.ask("entered", enter=1)
    view = lambda: leader.membership.view  # noqa: E731
    await leader_has(lambda: len(view().history.recoveries) >= 1)
    opened_s = time.monotonic() - began_s - joined_s
    started = await totals()

    before, cpu_s = await totals(), time.process_time()
    commit_s = []
    for step in range(1, snapshots + 1):
        began_s = time.monotonic()
        leader.membership.receive_report(leader.report(step))
        await followers.ask("committed", protect=step)
        commit_s.append(time.monotonic() - began_s)
    snapshot_cpu_s = (time.process_time() - cpu_s) / snapshots
    spent = (await totals()).since(before)

    before, cpu_s = await totals(), time.process_time()
    lost = await followers.ask("lost", lose=True)
    began_s = time.monotonic()
    await leader.membership.revoke(replace(leader.membership.record, lease=lost["lost"]))
    await followers.ask("entered", enter=2)
    await leader_has(lambda: leader.entered >= 2)
    agree_s = time.monotonic() - began_s
    await leader_has(lambda: len(view().history.recoveries) >= 2)
    recovery = (await totals()).since(before)
    result = {
        "bytes_per_snapshot": spent.nbytes // snapshots,
        "bytes_per_snapshot_and_agent": spent.nbytes // snapshots // nodes,
        "operations_per_snapshot": spent.operations // snapshots,
        "commit_s": round(statistics.median(commit_s), 3),
        "bytes_per_recovery": recovery.nbytes,
        "bytes_per_recovery_and_agent": recovery.nbytes // nodes,
        "operations_per_recovery": recovery.operations,
        "agree_s": round(agree_s, 2),
        "leader_cpu_s": round(time.process_time() - cpu_s, 3),
        "leader_cpu_s_per_snapshot": round(snapshot_cpu_s, 4),
        "bytes_to_start": started.nbytes,
        "join_s": round(joined_s, 1),
        "open_s": round(opened_s, 2),
    }
    child.kill()
    await child.wait()
    await followers.ended.wait()
    assert leader.running is not None
    leader.running.cancel()
    server.close()
    return result


# The functions alone.


def pure(nodes: int) -> dict[str, Any]:
    """Measure opening, committing and deciding at `nodes` nodes, without a coordinator."""
    keys, policy = Keys(JOB), RendezvousPolicy(min_nodes=1, max_nodes=nodes)
    records = [
        replace(record_of(number), lease=number + 1, domain=f"rack-{number // 32}")
        for number in range(nodes)
    ]
    waiting = {record.node: JoinedNode(record, number) for number, record in enumerate(records, 1)}
    view = View(revision=nodes, nodes=waiting, leadership=Leadership("", "", 1))
    decided_s, opening = timed(lambda: decide(policy, view, LeaderState(), 0.0, 0.0).action)
    assert isinstance(opening, Open)
    first = opened(keys, view, opening)
    running = {
        name: JoinedNode(
            replace(joined.record, generation=1, phase=NodePhase.RUNNING, times=TIMES),
            joined.created,
        )
        for name, joined in waiting.items()
    }
    view = replace(first["view"], nodes=running, history=History((RECOVERY,)))
    idle_s, nothing = timed(lambda: decide(policy, view, LeaderState(), 0.0, 0.0).action)
    assert nothing is None
    snapshot = SnapshotId(1, 7)
    reports = [
        NodeReport(record.node, record.lease, 1, record.server, 7, (snapshot,))
        for record in records
    ]
    received = Reports()
    assert view.generation is not None
    generation = view.generation

    def receive() -> bool:
        for report in reports:
            received.receive(report)
            is_complete = received.completes(report, generation)
        return is_complete

    reports_s, is_complete = timed(receive)
    assert is_complete
    protected = with_reports(view, received.newest)
    commit_s, committing = timed(lambda: decide(policy, protected, LeaderState(), 0.0, 0.0).action)
    assert isinstance(committing, Commit)
    encoded = encode_commit(committing.commit)
    decode_s, commit = timed(lambda: decode_commit(encoded, view.members))
    assert commit == committing.commit
    view = replace(protected, snapshot=commit)
    changed = KeyValue(
        keys.node(records[0].node), running[records[0].node].record.encode(), 1, nodes + 9
    )
    update_s, _ = timed(lambda: apply(keys, view, [Change(changed.key, changed, nodes + 9)]))
    left = {
        name: JoinedNode(replace(joined.record, phase=NodePhase.DRAINED), joined.created)
        for name, joined in view.nodes.items()
        if name != records[nodes // 3].node
    }
    view = replace(view, nodes=left, closing=Closing(1, "lost", True, 0.0))
    recovery_s, reopening = timed(lambda: decide(policy, view, LeaderState(), 0.0, 0.0).action)
    assert isinstance(reopening, Open)
    second = opened(keys, view, reopening)
    return {
        "opening_bytes": first["nbytes"],
        "opening_requests": first["requests"],
        "opening_largest_request": first["largest"],
        "opening_s": round(decided_s + first["write_s"], 3),
        "opening_read_s": round(first["read_s"], 3),
        "recovery_bytes": second["nbytes"],
        "recovery_s": round(recovery_s + second["write_s"], 3),
        "commit_bytes": len(encoded),
        "commit_decode_us": round(decode_s * 1e6, 1),
        "commit_decide_s": round(commit_s, 4),
        "reports_s": round(reports_s, 4),
        "decide_s": round(idle_s, 4),
        "record_update_us": round(update_s * 1e6, 1),
    }


TIMES = {"ready": 0.0, "restored": 0.0, "stepped": 0.0}
RECOVERY = Recovery(
    generation=1, reason="start", world_size=1, detected_at_s=0.0, opened_at_s=0.0, ready_at_s=0.0,
    restored_at_s=0.0, stepped_at_s=0.0, resumed_step=0, lost_steps=0, source="",
)  # fmt: skip


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Return the least processor seconds of three calls, and the last one's result."""
    spent = []
    for _ in range(3):
        began_s = time.process_time()
        result = call()
        spent.append(time.process_time() - began_s)
    return min(spent), result


def opened(keys: Keys, view: View, opening: Open) -> dict[str, Any]:
    """Return what it takes to write an opening and to read it, and the view after it."""
    write_s, parts = timed(lambda: lead(keys, view, 1, opening, 0.0))
    sizes = [sum(map(size_of, (*part.conditions, *part.operations))) for part in parts]
    read_s, after = timed(lambda: preview(keys, view, parts))
    return {
        "nbytes": sum(sizes), "requests": len(sizes), "largest": max(sizes),
        "write_s": write_s, "read_s": read_s, "view": after,
    }  # fmt: skip


# The topmost daemon of the monitor.


class NoProbe:
    """Measures nothing: the daemon's own node has no ranks."""

    def sample(self, workers: Mapping[int, int]) -> None:
        return None

    def close(self) -> None:
        pass


def root_daemon(ranks: int, rounds: int) -> dict[str, Any]:
    """Measure a daemon that diagnoses `ranks` ranks, which its children report every second.

    Digests are those of a simulated job (`ops/bench/traces.py`), a step of it every second.
    """
    job = Simulation(Shape(8, ranks // 64), None, 5)
    nodes = {rank: f"n{rank // 8:05}" for rank in range(ranks)}
    now_s = 0.0
    watch = Watch("root", None, NoProbe(), diagnose, now_s=lambda: now_s)
    digest_states: dict[int, DigestState] = {}
    process = psutil.Process()
    received = spent_s = 0.0
    resident = [process.memory_info().rss]
    for step, records, end_s in job.steps():
        now_s = end_s
        rings = job.read(records, end_s, frozenset())
        readings = [replace(ring, ending=Ending.NONE) for ring in rings.ranks.values()]
        urls = [f"http://{first}" for first in range(0, ranks, RANKS_PER_CHILD)]
        cursors = watch.child_registry.cursors(urls, RECORD_RANKS_PER_S)
        for first, url in zip(range(0, ranks, RANKS_PER_CHILD), urls, strict=True):
            has_records = cursors[url].records_since is not None
            own = readings[first : first + RANKS_PER_CHILD]
            state = digest_states.get(first, EMPTY_DIGEST_STATE)
            digest_states[first], made = digest(own, rings.communicators, state)
            summary = Summary(
                incarnation=f"child {first}", number=step,
                present=tuple(ring.rank for ring in own),
                ranks=tuple(
                    (
                        RankState(
                            rank=ring.rank, node=nodes[ring.rank], pid=1, incarnation="first",
                            is_alive=True, ending=Ending.NONE, read_at_s=ring.read_at_s,
                            progress_at_s=ring.read_at_s, generation=1, world_size=ranks,
                            created_at_s=1.0,
                        ),
                        ring.records[-RECORDS_PER_ROUND:],
                    )
                    for ring in own
                    if has_records
                ),
                has_records=has_records,
                communicators=tuple(rings.communicators.values()) if step == 1 else (),
                nodes=(), digests=(made,),
            )  # fmt: skip
            encoded = encode(summary)
            began_s = time.process_time()
            watch.receive(url, decode(encoded))
            spent_s += time.process_time() - began_s
            received += len(encoded)
        began_s = time.process_time()
        watch.digest()
        watch.diagnose()
        spent_s += time.process_time() - began_s
        resident.append(process.memory_info().rss)
        if step == rounds:
            break
    return {
        "cpu_s_per_s": round(spent_s / rounds, 3),
        "bytes_per_rank": int((resident[-1] - resident[0]) / ranks),
        "received_bytes_per_rank_and_s": int(received / rounds / ranks),
        "rounds": rounds,
    }


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="Smaller jobs, and fewer snapshots.")
@click.option("--agents", "sizes", type=int, multiple=True, help="Only jobs of this many nodes.")
@click.option("--follow", "following", type=int, hidden=True)
@click.option("--url", hidden=True)
@click.option("--path", hidden=True)
def main(
    as_json: bool, quick: bool, sizes: tuple[int, ...], following: int | None, url: str, path: str
) -> None:
    logging.basicConfig(level=logging.ERROR)
    if following is not None:
        asyncio.run(follow(url, path, following))
        return
    console = Console(stderr=as_json, width=160)
    results: dict[str, Any] = {"agents": {}, "pure": {}, "root_daemon": {}}
    for nodes in sizes or ((10, 100) if quick else (10, 100, 1000)):
        secret = coordinator_secret(Address(("127.0.0.1:0",), Access.SECRET), os.environ)
        with EmbeddedEtcd(secret) as etcd:
            assert etcd._directory is not None
            results["agents"][str(nodes)] = asyncio.run(
                measure(nodes, 3 if quick or nodes >= 1000 else 10, etcd.url, etcd._directory)
            )
        console.print(f"{nodes} nodes: {results['agents'][str(nodes)]}")
    for nodes in () if sizes else (4096, 16384):
        results["pure"][str(nodes)] = pure(nodes)
        console.print(f"{nodes} nodes, functions alone: {results['pure'][str(nodes)]}")
    for ranks in () if sizes else (2048,) if quick else (2048, 16384):
        results["root_daemon"][str(ranks)] = root_daemon(ranks, ROUNDS)
        console.print(f"topmost daemon of {ranks} ranks: {results['root_daemon'][str(ranks)]}")
    console.print(report(results))
    print(json.dumps(results))


def report(results: dict[str, Any]) -> Table:
    table = Table(title="coordination")
    columns = ("bytes_per_snapshot", "bytes_per_recovery", "agree_s", "leader_cpu_s")
    for name in ("nodes", *columns):
        table.add_column(name)
    for nodes, outcome in results["agents"].items():
        table.add_row(nodes, *(str(outcome[column]) for column in columns))
    return table


if __name__ == "__main__":
    main()
