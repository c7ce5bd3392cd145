"""Has the manifests of checkpoints written while the leader decides other things.

The shell around `keepstep.elastic.rendezvous.publication`, which says what is decided meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from keepstep.elastic.errors import JobFailed
from keepstep.elastic.rendezvous import publication
from keepstep.elastic.rendezvous.actions import CancelPersist, Publish
from keepstep.elastic.rendezvous.decision import Decision
from keepstep.elastic.rendezvous.publication import Publication
from keepstep.elastic.rendezvous.view import View


class Publisher:
    """Owns the task that has a manifest written; `stop` ends it.

    Args:
        write: writes a manifest; raises JobFailed if it is not written.
        on_end: called when a manifest is written, or has failed to be.
    """

    def __init__(
        self, write: Callable[[Publish], Awaitable[None]], on_end: Callable[[], None]
    ) -> None:
        self._write = write
        self._on_end = on_end
        self._publication: Publication | None = None
        self._task: asyncio.Task[str] | None = None

    def conclude(self, view: View) -> Publish | CancelPersist | None:
        """Return the action that records what became of the manifest, once that is known."""
        if self._publication is not None and self._task is not None and self._task.done():
            self._publication = replace(self._publication, failure=self._task.result())
        return publication.conclude(self._publication, view)

    def follow(self, decision: Decision, view: View, now_s: float) -> Decision:
        """Return what of a decision is performed now; a manifest that it asks for is begun."""
        before = self._publication
        after, decision = publication.follow(before, decision, view, now_s)
        if after is None or before is None or after.action != before.action:
            self.stop()
            if after is not None:
                self._task = asyncio.create_task(self._run(after.action))
                self._task.add_done_callback(lambda _: self._on_end())
        elif not after.is_under_way:
            # Given up: whether storage takes it after all is not waited for.
            self._cancel()
        self._publication = after
        return decision

    def stop(self) -> None:
        """Wait for no manifest any more."""
        self._cancel()
        self._publication = None

    def _cancel(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def _run(self, action: Publish) -> str:
        try:
            await self._write(action)
        except JobFailed as error:
            return str(error)
        return ""
