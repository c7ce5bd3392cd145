"""Finds out whether lost nodes are gone for good, while the leader waits for them to return.

A node whose agent has ended returns with what it held, if its snapshot server lives and its agent
is started again in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from keepstep.elastic.agent.peer_connections import has_lost_memory, probe
from keepstep.elastic.rendezvous.records import Member

_RETRY_S = 0.5


class HolderProbes:
    """Asks whether nodes can return, as long as they are waited for; `ask(())` ends all of it.

    Args:
        on_found: called when a node's agent and its memory are known to be gone.

    Attributes:
        gone: where the agents of these nodes were reached.
    """

    def __init__(self, on_found: Callable[[], None]) -> None:
        self._on_found = on_found
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.gone: frozenset[str] = frozenset()

    def ask(self, members: Iterable[Member]) -> None:
        """Ask the agents and servers of exactly these members."""
        wanted = {member.agent: member for member in members}
        for agent in set(self._tasks) - set(wanted):
            self._tasks.pop(agent).cancel()
        for agent, member in wanted.items():
            if agent not in self._tasks and agent not in self.gone:
                self._tasks[agent] = asyncio.create_task(self._probe_until_gone(member))

    async def _probe_until_gone(self, member: Member) -> None:
        is_gone = False
        while not is_gone:
            is_gone = await probe(member) is False and await has_lost_memory(member)
            await asyncio.sleep(0.0 if is_gone else _RETRY_S)
        self.gone |= {member.agent}
        self._on_found()
