"""Runs this node's agent for `keepstep run`, once the command line is understood.

It connects to the coordinator or starts one, names the node, and runs the agent, again after each
eviction from which the node may return.
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
from keepstep.elastic.cli.coordinator import coordinator
from keepstep.elastic.cli.follow import views
from keepstep.elastic.cli.signals import Signals
from keepstep.elastic.errors import JobFailed, UsageError
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.view import Keys
from keepstep.elastic.store.contract import Store
from keepstep.elastic.store.local_jobs import registered
from keepstep.elastic.worker.messages import Command
from keepstep.private_files import NotPrivate

log = logging.getLogger("keepstep")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStart:
    """The settings and resources that a node is started with.

    Args:
        options: of `keepstep run`.
        command: what the workers run.
        policy: the job's limits.
        workers: how many workers run here.
        limits: the snapshot server's rates.
        environment: the workers' environment.
        directory: private, for sockets and files; removed when the node ends.
        fork_server: forks the workers; None: each is started as a program.
    """

    options: Mapping[str, Any]
    command: Command
    policy: RendezvousPolicy
    workers: int
    limits: RateLimits
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
            coordinator(start.options, start.policy.min_nodes, start.directory)
        )
        if job is None:
            # All nodes of a job must find the same name; other jobs of this machine another one.
            suffix = f"-{uuid.uuid4().hex[:6]}" if connected.is_private else ""
            job = f"{Path(start.command.target).stem}{suffix}"
        if connected.is_own:
            stack.enter_context(registered(job, connected.address))
        host = own_host(connected.address, start.options["local_addr"])
        try:
            node = start.options["node"] or stack.enter_context(own_node_name(job))
        except (NotPrivate, OSError) as error:
            raise UsageError(f"no name for this node: {error}; give --node NAME") from error
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
        )
        log.info("job %s on %s", job, connected.address.url)
        if connected.is_own and start.policy.max_nodes > 1:
            log.warning(
                "this node serves the coordinator: if it is lost, training stands still until its "
                "line is run again; --store with an etcd of its own outlives any node"
            )
        failure: JobFailed | None = None
        succeeded = False
        try:
            succeeded = await _take_part(connected.store, config, start.fork_server, stop)
        except asyncio.CancelledError:
            log.error("interrupted: workers were killed")
            return False
        except JobFailed as failed:
            # The others may go on without this node, for instance if its doctor keeps it away.
            failure = failed
        if start.fork_server is not None:
            await start.fork_server.close()
        if connected.is_own:
            serving = asyncio.ensure_future(_serve_others(connected.store, job))
            stop.connect(None, serving)
            try:
                await serving
            except asyncio.CancelledError:
                log.error("interrupted: the coordinator ends, and with it the job")
        if failure is not None:
            raise failure
        return succeeded


async def _take_part(
    store: Store, config: AgentConfig, fork_server: ForkServerProcess | None, stop: Signals
) -> bool:
    """Run this node's agent, again after each eviction from which it may return.

    Returns whether the job has ended; False if the node has left before.
    """
    for returned in itertools.count():
        agent = Agent(config, store, fork_server)
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


async def _serve_others(store: Store, job: str) -> None:
    """Keep the coordinator that this process has started until the other nodes have left."""
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


def _digest(command: Command, policy: RendezvousPolicy) -> str:
    """Return a digest of the settings that all nodes of a job must agree on."""
    parts = (
        command.kind, Path(command.target).name, *command.arguments,
        policy.min_nodes, policy.max_nodes, policy.parity, policy.group_size,
    )  # fmt: skip
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]
