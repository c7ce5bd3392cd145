"""Decides whether an evicted node may join again, and lets it return by itself.

A node that a person evicted stays away. One that the monitor evicted, or the leader because the job
failed on it again and again, may return if its node check finds nothing: at once the first time,
and after a longer pause each time that it is evicted again. The check is `keepstep doctor` on this
node, in its own process: it finds wrong or unrepeatable matrix products, a disk that cannot be
written to, a network stack that does not answer. It does not find faults that only a comparison
with other nodes shows; the monitor will diagnose those again, and its budget limits how often a
node is replaced.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from keepstep.elastic.errors import JobFailed
from keepstep.elastic.rendezvous.records import Eviction
from keepstep.elastic.rendezvous.view import Keys
from keepstep.elastic.store.contract import Delete, Modified, Store
from keepstep.elastic.store.outages import outlast_outage
from keepstep.processes import module_command
from keepstep.transport.addresses import host_and_port, loopback

log = logging.getLogger("keepstep")

_DOCTOR_TIMEOUT_S = 300.0

_FIRST_PAUSE_S = 60.0
_PAUSE_FACTOR = 4.0
_MOST_PAUSE_S = 3600.0

NodeCheck = Callable[[str, Path], Awaitable[Sequence[str]]]
"""Checks a node: receives its name and a directory for files, returns one sentence per finding."""


async def run_doctor(node: str, directory: Path) -> Sequence[str]:
    """Run `keepstep doctor` on this node: the `NodeCheck` of `keepstep run`.

    Raises:
        JobFailed: the doctor did not finish, or its output could not be read.
    """
    process = await asyncio.create_subprocess_exec(
        *module_command(
            "keepstep", "doctor", "--json", "--node", node,
            "--listen", host_and_port(loopback(), 0), "--directory", str(directory),
        ),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(_DOCTOR_TIMEOUT_S):
            output, _ = await process.communicate()
        findings = json.loads(output)["findings"]
    except (TimeoutError, ValueError, KeyError) as error:
        raise JobFailed(
            f"node {node} was evicted, and `keepstep doctor` gave no result ({error!r}); "
            "run it by hand to see why"
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return [
        f"{finding['subject']}: {finding['what']}, {finding['evidence']}" for finding in findings
    ]


def pause_before_return_s(returned: int) -> float:
    """Return how long an evicted node stays away before it is checked.

    Args:
        returned: how often it has returned before.
    """
    if returned == 0:
        return 0.0
    return min(_MOST_PAUSE_S, _FIRST_PAUSE_S * _PAUSE_FACTOR ** min(returned - 1, 10))


async def return_after_eviction(
    store: Store,
    job: str,
    node: str,
    directory: Path,
    pause_s: float,
    outage_s: float,
    check: NodeCheck = run_doctor,
) -> bool:
    """Wait, then let a node that has left the job return if it was evicted and is well.

    Args:
        store: the coordinator.
        job: name of the job.
        node: name of the node.
        directory: directory for files of the check.
        pause_s: how long to wait before.
        outage_s: for how long the coordinator may be away.
        check: examines the node.

    Returns:
        Whether the node may join again now. It may not if it was not evicted, if a person evicted
        it, or if the job has ended.

    Raises:
        JobFailed: the check finds something, or gives no result.
        StoreUnavailable: the coordinator is gone.
    """
    keys = Keys(job)
    evictions = await outlast_outage(lambda: store.read(keys.eviction(node)), outage_s)
    own = [item for item in evictions.items if item.key == keys.eviction(node)]
    if not own or not Eviction.decode(own[0].value).may_return:
        return False
    if pause_s:
        log.warning("node %s was evicted again; it is checked in %.0f s", node, pause_s)
        await asyncio.sleep(pause_s)
    if not await outlast_outage(lambda: _runs(store, keys), outage_s):
        return False
    await readmit(store, job, node, directory, check, outage_s)
    # Joining a job that has ended would restart it.
    return await outlast_outage(lambda: _runs(store, keys), outage_s)


async def _runs(store: Store, keys: Keys) -> bool:
    """Whether a job has begun and has no result; after an outage its nodes may be yet to join."""
    secret = await store.read(keys.single("secret"), limit=1)
    result = await store.read(keys.single("result"), limit=1)
    return bool(secret.items) and not result.items


async def readmit(
    store: Store,
    job: str,
    node: str,
    directory: Path,
    check: NodeCheck = run_doctor,
    outage_s: float = 0.0,
) -> None:
    """Remove a node's eviction, if there is one and the node may return, before it joins.

    Args:
        store: the coordinator.
        job: name of the job.
        node: name of the node.
        directory: directory for files of the check.
        check: examines the node.
        outage_s: for how long the coordinator may be away.

    Raises:
        JobFailed: the node may not return; the message gives the reason and the remedy.
    """
    key = Keys(job).eviction(node)
    is_lifted = False
    while not is_lifted:
        items = (await outlast_outage(lambda: store.read(key), outage_s)).items
        # Others are of nodes whose names begin with this one's.
        item = next((item for item in items if item.key == key), None)
        if item is None:
            return
        eviction = Eviction.decode(item.value)
        if not eviction.may_return:
            raise JobFailed(
                f"node {node} was evicted from job {job}: {eviction.reason}. "
                f"`keepstep evict --job {job} --undo {node}` lets it return; "
                "then run this line again"
            )
        log.warning(
            "node %s was evicted (%s); `keepstep doctor` checks it before it returns",
            node,
            eviction.reason,
        )
        findings = await check(node, directory)
        if findings:
            raise JobFailed(
                f"node {node} was evicted from job {job} ({eviction.reason}), "
                f"and `keepstep doctor` finds: {'; '.join(findings)}. "
                "Repair that first, or let the node return anyway: "
                f"`keepstep evict --job {job} --undo {node}`. Then run this line again"
            )
        lift = partial(store.commit, (Modified(key, item.modified),), (Delete(key),))
        # Not if somebody has replaced it meanwhile.
        is_lifted = (await outlast_outage(lift, outage_s)).succeeded
    log.warning("`keepstep doctor` finds nothing; node %s returns", node)
