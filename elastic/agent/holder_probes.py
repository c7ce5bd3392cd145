"""Finds out whether lost nodes are gone for good, while the leader waits for them to return."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from keepstep.elastic.agent.peer_connections import probe
from keepstep.elastic.rendezvous.records import Member

_RETRY_S = 0.5


class HolderProbes:
    """Asks agents whether they live, as long as they are waited for; `ask(())` ends all of it.

    Args:
        on_found: called when an agent's process is known to be gone.

    Attributes:
        gone: where the agents were reached whose processes are certainly gone.
    """

    def __init__(self, on_found: Callable[[], None]) -> None:
        self._on_found = on_found
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.gone: frozenset[str] = frozenset()

    def ask(self, members: Iterable[Member]) -> None:
        """Ask the agents of exactly these members."""
        wanted = {member.agent: member for member in members}
        for agent in set(self._tasks) - set(wanted):
            self._tasks.pop(agent).cancel()
        for agent, member in wanted.items():
            if agent not in self._tasks and agent not in self.gone:
                self._tasks[agent] = asyncio.create_task(self._probe_until_gone(member))

    async def _probe_until_gone(self, member: Member) -> None:
        lives = await probe(member)
        while lives is not False:
            await asyncio.sleep(_RETRY_S)
            lives = await probe(member)
        self.gone |= {member.agent}
        self._on_found()
