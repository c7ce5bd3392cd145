"""Enters the job's generations on this node, and ends them, as the leader has decided."""

from __future__ import annotations

import logging
from collections.abc import Callable

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.agent.assignments import JobContext, assignments_of
from keepstep.elastic.agent.local_node import LocalNode
from keepstep.elastic.agent.node_snapshots import NodeSnapshots
from keepstep.elastic.agent.standstill import StandstillWatch
from keepstep.elastic.agent.store_socket import StoreSocket
from keepstep.elastic.node.state import (
    Action,
    Drain,
    EndPaused,
    Enter,
    Fence,
    OrderAbort,
    due_restarts,
    followed,
    next_action,
)
from keepstep.elastic.rendezvous.records import Generation, NodePhase, RestartRequest
from keepstep.elastic.worker.messages import AbortOrdered, Assignment, CommandKind

log = logging.getLogger("keepstep")


class GenerationFollower:
    """Carries out the generation document on one node.

    Args:
        node: which enters and ends generations.
        snapshots: its snapshots.
        store_socket: the port that is announced for the next generation's torch store.
        standstill: watches whether its workers go on.
        on_change: called when there is more to do.
    """

    def __init__(
        self,
        node: LocalNode,
        snapshots: NodeSnapshots,
        store_socket: StoreSocket,
        standstill: StandstillWatch,
        on_change: Callable[[], None],
    ) -> None:
        self._node = node
        self._snapshots = snapshots
        self._store_socket = store_socket
        self._standstill = standstill
        self._reported = 0
        self._is_on_standby = False
        self._on_change = on_change

    async def follow(self) -> None:
        """Enter a new generation, or end the one that is closing."""
        membership, worker_group = self._node.membership, self._node.worker_group
        view = membership.view
        generation = followed(self._node.state, view)
        if generation is None:
            return
        for request in due_restarts(self._node.state, view):
            await self._restart(request)
            await membership.complete_restart_request(request)
        if generation.generation == self._node.state.entered:
            worker_group.check_entry()
            self._standstill.follow()
        while action := next_action(self._node.state, view):
            if not await self._perform(action):
                break
        if isinstance(action, Enter):
            # A request to store may have come with the generation.
            self._on_change()
            return
        membership.update(
            times=worker_group.times(),
            restored_from=worker_group.restored_from,
            loaded=worker_group.loaded,
            replica_comparison=worker_group.replica_comparison,
        )
        self._report_recovery(generation)

    def _report_recovery(self, generation: Generation) -> None:
        """Log once that training goes on in a generation after the first."""
        times = self._node.worker_group.times()
        is_first = generation.generation == 1
        if is_first or self._reported == generation.generation or "stepped" not in times:
            return
        self._reported = generation.generation
        resume = generation.resume
        resumed = resume.snapshot.step if resume is not None else int(times["resumed_step"])
        again = max(0, generation.lost_from_step - resumed)
        ranks = generation.world_size
        log.info(
            "generation %d: training goes on after step %d, %.1f s after its cause was noticed, "
            "with %d rank%s; %d step%s computed again",
            generation.generation,
            resumed,
            max(0.0, times["stepped"] - generation.detected_at_s),
            ranks,
            "s" if ranks != 1 else "",
            again,
            "s" if again != 1 else "",
        )

    async def _restart(self, request: RestartRequest) -> None:
        """Kill a rank's worker; if the job stands still because of it, its stack comes first."""
        worker_group = self._node.worker_group
        worker = worker_group.may_restart(request.rank)
        if worker is None:
            return
        if request.is_standstill:
            stack = await self._standstill.stacks_of(worker)
            node = self._node.config.node
            text = f"rank {request.rank} on {node} was restarted: {request.reason}\n{stack}"
            log.error("%s", text)
            worker_group.stand_still(text)
        worker_group.restart(request.rank, request.reason)

    async def _enter(self, generation: Generation) -> None:
        """Put the workers into a generation, or end them if the node has no place in it."""
        membership = self._node.membership
        # First: what the server does from here on is of use only to an agent that knows of it.
        self._snapshots.keep()
        await self._snapshots.server.open_generation(generation)
        resume = generation.resume
        # To resume from storage goes back behind whatever older generations left in memory.
        await self._snapshots.commit(
            resume.snapshot if resume else SnapshotId(generation.generation, -1)
        )
        if resume is not None:
            await self._snapshots.server.rebuild(resume)
        member = generation.member(self._node.config.node)
        if member is None:
            if not self._is_on_standby:
                log.info(
                    "on standby: generation %d has no place for this node, which waits for one",
                    generation.generation,
                )
            self._is_on_standby = True
            await self._node.worker_group.enter_as_spare(generation.generation)
            return
        if self._is_on_standby:
            first, last = member.ranks[0], member.ranks[-1]
            ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
            log.info("generation %d: this node takes a place, as %s", generation.generation, ranks)
        self._is_on_standby = False
        context = JobContext(
            job=self._node.config.job,
            secret=self._snapshots.server.secret,
            server=self._snapshots.server.local_address,
            max_restarts=self._node.config.policy.max_restarts,
        )
        assignments = assignments_of(generation, member, context)
        if member.first_rank == 0:
            await self._enter_and_serve_store(assignments)
        else:
            await self._node.worker_group.enter(assignments)
        await self._snapshots.server.refresh()
        membership.update(
            generation=generation.generation,
            phase=NodePhase.STARTING,
            failure=None,
            finishing=False,
            persisted=None,
            restored_from="",
            loaded=None,
            restore_comparison=None,
            replica_comparison=None,
            times={},
            sealed=self._snapshots.server.sealed,
            protected=self._snapshots.server.protected,
            committed=None,
        )
        if any(held.generation == generation.generation for held in membership.record.protected):
            # The workers were sooner: the record was that of the last generation, which has ended,
            # when this was protected, and so it was not reported.
            self._snapshots.report()

    async def _enter_and_serve_store(self, assignments: tuple[Assignment, ...]) -> None:
        """Enter as the node of rank 0, at whose announced port the generation meets."""
        # The port serves one generation's torch store; the next generation gets another.
        with self._store_socket.take() as listening:
            # At once: however entering ends, the record must not name the port that is taken.
            self._node.membership.update(store_port=self._store_socket.port)
            if self._node.config.command.kind is CommandKind.PROGRAM:
                listening.close()  # A program serves its rendezvous itself.
                await self._node.worker_group.enter(assignments)
            else:
                await self._node.worker_group.enter(assignments, listening.fileno())

    async def _perform(self, action: Action) -> bool:
        """Perform an action; return whether to go on with the next one at once."""
        match action:
            case Enter(generation):
                await self._enter(generation)
                return False
            case Fence(number):
                await self._snapshots.fence(number)
            case OrderAbort(number):
                self._node.ordered = number
                await self._node.worker_group.broadcast(AbortOrdered(generation=number))
            case Drain(number, abort):
                return await self._drain(number, abort=abort)
            case EndPaused(number):
                self._node.paused = number
                await self._node.worker_group.end_drained()
        return True

    async def _drain(self, generation: int, *, abort: bool) -> bool:
        """End the generation here; once no worker can write, record what is sealed.

        Returns:
            Whether it is over.
        """
        limit_s = self._node.config.abort_timeout_s if abort else self._node.config.drain_timeout_s
        if not await self._node.worker_group.drain(abort=abort, limit_s=limit_s):
            return False
        if abort:
            # If no node is lost, what is sealed suffices.
            await self._snapshots.server.finish_protection()
        await self._snapshots.server.verify()
        self._node.drained = generation
        self._snapshots.record(step=self._node.worker_group.step, phase=NodePhase.DRAINED)
        return True

    async def drain_at_once(self) -> bool:
        """Drain by abort without the leader's order; return whether no worker can write any more.

        For a node that is no member any more, after whose loss nothing uncommitted is used, or
        whose snapshot server has died with all that was sealed here.
        """
        group = self._node.worker_group
        has_drained = await group.drain(abort=True, limit_s=self._node.config.abort_timeout_s)
        generation = group.generation
        if not has_drained and group.awaits_abort_order and self._node.ordered != generation:
            self._node.ordered = generation
            await group.broadcast(AbortOrdered(generation=generation))
        return has_drained
