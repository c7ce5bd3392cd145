"""Looking at a job, and asking things of it, from outside: the shells behind `keepstep status` and `keepstep evict`."""

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
    """Show a job's state, once or until interrupted or until it ends."""
    url, name = _find_job(store, job)
    try:
        asyncio.run(_follow(url, name, once, as_json))
    except KeyboardInterrupt:
        return


def evict_node(store: str | None, job: str | None, node: str, reason: str, *, undo: bool) -> None:
    """Ask a node to leave for good, or let it return.

    Raises:
        UsageError: the job has no such node, or it was not evicted.
    """
    url, name = _find_job(store, job)
    asyncio.run(
        _set_eviction(url, name, node, None if undo else Eviction(reason, may_return=False))
    )


async def views(client: EtcdStore, keys: Keys) -> AsyncIterator[View]:
    """Yield the job's view, and again after every change."""
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
            raise UsageError("--store needs --job NAME to say which of its jobs")
        return store, job
    found = [entry for entry in local_jobs() if job in (None, entry.job)]
    if len(found) == 1:
        return found[0].store, found[0].job
    if not found:
        what = f"no job named {job!r}" if job else "no job"
        raise UsageError(
            f"{what} with a coordinator of its own runs on this machine; give --store and --job"
        )
    raise UsageError(
        f"several jobs run here: {', '.join(entry.job for entry in found)}; give --job"
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
                raise UsageError(f"there is no job {keys.job!r} at that coordinator")
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
                    f"job {job!r} has no node {node!r}; it has {', '.join(sorted(view.nodes)) or 'none'}"
                )
            await client.commit((Modified(key, 0),), (Put(key, eviction.encode()),))
            return
        if node not in view.evictions:
            raise UsageError(
                f"node {node!r} was not evicted; were: {', '.join(sorted(view.evictions)) or 'none'}"
            )
        await client.commit((), (Delete(key),))
    finally:
        await client.close()
