"""Whether a node that was evicted may come back: by a person's word it is gone for good, by a monitor's until its doctor finds nothing.

The check is `keepstep doctor` on this node alone, in a process of its own: wrong or unrepeatable products, a disk that cannot
be written to, a network stack that does not answer. What only a comparison with other nodes shows, it cannot see; the
monitor will see it again, and its budget bounds how often a node is replaced.
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
"""Examines the node of a name, with room for files in a directory; returns what should be seen to, a sentence each."""


async def run_doctor(node: str, directory: Path) -> Sequence[str]:
    """Have this node's doctor look at it: the `NodeCheck` that `keepstep run` uses.

    Raises:
        JobFailed: it came to no outcome.
    """
    process = await asyncio.create_subprocess_exec(
        *module_command(
            "keepstep", "doctor", "--json", "--node", node, "--listen", "127.0.0.1:0", "--directory", str(directory)
        ),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(_DOCTOR_TIMEOUT_S):
            said, _ = await process.communicate()
        found = json.loads(said)["findings"]
    except (TimeoutError, ValueError, KeyError) as error:
        raise JobFailed(
            f"node {node} was evicted, and its doctor came to no outcome ({error!r}); run `keepstep doctor` to see why"
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return [f"{one['subject']}: {one['what']}, {one['evidence']}" for one in found]


async def readmit(
    store: Store, job: str, node: str, directory: Path, check: NodeCheck = run_doctor
) -> None:
    """Lift a node's eviction before it joins, if there is one and it may be lifted.

    Raises:
        JobFailed: it may not; the message says why and what to do.
    """
    key = Keys(job).eviction(node)
    for item in (await store.read(key)).items:
        if item.key != key:
            continue  # The name only begins alike.
        eviction = Eviction.decode(item.value)
        if not eviction.may_return:
            raise JobFailed(
                f"node {node} was evicted from job {job}: {eviction.reason}. `keepstep evict --undo {node}` lets it return"
            )
        log.warning(
            "node %s was evicted (%s); its doctor looks at it before it returns",
            node,
            eviction.reason,
        )
        findings = await check(node, directory)
        if findings:
            raise JobFailed(
                f"node {node} was evicted from job {job} ({eviction.reason}), and its doctor finds: {'; '.join(findings)}. "
                f"See to that first, or let it return all the same: `keepstep evict --undo {node}`"
            )
        await store.commit((Modified(key, item.modified),), (Delete(key),))
        log.warning("the doctor finds nothing; node %s returns", node)
