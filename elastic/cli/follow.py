"""Follows a job's state and evicts nodes: implements `keepstep status` and `keepstep evict`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

from rich.console import Console
from rich.live import Live

from keepstep.elastic.cli.status import render, summary
from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.records import Eviction
from keepstep.elastic.rendezvous.view import Keys, View, apply, from_listing
from keepstep.elastic.store.address import parse_address
from keepstep.elastic.store.contract import Delete, Modified, Put, Reset
from keepstep.elastic.store.etcd import EtcdStore
from keepstep.elastic.store.local_jobs import local_jobs


def follow(store: str | None, job: str | None, *, once: bool, as_json: bool) -> None:
    """Show a job's state, once or until it ends or the user interrupts.

    Args:
        store: the coordinator's URL; None: that of the job on this machine.
        job: name of the job; None: the only one on this machine.
        once: print the state once and return.
        as_json: print one JSON object per state.

    Raises:
        UsageError: there is no such job, or the name is missing.
    """
    url, name = _find_job(store, job)
    try:
        asyncio.run(_follow(url, name, once, as_json))
    except KeyboardInterrupt:
        return


def evict_node(store: str | None, job: str | None, node: str, reason: str, *, undo: bool) -> None:
    """Request a node to leave and stay away, or let an evicted node return.

    Args:
        store: the coordinator's URL; None: that of the job on this machine.
        job: name of the job; None: the only one on this machine.
        node: name of the node.
        reason: shown to users as the reason of the eviction.
        undo: remove the node's eviction.

    Raises:
        UsageError: the job has no such node, or the node was not evicted.
    """
    url, name = _find_job(store, job)
    asyncio.run(
        _set_eviction(url, name, node, None if undo else Eviction(reason, may_return=False))
    )


async def views(client: EtcdStore, keys: Keys) -> AsyncIterator[View]:
    """Yield the job's current view, then a new one after every change."""
    listing = await client.read(keys.prefix)
    view = from_listing(keys, listing)
    yield view
    async for change in client.watch(keys.prefix, listing.revision):
        view = (
            from_listing(keys, change.listing)
            if isinstance(change, Reset)
            else apply(keys, view, change)
        )
        yield view


def _find_job(store: str | None, job: str | None) -> tuple[str, str]:
    if store is not None:
        if job is None:
            raise UsageError("--store needs --job NAME: a coordinator may have several jobs")
        return store, job
    matching = [entry for entry in local_jobs() if job in (None, entry.job)]
    if len(matching) == 1:
        return matching[0].store, matching[0].job
    if not matching:
        name = f"no job named {job!r}" if job else "no job"
        raise UsageError(
            f"{name} with its own coordinator runs on this machine; give --store and --job"
        )
    raise UsageError(
        f"several jobs run on this machine: {', '.join(entry.job for entry in matching)}; "
        "give --job"
    )


async def _follow(url: str, job: str, once: bool, as_json: bool) -> None:
    keys = Keys(job)
    client = await EtcdStore.connect(parse_address(url))
    try:
        if once or as_json:
            await _print(client, keys, once, as_json)
            return
        with Live(refresh_per_second=8) as live:
            async for view in views(client, keys):
                live.update(render(job, view, time.time()))
                if view.result is not None or not view.nodes:
                    return
    finally:
        await client.close()


async def _print(client: EtcdStore, keys: Keys, once: bool, as_json: bool) -> None:
    console = Console()
    async for view in views(client, keys):
        if as_json:
            console.out(json.dumps(summary(view, time.time())), highlight=False)
        else:
            if not view.nodes:
                raise UsageError(
                    f"there is no job {keys.job!r} at this coordinator; check --store and --job"
                )
            console.print(render(keys.job, view, time.time()))
        if once or view.result is not None:
            return


async def _set_eviction(url: str, job: str, node: str, eviction: Eviction | None) -> None:
    keys = Keys(job)
    client = await EtcdStore.connect(parse_address(url))
    try:
        view = from_listing(keys, await client.read(keys.prefix))
        key = keys.eviction(node)
        if eviction is not None:
            if node not in view.nodes:
                raise UsageError(
                    f"job {job!r} has no node {node!r}; "
                    f"its nodes: {', '.join(sorted(view.nodes)) or 'none'}"
                )
            await client.commit((Modified(key, 0),), (Put(key, eviction.encode()),))
            return
        if node not in view.evictions:
            raise UsageError(
                f"node {node!r} was not evicted; "
                f"evicted nodes: {', '.join(sorted(view.evictions)) or 'none'}"
            )
        await client.commit((), (Delete(key),))
    finally:
        await client.close()
