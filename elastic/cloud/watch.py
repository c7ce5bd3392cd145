"""Follows a cloud's notices, and lets the node leave in time.

A service that does not answer is named once, and asked again: the notices that it gave before
stand.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable

import aiohttp

from keepstep.elastic.cloud.metadata import Source, find_cloud, session, sources
from keepstep.elastic.cloud.notice import (
    MARGIN_S,
    Cloud,
    Notice,
    describe_changes,
    leaving_time_s,
)

log = logging.getLogger("keepstep")

_RETRY_S = 5.0
_DEFAULT_GRACE_S = 30.0
_FAILURES = (aiohttp.ClientError, TimeoutError, ValueError)


async def look(choice: str) -> tuple[bool, list[str]]:
    """Ask a cloud once; return whether it has answered everything, and a line for each answer.

    Args:
        choice: one of `CHOICES`, but `off`.
    """
    cloud = find_cloud() if choice == "auto" else Cloud(choice)
    if cloud is None:
        return False, [f"the firmware of this machine names none of {', '.join(Cloud)}"]
    has_answered, lines = True, []
    async with session() as opened:
        for source in sources(cloud, os.environ):
            try:
                notices = await source.read(opened)
            except _FAILURES as error:
                has_answered = False
                lines.append(f"no answer from {source.url}: {_reason(error)}")
                continue
            lines.append(f"answers at {source.url}, with {len(notices)} notices")
            lines += describe_changes((), notices, _DEFAULT_GRACE_S + MARGIN_S, time.time())
    return has_answered, [f"{cloud.upper()} {line}" for line in lines]


def start_watch(
    choice: str, grace_s: float, leave: Callable[[], None]
) -> asyncio.Task[None] | None:
    """Begin to follow the notices; None if there are none to follow. The caller cancels the task.

    Args:
        choice: one of `CHOICES`.
        grace_s: how long the node may take to leave in good order.
        leave: called once, when the node is to leave.
    """
    if choice == "off":
        return None
    if choice == "auto":
        found = find_cloud()
        if found is None:
            log.warning(
                "--notices auto: the firmware names none of %s, so no notices are read; give one "
                "of them if this machine is there",
                ", ".join(Cloud),
            )
            return None
        choice = found
    cloud = Cloud(choice)
    watch = NoticeWatch(cloud, sources(cloud, os.environ), grace_s + MARGIN_S, leave)
    task = asyncio.create_task(watch.run(), name="notices")
    task.add_done_callback(_report_end)
    return task


def _reason(error: Exception) -> str:
    return str(error) or "no answer in time"


def _report_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("notices are no longer read", exc_info=error)


class NoticeWatch:
    """Follows the notices of one machine. Used once: `run`.

    Args:
        cloud: whose notices.
        asked: what to ask.
        lead_s: how long before the machine is taken the node leaves.
        leave: called once, when it is to leave.
    """

    def __init__(
        self, cloud: Cloud, asked: tuple[Source, ...], lead_s: float, leave: Callable[[], None]
    ) -> None:
        self._cloud = cloud
        self._sources = asked
        self._lead_s = lead_s
        self._leave = leave
        self._standing: dict[str, tuple[Notice, ...]] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Follow the notices until the node is to leave."""
        async with session() as opened, asyncio.TaskGroup() as group:
            following = [group.create_task(self._follow(opened, it)) for it in self._sources]
            await self._await_departure()
            for task in following:
                task.cancel()
        self._leave()

    async def _await_departure(self) -> None:
        while True:
            self._changed.clear()
            standing = [notice for notices in self._standing.values() for notice in notices]
            leaving_s = leaving_time_s(standing, self._lead_s)
            left_s = None if leaving_s is None else leaving_s - time.time()
            if left_s is not None and left_s <= 0:
                return
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _follow(self, opened: aiohttp.ClientSession, source: Source) -> None:
        is_silent = False
        while True:
            pause_s = source.pause_s
            try:
                notices = await source.read(opened)
            except _FAILURES as error:
                if not is_silent:
                    log.warning(
                        "%s: no notices from %s (%s); asking again until it answers",
                        self._cloud.upper(), source.url, _reason(error),
                    )  # fmt: skip
                is_silent = True
                pause_s = _RETRY_S
            else:
                if is_silent or source.url not in self._standing:
                    log.info("%s: notices are read from %s", self._cloud.upper(), source.url)
                is_silent = False
                self._update(source, notices)
            await asyncio.sleep(pause_s)

    def _update(self, source: Source, notices: tuple[Notice, ...]) -> None:
        before = self._standing.get(source.url, ())
        for line in describe_changes(before, notices, self._lead_s, time.time()):
            log.warning("%s %s", self._cloud.upper(), line)
        self._standing[source.url] = notices
        self._changed.set()
