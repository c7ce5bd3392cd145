"""Changes a running job: implements `keepstep scale`, `keepstep pause` and `keepstep resume`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from keepstep.elastic.cli.follow import JobAddress, views
from keepstep.elastic.errors import JobFailed, UsageError
from keepstep.elastic.rendezvous.checkpoint_schedule import is_stored
from keepstep.elastic.rendezvous.rank_assignment import newest_restorable
from keepstep.elastic.rendezvous.records import NodePhase, Pause, Scale
from keepstep.elastic.rendezvous.view import Keys, View, from_listing
from keepstep.elastic.store.contract import Delete, Modified, Put, Store
from keepstep.elastic.store.etcd import EtcdStore


def scale_job(job: JobAddress, min_nodes: int, max_nodes: int) -> str:
    """Change how many nodes a job has; return the effect as a sentence.

    Raises:
        UsageError: there is no such job.
        JobFailed: it has ended meanwhile.
        StoreUnavailable: the coordinator does not answer.
    """
    return asyncio.run(_scale(job, Scale(min_nodes, max_nodes)))


def pause_job(job: JobAddress, reason: str) -> str:
    """Stop a job's training, wait until its state is stored, and say where it is.

    Raises:
        UsageError: there is no such job.
        JobFailed: it has ended meanwhile.
        StoreUnavailable: the coordinator does not answer.
    """
    return asyncio.run(_pause(job, reason))


def resume_job(job: JobAddress) -> str:
    """Let a paused job go on; return the effect as a sentence.

    Raises:
        UsageError: there is no such job, or it is not paused.
        StoreUnavailable: the coordinator does not answer.
    """
    return asyncio.run(_resume(job))


@asynccontextmanager
async def _connected(job: JobAddress) -> AsyncIterator[tuple[Store, Keys, View]]:
    """Connect to a job that runs, and read it."""
    keys = Keys(job.name)
    client = await EtcdStore.connect(job.coordinator)
    try:
        view = from_listing(keys, await client.read(keys.prefix))
        if not view.nodes or view.result is not None:
            raise UsageError(
                f"there is no job {job.name!r} at this coordinator; check --store and the name"
            )
        yield client, keys, view
    finally:
        await client.close()


def _of_this_run(keys: Keys, view: View) -> tuple[Modified, ...]:
    """Return the condition that the same job still runs, not a later one of its name."""
    secret = view.revisions.get("secret", 0)
    return (Modified(keys.single("result"), 0), Modified(keys.single("secret"), secret))


async def _scale(job: JobAddress, scale: Scale) -> str:
    async with _connected(job) as (client, keys, view):
        put = Put(keys.single("scale"), scale.encode())
        if not (await client.commit(_of_this_run(keys, view), (put,))).succeeded:
            raise JobFailed(f"job {job.name} has ended before its limits could be changed")
        here = len(view.nodes)
        are = "is" if here == 1 else "are"
        limits = f"job {job.name} has {scale.min_nodes} to {scale.max_nodes} nodes from now on"
        if here > scale.max_nodes:
            return f"{limits}; {here - scale.max_nodes} of {here} are on standby"
        if here < scale.min_nodes:
            return f"{limits}; {here} {are} here: start more, before one is lost"
        return f"{limits}; {here} {are} here"


async def _pause(job: JobAddress, reason: str) -> str:
    async with _connected(job) as (client, keys, view):
        if view.pause is None:
            pause = Pause(reason, time.time())
            await client.commit(
                _of_this_run(keys, view), (Put(keys.single("pause"), pause.encode()),)
            )
        async for view in views(client, keys):
            if view.result is not None or not view.nodes:
                raise JobFailed(f"job {job.name} has ended before it could be paused")
            if view.pause is None:
                raise JobFailed(f"job {job.name} was resumed before it had paused")
            if is_paused(view):
                return f"job {job.name} is paused; {_kept(view)}. `keepstep resume` goes on"
    raise AssertionError("unreachable: a watch does not end")


def is_paused(view: View) -> bool:
    """Whether a job's workers have ended, and its state is stored if it is to be."""
    if view.pause is None or view.persist is not None:
        return False
    generation = view.generation
    if generation is None:
        return True
    members = [view.nodes.get(member.node) for member in generation.members]
    has_drained = all(
        joined is None or joined.record.phase in (NodePhase.DRAINED, NodePhase.DONE)
        for joined in members
    )
    return view.is_closing and has_drained and (_is_stored(view) or not _is_to_be_stored(view))


def _is_to_be_stored(view: View) -> bool:
    """Whether the job stores checkpoints, and has not failed to store the newest snapshot."""
    step = _newest_step(view)
    has_failed = view.store_failure is not None and view.store_failure.step >= step
    return step > 0 and not has_failed and _has_url(view)


def _is_stored(view: View) -> bool:
    return is_stored(view, _newest_step(view))


def _newest_step(view: View) -> int:
    """Return the newest step that a job that has drained can resume from in memory; 0: none."""
    resume = newest_restorable(view, view.generation) if view.generation is not None else None
    return resume.snapshot.step if resume is not None else 0


def _kept(view: View) -> str:
    """Return a sentence about where the state of a paused job is."""
    if view.snapshot is None:
        return "it has no state yet"
    step = view.snapshot.snapshot.step
    in_memory = f"step {step} is in the memory of its nodes"
    if _is_stored(view) and view.checkpoint is not None:
        return f"{in_memory} and in {view.checkpoint.url}, so they may leave"
    if view.store_failure is not None and _has_url(view):
        return f"{in_memory} alone, for it could not be stored: {view.store_failure.reason}"
    return f"{in_memory} alone, for the job stores no checkpoints"


def _has_url(view: View) -> bool:
    return any(joined.record.checkpoint_url for joined in view.nodes.values())


async def _resume(job: JobAddress) -> str:
    async with _connected(job) as (client, keys, view):
        if view.pause is None:
            raise UsageError(f"job {job.name!r} is not paused")
        await client.commit((), (Delete(keys.single("pause")),))
        step = view.snapshot.snapshot.step if view.snapshot is not None else 0
        nodes = f"{len(view.nodes)} node{'s' if len(view.nodes) != 1 else ''}"
        return f"job {job.name} goes on after step {step}, with {nodes}"
