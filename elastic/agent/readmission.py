"""Decides whether an evicted node may join again.

A node that a person evicted stays away. A node that the monitor evicted may return if its node
check finds nothing. The check is `keepstep doctor` on this node, in its own process: it finds wrong
or unrepeatable matrix products, a disk that cannot be written to, a network stack that does not
answer. It does not find faults that only a comparison with other nodes shows; the monitor will
diagnose those again, and its budget limits how often a node is replaced.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from keepstep.elastic.errors import JobFailed
from keepstep.elastic.rendezvous.records import Eviction
from keepstep.elastic.rendezvous.view import Keys
from keepstep.elastic.store.contract import Delete, Modified, Store
from keepstep.processes import module_command

log = logging.getLogger("keepstep")

_DOCTOR_TIMEOUT_S = 300.0

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
            "--listen", "127.0.0.1:0", "--directory", str(directory),
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


async def readmit(
    store: Store, job: str, node: str, directory: Path, check: NodeCheck = run_doctor
) -> None:
    """Remove a node's eviction, if there is one and the node may return, before it joins.

    Args:
        store: the coordinator.
        job: name of the job.
        node: name of the node.
        directory: directory for files of the check.
        check: examines the node.

    Raises:
        JobFailed: the node may not return; the message gives the reason and the remedy.
    """
    key = Keys(job).eviction(node)
    for item in (await store.read(key)).items:
        if item.key != key:
            continue  # Another node, whose name begins with this one's.
        eviction = Eviction.decode(item.value)
        if not eviction.may_return:
            raise JobFailed(
                f"node {node} was evicted from job {job}: {eviction.reason}. "
                f"`keepstep evict --undo {node}` lets it return"
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
                f"Repair that first, or let the node return anyway: `keepstep evict --undo {node}`"
            )
        await store.commit((Modified(key, item.modified),), (Delete(key),))
        log.warning("`keepstep doctor` finds nothing; node %s returns", node)
