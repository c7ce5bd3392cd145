"""The node agent: one per node, it joins the job, and joins again when its membership is lost."""

from __future__ import annotations

import asyncio
import logging
import time

from keepstep.elastic.agent.config import AgentConfig
from keepstep.elastic.agent.participation import Departure, Participation
from keepstep.elastic.agent.peer_connections import AgentListener
from keepstep.elastic.agent.store_socket import StoreSocket
from keepstep.elastic.errors import LeaseLost, StoreUnavailable
from keepstep.elastic.store.contract import Store

log = logging.getLogger("keepstep")


class Agent:
    """Runs one node's part of a job. `run` returns when the job has ended or the node has left."""

    def __init__(self, config: AgentConfig, store: Store) -> None:
        self._config = config
        self._store = store
        self._wake = asyncio.Event()
        self._departure = Departure(self._wake.set)
        self._store_socket = StoreSocket(config.host)
        self._member_until_s = float("-inf")

    def ask_to_leave(self) -> None:
        """Begin to leave in good order (a preemption notice, Ctrl-C): hand over the state first."""
        self._departure.begin("leaving: handing over what this node holds (again to quit at once)")

    async def run(self) -> bool:
        """Take part in the job until it ends; return False if this node left before.

        Raises:
            JobFailed: the job failed; the message names the first failing rank and why.
            UsageError: the job could not be joined.
            StoreUnavailable: the coordinator is gone.
            SnapshotUnavailable: this node's snapshot server is gone.
        """
        policy = self._config.policy
        agent_listener = await AgentListener.open(
            self._config.node, self._config.host, max_peers=policy.max_nodes
        )
        try:
            while True:
                try:
                    return await self._take_part(agent_listener)
                except LeaseLost as lost:
                    log.error("%s; its workers are stopped, joining again", lost)
                except StoreUnavailable as unavailable:
                    # An outage of the coordinator ends training, but not the job: other nodes wait
                    # for the outage to end as well.
                    if time.monotonic() > self._member_until_s + policy.quorum_timeout_s:
                        raise
                    log.error("%s; its workers are stopped, trying again", unavailable)
        finally:
            self._store_socket.close()
            await agent_listener.close()

    async def _take_part(self, agent_listener: AgentListener) -> bool:
        """Join the job, and take part until it ends, this node leaves, or its lease is lost."""
        participation = Participation(
            self._config,
            self._store,
            agent_listener=agent_listener,
            store_socket=self._store_socket,
            departure=self._departure,
            wake=self._wake,
        )
        try:
            return await participation.run()
        finally:
            if participation.has_joined:
                self._member_until_s = time.monotonic()
