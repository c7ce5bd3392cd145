"""A node's place in the job: its lease, its record, its mirror of the job's keys, and, while it leads, the decisions.

The shell around `keepstep.elastic.rendezvous.decide`. Every write carries its conditions: a record needs the node's own key to be the one that this
agent created, a leader's action also the generation that it was decided upon. So nothing that a node writes after it was declared gone,
or for a generation that is over, is ever accepted.

When a member of the coordinator dies, the fate of a write may stay unknown. What says the same if written twice is written again; what a
leader decided is decided again, once the view has had time to show it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from keepstep.elastic.agent.peer_connections import probe
from keepstep.elastic.errors import JobFailed, LeaseLost, StoreUnavailable, UsageError
from keepstep.elastic.rendezvous import actions
from keepstep.elastic.rendezvous.decide import LeaderState, RendezvousPolicy, decide
from keepstep.elastic.rendezvous.records import (
    CheckpointRecord,
    NodeRecord,
    NodeReport,
    RestartRequest,
    StoreFailure,
)
from keepstep.elastic.rendezvous.view import Keys, View, apply, from_listing, with_reports
from keepstep.elastic.store.contract import Committed, Created, Delete, Modified, Put, Reset, Store

log = logging.getLogger("keepstep")

_RENEWALS_PER_TTL = 4
_LEAVE_TIMEOUT_S = 10.0
_PREDECESSOR_POLL_S = 0.2
_UNKNOWN_WRITE_WAIT_S = 2.0


class Membership:
    """One node's membership of one job.

    `on_change` is called, on the event loop, whenever the view has changed. `publish` writes the manifest of a checkpoint all of whose
    parts are stored. `run` works until cancelled and raises `LeaseLost` when the node has been declared gone; the caller then stops its
    workers and calls `join` again.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        policy: RendezvousPolicy,
        record: NodeRecord,
        lease_ttl_s: float,
        on_change: Callable[[], None],
        publish: Callable[[actions.Publish], Awaitable[None]],
    ) -> None:
        self._store = store
        self._keys = Keys(job)
        self._policy = policy
        self._ttl_s = lease_ttl_s
        self._on_change = on_change
        self._publish_checkpoint = publish
        self._dirty = asyncio.Event()
        self._changed = asyncio.Event()
        self._created = 0
        self._written: NodeRecord | None = None
        self._reports: dict[str, NodeReport] = {}
        self._lease_until_s = 0.0
        self.record = record
        self.view = View()
        self.message = ""

    @property
    def leads(self) -> bool:
        """Whether this node decides at present."""
        return self.view.leader == self.record.node

    async def join(self) -> bytes:
        """Take a lease and announce the node; return the job's secret.

        Raises:
            UsageError: the job's name is taken by a job that runs something else, or the node's name by another node.
            StoreUnavailable: the coordinator does not answer.
        """
        keys = self._keys
        listing = await self._store.read(keys.prefix)
        view = from_listing(keys, listing)
        if view.result is not None and not view.nodes:
            # The last agent of an earlier run under this name died between the result and the clean-up.
            await self._store.commit((), (Delete(keys.prefix, prefix=True),))
            view = replace(View(), revision=listing.revision)
        for joined in view.nodes.values():
            if joined.record.digest != self.record.digest:
                raise UsageError(
                    f"job {keys.job!r} is already running something else on node {joined.record.node}; "
                    "choose another --job name, or start every node with the same command and --nnodes"
                )
        await self._wait_for_predecessor(view)
        key = keys.single("secret")
        await self._write_until_known(
            (Created(key, 0),), (Put(key, secrets.token_hex(32).encode()),)
        )
        asked_s = time.monotonic()
        lease = await self._store.grant(self._ttl_s)
        self._lease_until_s = asked_s + self._ttl_s
        self.record = replace(self.record, lease=lease)
        node_key = keys.node(self.record.node)
        done = await self._write_until_known(
            (Created(node_key, 0),), (Put(node_key, self.record.encode(), lease),)
        )
        if not done.succeeded and not await self._has(node_key, lease):
            await self._store.revoke(lease)
            raise UsageError(
                f"node {self.record.node!r} joined job {keys.job!r} twice; choose another --node name"
            )
        self._written = self.record
        self.view = from_listing(keys, await self._store.read(keys.prefix))
        self._created = self.view.nodes[self.record.node].created
        assert self.view.secret is not None, "the secret was written before the node joined"
        return bytes.fromhex(self.view.secret.decode())

    async def _wait_for_predecessor(self, view: View) -> None:
        """Wait until an agent of this node's name that has died is gone; an agent that lives has the right to the name."""
        node = self.record.node
        until_s = time.monotonic() + 2 * self._ttl_s
        while node in view.nodes:
            joined = view.nodes[node].record
            # Who answers at this agent's own address is this agent: it was a member before, and lost its lease.
            lives = False if joined.agent == self.record.agent else await probe(joined)
            if lives or time.monotonic() > until_s:
                raise UsageError(
                    f"node {node!r} is already in job {self._keys.job!r}; choose another --node name"
                )
            if lives is False:
                await self._store.revoke(joined.lease)
            else:
                await asyncio.sleep(_PREDECESSOR_POLL_S)
            view = from_listing(self._keys, await self._store.read(self._keys.prefix))

    async def run(self) -> None:
        """Keep the lease, mirror the view, write the record, and lead if it falls to this node."""
        try:
            async with asyncio.TaskGroup() as group:
                for work in (self._watch(), self._renew(), self._write(), self._lead()):
                    group.create_task(work)
        except* LeaseLost as lost:
            raise lost.exceptions[0] from None
        except* (StoreUnavailable, UsageError, JobFailed) as failed:
            raise failed.exceptions[0] from None

    def update(self, **changes: Any) -> None:
        """Change fields of the node's record; the newest state is written soon, intermediate ones may be skipped."""
        record = replace(self.record, **changes)
        if record != self.record:
            self.record = record
            self._dirty.set()

    @property
    def has_unwritten_changes(self) -> bool:
        """Whether the record is about to be written."""
        return self._dirty.is_set()

    def receive_report(self, report: NodeReport) -> None:
        """Take note of a node's report, this one's own among them. It matters while this node leads."""
        self._reports[report.node] = report
        generation = self.view.generation
        if generation is None or not self.leads or not report.protected:
            return
        newest = report.protected[-1]
        heard = (self._reports.get(member.node) for member in generation.members)
        # To decide costs time linear in nodes: not at every report, but once the last one has it.
        if all(other is not None and newest in other.protected for other in heard):
            self._changed.set()

    async def revoke(self, record: NodeRecord) -> None:
        """Declare another node gone, because its agent's process is certainly dead."""
        await self._store.revoke(record.lease)

    async def complete_restart_request(self, request: RestartRequest) -> None:
        """Take away a request that this node has carried out."""
        await self._write_until_known(
            (Created(self._keys.node(self.record.node), self._created),),
            (Delete(self._keys.restart(request.rank)),),
        )

    async def leave(self) -> None:
        """Give up the lease. The last one to leave takes the job's keys along."""
        others = [node for node in self.view.nodes if node != self.record.node]
        if self.leads and self.view.result is not None and others:
            others = await self._wait_for_others_to_leave()
        operations = () if others else (Delete(self._keys.prefix, prefix=True),)
        try:
            if operations:
                await self._store.commit(
                    (Created(self._keys.node(self.record.node), self._created),), operations
                )
            await self._store.revoke(self.record.lease)
        except StoreUnavailable as error:
            log.warning(
                "could not sign off (%s); the lease ends by itself in %.0f s", error, self._ttl_s
            )

    async def _wait_for_others_to_leave(self) -> list[str]:
        """Wait until all other nodes have read the result and left."""
        until_s = time.monotonic() + _LEAVE_TIMEOUT_S
        while time.monotonic() < until_s:
            listing = await self._store.read(self._keys.node(""))
            others = [
                item.key for item in listing.items if item.key != self._keys.node(self.record.node)
            ]
            if not others:
                return []
            changes = self._store.watch(self._keys.node(""), listing.revision)
            try:
                await asyncio.wait_for(anext(aiter(changes)), until_s - time.monotonic())
            except TimeoutError:
                break
        return others

    async def _watch(self) -> None:
        """Mirror the job's keys."""
        async for change in self._store.watch(self._keys.prefix, self.view.revision):
            if isinstance(change, Reset):
                self.view = from_listing(self._keys, change.listing)
            else:
                self.view = apply(self._keys, self.view, change)
            mine = self.view.nodes.get(self.record.node)
            if mine is None or mine.created != self._created:
                raise LeaseLost(f"node {self.record.node} was declared gone")
            self._changed.set()
            self._on_change()

    async def _renew(self) -> None:
        """Renew the lease well before it ends; give it up in time when the coordinator cannot be reached."""
        while True:
            await asyncio.sleep(self._ttl_s / _RENEWALS_PER_TTL)
            asked_s = time.monotonic()
            try:
                # The node must stop before others may take it for gone, hence not the whole remaining time.
                async with asyncio.timeout_at(
                    self._loop_time(self._lease_until_s - 0.1 * self._ttl_s)
                ):
                    ttl_s = await self._store.renew(self.record.lease)
            except (TimeoutError, StoreUnavailable):
                if time.monotonic() < self._lease_until_s - 0.1 * self._ttl_s:
                    continue
                raise LeaseLost(
                    f"node {self.record.node} could not reach the coordinator for {self._ttl_s:.0f} s"
                ) from None
            self._lease_until_s = asked_s + ttl_s

    @staticmethod
    def _loop_time(monotonic_s: float) -> float:
        return asyncio.get_running_loop().time() + (monotonic_s - time.monotonic())

    async def _write(self) -> None:
        """Write the record whenever it has changed."""
        key = self._keys.node(self.record.node)
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            record = self.record
            if record == self._written:
                continue
            done = await self._write_until_known(
                (Created(key, self._created),), (Put(key, record.encode(), record.lease),)
            )
            if not done.succeeded:
                raise LeaseLost(f"node {record.node} was declared gone")
            self._written = record

    async def _write_until_known(
        self, conditions: Sequence[Modified | Created], operations: Sequence[Put | Delete]
    ) -> Committed:
        """Commit what may be committed twice, until its fate is known."""
        while True:
            try:
                return await self._store.commit(conditions, operations)
            except StoreUnavailable as error:
                if not error.unknown:
                    raise
                log.debug("%s; writing it again", error)

    async def _has(self, key: str, lease: int) -> bool:
        """Whether a key is there under a lease: what was written, and not confirmed, may have been applied."""
        listing = await self._store.read(key)
        return any(item.key == key and item.lease == lease for item in listing.items)

    async def _lead(self) -> None:
        """Decide, act, and wait for news, as long as this node leads."""
        leader_state = LeaderState()
        while True:
            self._changed.clear()
            again_at_s = None
            if self.leads:
                view = with_reports(self.view, self._reports)
                decision = decide(self._policy, view, leader_state, time.monotonic(), time.time())
                leader_state, again_at_s = decision.leader_state, decision.again_at_s
                if decision.message and decision.message != self.message:
                    log.info("%s", decision.message)
                self.message = decision.message
                if decision.action is not None:
                    try:
                        revision = await self._perform(decision.action)
                    except StoreUnavailable as error:
                        if not error.unknown:
                            raise
                        log.debug("%s; looking whether it was applied", error)
                        with suppress(TimeoutError):
                            async with asyncio.timeout(_UNKNOWN_WRITE_WAIT_S):
                                await self._changed.wait()
                        continue
                    while self.view.revision < revision:
                        await self._changed.wait()
                        self._changed.clear()
                    continue
            else:
                leader_state = LeaderState()
            try:
                async with asyncio.timeout(
                    None if again_at_s is None else again_at_s - time.monotonic()
                ):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _perform(self, action: actions.Action) -> int:
        """Do what was decided, in one transaction that fails if the premises have changed; return the revision to wait for."""
        if isinstance(action, actions.Publish):
            try:
                await self._publish_checkpoint(action)
            except JobFailed as error:
                action = actions.CancelPersist(action.request, str(error))
        conditions = (
            Created(self._keys.node(self.record.node), self._created),
            Modified(self._keys.single("generation"), self.view.generation_revision),
            # A new leader may not have seen the last one's commits yet, and must not go back behind them.
            Modified(self._keys.single("snapshot"), self.view.snapshot_revision),
            # Nor may one that has just published be told by itself, in doubt, that it did not.
            Modified(self._keys.single("persist"), self.view.persist_revision),
        )
        done = await self._store.commit(conditions, self._operations(action))
        return done.revision if done.succeeded else 0

    def _operations(self, action: actions.Action) -> tuple[Put | Delete, ...]:
        single = self._keys.single
        match action:
            case actions.Open(generation):
                resume = generation.resume
                log.info(
                    "generation %d: %d ranks on %d nodes (%s)",
                    generation.generation, generation.world_size, len(generation.members), generation.reason,
                )  # fmt: skip
                return (
                    Put(single("generation"), generation.encode()),
                    Delete(single("closing")),
                    Delete(single("persist")),
                    # They spoke of ranks as they were.
                    Delete(single("verdicts")),
                    Delete(self._keys.restart(), prefix=True),
                    Put(single("snapshot"), resume.encode())
                    if resume
                    else Delete(single("snapshot")),
                )
            case actions.Close(closing):
                log.warning("generation %d ends: %s", closing.generation, closing.reason)
                return (Put(single("closing"), closing.encode()),)
            case actions.Commit(commit):
                return (Put(single("snapshot"), commit.encode()),)
            case actions.Persist(request):
                return (Put(single("persist"), request.encode()),)
            case actions.Publish(request):
                snapshot = request.commit.snapshot
                now_s = time.time()
                stored = CheckpointRecord(
                    snapshot.step,
                    snapshot.generation,
                    request.url,
                    now_s,
                    max(0.0, now_s - request.at_s),
                )
                return (Put(single("checkpoint"), stored.encode()), Delete(single("persist")))
            case actions.CancelPersist(request, reason):
                log.error("checkpoint not stored: %s", reason)
                failure = StoreFailure(request.commit.snapshot.step, reason)
                return (Put(single("store_failure"), failure.encode()), Delete(single("persist")))
            case actions.RecordRecovery(history):
                return (Put(single("history"), history.encode()),)
            case actions.Finish(result):
                return (Put(single("result"), result.encode()),)
