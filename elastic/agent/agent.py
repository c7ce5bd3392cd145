"""The node agent, one per node: it owns the ports that other nodes know and takes part in a job."""

from __future__ import annotations

import asyncio

from keepstep.elastic.agent.config import AgentConfig
from keepstep.elastic.agent.departure import Departure
from keepstep.elastic.agent.fork_server_process import ForkServerProcess
from keepstep.elastic.agent.participation import Participation
from keepstep.elastic.agent.peer_connections import AgentListener
from keepstep.elastic.agent.state_directory import StateDirectory
from keepstep.elastic.agent.store_socket import StoreSocket
from keepstep.elastic.agent.worker_group import WorkerGroup
from keepstep.elastic.rendezvous.kept_state import KeptState
from keepstep.elastic.store.contract import Store
from keepstep.elastic.worker.log_files import output_directory


class Agent:
    """Runs one node's part of a job. `run` returns when the job has ended or the node has left.

    Args:
        config: what runs here, and how.
        store: the coordinator.
        fork_server: what forks the workers; None: each is started as a program.
        left: what the last agent of this node has left, and its directory; None: nothing.
    """

    def __init__(
        self,
        config: AgentConfig,
        store: Store,
        fork_server: ForkServerProcess | None = None,
        left: tuple[StateDirectory, KeptState] | None = None,
    ) -> None:
        self._left = left
        self._config = config
        self._store = store
        self._fork_server = fork_server
        self._wake = asyncio.Event()
        self._departure = Departure(self._wake.set)
        self._store_socket = StoreSocket(config.host)

    def ask_to_leave(self) -> None:
        """Begin to leave in good order (a preemption notice, Ctrl-C): hand over the state first."""
        self._departure.begin("leaving: handing over what this node holds (again to quit at once)")

    async def run(self) -> bool:
        """Take part in the job until it ends; return False if this node left before.

        Raises:
            JobFailed: the job failed; the message names the first failing rank and why.
            UsageError: the job could not be joined.
            StoreUnavailable: the coordinator is gone.
        """
        agent_listener = await AgentListener.open(
            self._config.node,
            self._config.host,
            max_peers=self._config.policy.max_nodes,
            output_directory=output_directory(self._config.environment),
        )
        try:
            participation = Participation(
                self._config,
                self._store,
                agent_listener=agent_listener,
                store_socket=self._store_socket,
                departure=self._departure,
                wake=self._wake,
                worker_group=WorkerGroup(
                    self._config.command,
                    self._config.workers,
                    self._config.spares,
                    self._config.environment,
                    self._wake.set,
                    self._fork_server,
                ),
                left=self._left,
            )
            return await participation.run()
        finally:
            self._store_socket.close()
            await agent_listener.close()
