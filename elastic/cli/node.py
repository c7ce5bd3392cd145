"""Runs this node's agent for `keepstep run`, once the command line is understood.

It connects to the coordinator or starts one, names the node, finds what the node's last agent has
left in memory, and runs the agent, again after each eviction from which the node may return.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.checkpoint.snapshot.server.limits import RateLimits
from keepstep.elastic.agent.agent import Agent
from keepstep.elastic.agent.config import AgentConfig
from keepstep.elastic.agent.fork_server_process import ForkServerProcess
from keepstep.elastic.agent.node_name import own_node_name
from keepstep.elastic.agent.own_host import own_host
from keepstep.elastic.agent.readmission import (
    pause_before_return_s,
    readmit,
    return_after_eviction,
)
from keepstep.elastic.agent.snapshot_process import end_left_server
from keepstep.elastic.agent.state_directory import StateDirectory, hold_states
from keepstep.elastic.cli.coordinator import Coordinator, coordinator
from keepstep.elastic.cli.follow import views
from keepstep.elastic.cli.signals import Signals
from keepstep.elastic.errors import JobFailed, UsageError
from keepstep.elastic.rendezvous.kept_state import Keeping, KeptState, choose_state
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.view import Keys
from keepstep.elastic.store.contract import Store
from keepstep.elastic.store.local_jobs import registered
from keepstep.elastic.store.member_process import CoordinatorMember
from keepstep.elastic.worker.messages import Command, CommandKind
from keepstep.private_files import NotPrivate

log = logging.getLogger("keepstep")

_LOOK_S = 0.2
_FAREWELL_S = 1.0
_GONE_AFTER_END_S, _GONE_S = 5.0, 15.0
"""Seconds without a majority after which a member ends with its agent, whose job is over or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStart:
    """The settings and resources that a node is started with.

    Args:
        options: of `keepstep run`.
        command: what the workers run.
        policy: the job's limits.
        workers: how many workers run here.
        limits: the snapshot server's rates.
        keep_s: how long what is in memory is kept for the node's next agent.
        environment: the workers' environment.
        directory: private, for sockets and files; removed when the node ends.
        fork_server: forks the workers; None: each is started as a program.
    """

    options: Mapping[str, Any]
    command: Command
    policy: RendezvousPolicy
    workers: int
    limits: RateLimits
    keep_s: float
    environment: Mapping[str, str]
    directory: Path
    fork_server: ForkServerProcess | None


async def run_node(start: NodeStart, stop: Signals) -> bool:
    """Run this node's agent; return whether the job succeeded, and False if the node left before.

    Args:
        start: what the node is started with.
        stop: the signals that end it.

    Raises:
        UsageError: an option is invalid.
        StoreUnavailable: the coordinator does not answer.
        JobFailed: the job ended in failure.
    """
    async with AsyncExitStack() as stack:
        job = start.options["job"] or start.options["rdzv_id"]
        connected = await stack.enter_async_context(
            coordinator(
                start.options,
                start.policy.min_nodes,
                start.directory,
                start.policy.quorum_timeout_s,
            )
        )
        host = own_host(connected.address, start.options["local_addr"])
        line = _line(start, host)
        left: tuple[StateDirectory, KeptState] | None = None
        is_unnamed = job is None and connected.is_private
        if is_unnamed:
            keeping = Keeping(keep_s=start.keep_s, place=_unnamed_place(start), line=line)
            left = await _find_left(keeping)
        if job is None:
            # All nodes of a job must find the same name; other jobs of this machine another one.
            suffix = f"-{uuid.uuid4().hex[:6]}" if connected.is_private else ""
            job = left[1].job if left else f"{Path(start.command.target).stem}{suffix}"
        if connected.is_own or connected.member is not None:
            name = connected.member.member.endpoint if connected.member is not None else ""
            stack.enter_context(registered(job, connected.address, name))
        try:
            node = start.options["node"] or stack.enter_context(own_node_name(job))
        except (NotPrivate, OSError) as error:
            raise UsageError(f"no name for this node: {error}; give --node NAME") from error
        if not is_unnamed:
            place = _place(connected, job, node)
            keeping = Keeping(keep_s=start.keep_s, place=place, line=line)
            left = await _find_left(keeping)
        await readmit(connected.store, job, node, start.directory)
        config = AgentConfig(
            job=job,
            node=node,
            host=host,
            workers=start.workers,
            command=start.command,
            policy=start.policy,
            environment=start.environment,
            run_directory=start.directory,
            digest=_digest(start.command, start.policy),
            domain=start.options["domain"],
            lease_ttl_s=start.options["lease_ttl"],
            drain_timeout_s=start.options["drain_timeout"],
            abort_timeout_s=start.options["abort_timeout"],
            grace_s=start.options["grace"],
            spares=start.options["spares"],
            limits=start.limits,
            is_recorded=start.options["monitor"],
            serves_coordinator=connected.is_own,
            keeping=keeping,
        )
        log.info("job %s on %s", job, connected.address.url)
        if connected.is_own and start.policy.max_nodes > 1:
            log.warning(
                "this node serves the coordinator alone: if it is lost, training stands still "
                "until its line is run again, else the job ends; --rdzv-endpoint with three names, "
                "or --store with an etcd of its own, outlives any node"
            )
        failure: JobFailed | None = None
        succeeded = False
        try:
            succeeded = await _take_part(connected.store, config, start.fork_server, stop, left)
        except asyncio.CancelledError:
            log.error("interrupted: workers were killed")
            return False
        except JobFailed as failed:
            # The others may go on without this node, for instance if its doctor keeps it away.
            failure = failed
        if start.fork_server is not None:
            await start.fork_server.close()
        if connected.is_own or connected.member is not None:
            is_over = stop.number is None
            serving = asyncio.ensure_future(_serve_others(connected, job, is_over))
            stop.connect(None, serving)
            try:
                await serving
            except asyncio.CancelledError:
                log.error("interrupted: the coordinator ends, and with it the job")
        if failure is not None:
            raise failure
        return succeeded


