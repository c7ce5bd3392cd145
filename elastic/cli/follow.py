"""Follows a job's state and evicts nodes: implements `keepstep status` and `keepstep evict`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live

from keepstep.elastic.agent.node_name import holds_name
from keepstep.elastic.cli.status import render, summary
from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.loss_forecast import describe_forecast, forecast_loss
from keepstep.elastic.rendezvous.records import Eviction
from keepstep.elastic.rendezvous.view import Keys, View, apply, from_listing
from keepstep.elastic.store.address import Address, parse_address
from keepstep.elastic.store.contract import Delete, Modified, Put, Reset, Store
from keepstep.elastic.store.etcd import EtcdStore
from keepstep.elastic.store.local_jobs import local_jobs

_CHECK_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class JobAddress:
    """A job: its coordinator's address and its name."""

    coordinator: Address
    name: str


def follow(job: JobAddress, *, once: bool, as_json: bool) -> None:
    """Show a job's state once, or follow it until the job ends or the user interrupts.

    Args:
        job: the job.
        once: print the state once and return, as it is done where the output is no terminal.
        as_json: print one JSON object per state.

    Raises:
        UsageError: there is no such job.
        StoreUnavailable: the coordinator does not answer, or not any more.
    """
    try:
        asyncio.run(_follow(job, once, as_json))
    except KeyboardInterrupt:
        return


def evict_node(job: JobAddress, node: str, reason: str, *, undo: bool) -> str:
    """Request a node to leave and stay away, or let an evicted node return; return the effect.

    Args:
        job: the job.
        node: name of the node.
        reason: shown to users as the reason of the eviction.
        undo: remove the node's eviction.

    Raises:
        UsageError: the job has no such node, or the node was not evicted.
    """
    asyncio.run(_set_eviction(job, node, None if undo else Eviction(reason, may_return=False)))
    if undo:
        return f"node {node} may return to job {job.name}: run its line (`keepstep run ...`) again"
    return (
        f"node {node} hands over its state, leaves job {job.name} and stays away. "
        f"`keepstep evict --job {job.name} --undo {node}` lets it return"
    )


def foretell_loss(job: JobAddress, nodes: Sequence[str], *, as_json: bool) -> None:
    """Print what a job would do if nodes were lost now.

    Args:
        job: the job.
        nodes: names of the nodes.
        as_json: print a JSON object.

    Raises:
        UsageError: there is no such job or node, or the job has not begun.
        StoreUnavailable: the coordinator does not answer.
    """
    forecast = forecast_loss(asyncio.run(_read(job)), nodes, time.time())
    print(json.dumps(asdict(forecast)) if as_json else describe_forecast(forecast))


async def views(client: Store, keys: Keys) -> AsyncIterator[View]:
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


def find_job(store: str | None, job: str | None, secret_file: Path | None = None) -> JobAddress:
    """Return the job that the options name.

    Args:
        store: the coordinator's URL; None: that of the job on this machine.
        job: name of the job; None: the only one on this machine.
        secret_file: file with the secret of a coordinator `store` that keepstep started.

    Raises:
        UsageError: there is no such job, its coordinator is not here, or the name is missing.
    """
    if store is not None:
        if job is None:
            raise UsageError("--store needs --job NAME: a coordinator may have several jobs")
        return JobAddress(parse_address(store, secret_file), job)
    matching = [entry for entry in local_jobs() if job in (None, entry.job)]
    if len(matching) == 1:
        return JobAddress(matching[0].address, matching[0].job)
    if job is not None and holds_name(job):
        raise UsageError(
            f"job {job!r} has a node on this machine, but not the one that serves its coordinator: "
            "run that node's line again if it was lost, or name the coordinator by --store URL"
        )
    if not matching:
        # Some commands have the job's name as an argument, and no --job.
        name, remedy = (
            (f"no job named {job!r}", "name the coordinator of one elsewhere by --store URL")
            if job
            else ("no job", "give --store and --job")
        )
        raise UsageError(f"{name} with its own coordinator runs on this machine; {remedy}")
    raise UsageError(
        f"several jobs run on this machine: {', '.join(entry.job for entry in matching)}; "
        "give --job"
    )


async def _read(job: JobAddress) -> View:
    keys = Keys(job.name)
    client = await EtcdStore.connect(job.coordinator)
    try:
        view = from_listing(keys, await client.read(keys.prefix))
    finally:
        await client.close()
    _check_present(keys, view)
    return view


def _check_present(keys: Keys, view: View) -> None:
    if not view.nodes:
        raise UsageError(
            f"no node of job {keys.job!r} is at this coordinator; check --store and --job, or, if "
            "it was just started again, wait until they return"
        )


async def _follow(job: JobAddress, once: bool, as_json: bool) -> None:
    keys = Keys(job.name)
    client = await EtcdStore.connect(job.coordinator)
    try:
        if once or as_json or not sys.stdout.isatty():
            await _print(client, keys, once or not as_json, as_json)
            return
        with Live(refresh_per_second=8) as live:
            async for view in views_while_it_answers(client, keys):
                live.update(render(job.name, view, time.time()))
                if view.result is not None or not view.nodes:
                    return
    finally:
        await client.close()


async def views_while_it_answers(client: EtcdStore, keys: Keys) -> AsyncIterator[View]:
    """Yield as `views` does, but end when the coordinator has gone; a watch alone would wait.

    Raises:
        StoreUnavailable: it does not answer any more.
    """
    following = views(client, keys)
    while True:
        next_view = asyncio.ensure_future(anext(following))
        try:
            while not (await asyncio.wait({next_view}, timeout=_CHECK_EVERY_S))[0]:
                await client.read(keys.single("result"))
            yield next_view.result()
        finally:
            next_view.cancel()


async def _print(client: EtcdStore, keys: Keys, once: bool, as_json: bool) -> None:
    console = Console()
    async for view in views_while_it_answers(client, keys):
        if as_json:
            console.out(json.dumps(summary(view, time.time())), highlight=False)
        else:
            _check_present(keys, view)
            console.print(render(keys.job, view, time.time()))
        if once or view.result is not None:
            return


async def _set_eviction(job: JobAddress, node: str, eviction: Eviction | None) -> None:
    keys = Keys(job.name)
    client = await EtcdStore.connect(job.coordinator)
    key = keys.eviction(node)
    try:
        is_done = False
        while not is_done:
            listing = await client.read(keys.prefix)
            view = from_listing(keys, listing)
            # An eviction by the job itself, after which the node may return, is replaced.
            seen = next((item.modified for item in listing.items if item.key == key), 0)
            if eviction is not None and not (node in view.nodes or node in view.evictions):
                raise UsageError(
                    f"job {job.name!r} has no node {node!r}; "
                    f"its nodes: {', '.join(sorted(view.nodes)) or 'none'}"
                )
            if eviction is None and node not in view.evictions:
                raise UsageError(
                    f"node {node!r} was not evicted; "
                    f"evicted nodes: {', '.join(sorted(view.evictions)) or 'none'}"
                )
            operation = Delete(key) if eviction is None else Put(key, eviction.encode())
            is_done = (await client.commit((Modified(key, seen),), (operation,))).succeeded
    finally:
        await client.close()