async def _find_left(keeping: Keeping) -> tuple[StateDirectory, KeptState] | None:
    """Return what the last agent of this place has left, if this one goes on from it.

    Raises:
        UsageError: the runtime directory cannot be used.
    """
    try:
        found = [(directory, directory.read()) for directory in hold_states(keeping.place)]
    except (NotPrivate, OSError) as error:
        raise UsageError(f"what the last run has left cannot be read: {error}") from error
    chosen, why = choose_state([kept for _, kept in found], keeping)
    for number, (directory, kept) in enumerate(found):
        if number != chosen:
            log.warning("the state of job %s that is kept in memory is dropped: %s", kept.job, why)
            await end_left_server(directory.path, kept.record.node, kept.secret)
            directory.remove()
    return None if chosen is None else found[chosen]


async def _take_part(
    store: Store,
    config: AgentConfig,
    fork_server: ForkServerProcess | None,
    stop: Signals,
    left: tuple[StateDirectory, KeptState] | None,
) -> bool:
    """Run this node's agent, again after each eviction from which it may return.

    Returns whether the job has ended; False if the node has left before.
    """
    for returned in itertools.count():
        agent = Agent(config, store, fork_server, left if returned == 0 else None)
        running = asyncio.ensure_future(agent.run())
        stop.connect(agent, running)
        if await running:
            return True
        if stop.number is not None:
            return False
        returning = asyncio.ensure_future(
            return_after_eviction(
                store,
                config.job,
                config.node,
                config.run_directory,
                pause_before_return_s(returned),
                config.policy.quorum_timeout_s,
            )
        )
        stop.connect(None, returning)
        try:
            if not await returning:
                return False
        except asyncio.CancelledError:
            if not returning.cancelled():
                raise
            return False
    raise AssertionError("unreachable: the count does not end")


async def _serve_others(connected: Coordinator, job: str, is_over: bool) -> None:
    """Keep what this process serves of the coordinator until the other nodes have left.

    Args:
        connected: the coordinator.
        job: the job's name.
        is_over: whether the job has ended, and not this node alone.
    """
    if connected.member is not None and not is_over and not await connected.member.is_needed():
        return
    until = [asyncio.ensure_future(_others_have_left(connected.store, job))]
    if connected.member is not None:
        until.append(asyncio.ensure_future(_is_dispensable(connected.member, is_over)))
    try:
        done, _ = await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            ended.result()
        if connected.member is not None:
            # What the last node has written to leave is not yet known to its own member.
            await asyncio.sleep(_FAREWELL_S)
    finally:
        for waiting in until:
            waiting.cancel()
        await asyncio.gather(*until, return_exceptions=True)


async def _others_have_left(store: Store, job: str) -> None:
    has_warned = False
    async for view in views(store, Keys(job)):
        if not view.nodes:
            return
        if view.result is None and not has_warned:
            has_warned = True
            log.warning(
                "still serving the coordinator for %s; interrupt again to end it, and their job",
                ", ".join(sorted(view.nodes)),
            )


async def _is_dispensable(member: CoordinatorMember, is_over: bool) -> None:
    """Return once the coordinator does not need this member, or it is of no use to others.

    Once the job is over, the others need the majority until they know it. Where that is gone, the
    nodes that have left with it have seen all nodes leave.
    """
    longest_away_s = _GONE_AFTER_END_S if is_over else _GONE_S
    while True:
        if member.away_s > longest_away_s or not (is_over or await member.is_needed()):
            return
        await asyncio.sleep(_LOOK_S)


def _place(connected: Coordinator, job: str, node: str) -> str:
    """Return the name by which the next agent of this node and job finds what this one leaves."""
    coordinator_name = "" if connected.is_private else connected.address.url
    return "\0".join((coordinator_name, job, node))


def _unnamed_place(start: NodeStart) -> str:
    """Return that name for a job that has no name of its own, and one node: it is its script."""
    command = start.command
    is_file = command.kind is CommandKind.SCRIPT
    target = str(Path(command.target).resolve()) if is_file else command.target
    return "\0".join((str(Path.cwd()), command.kind, target, start.options["node"] or ""))


def _line(start: NodeStart, host: str) -> str:
    """Return a digest of what has to be equal so that a run goes on from another one's memory."""
    parts = (
        start.command.kind, Path(start.command.target).name, *start.command.arguments,
        start.workers, host, start.limits,
    )  # fmt: skip
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def _digest(command: Command, policy: RendezvousPolicy) -> str:
    """Return a digest of the settings that all nodes of a job must agree on."""
    parts = (
        command.kind, Path(command.target).name, *command.arguments,
        policy.min_nodes, policy.max_nodes, policy.parity, policy.group_size,
    )  # fmt: skip
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]
