"""Finds the leftovers of a job that has ended."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from keepstep.checkpoint.format.stored.housekeeping import collect_garbage
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.elastic.rendezvous.view import Keys
from keepstep.elastic.store.address import parse_address
from keepstep.elastic.store.etcd import EtcdStore

_SHARED_MEMORY = Path("/dev/shm")
_TRACEBACK = "Traceback (most recent call last)"
_SUSPICIOUS = re.compile(
    r"InvariantViolated|Task was destroyed|was never retrieved|was never awaited|"
    r"Exception ignored|Unclosed |promise is broken|Segmentation|Fatal Python error"
)
# What an agent, its snapshot server, and C++ code in their processes and workers print.
_LOG_LINE = re.compile(r"\[keepstep |keepstep|\[?[WE]\d{4} |$")
_EXCERPT = 12


def find(
    *, processes: Iterable[psutil.Process], runtime: Path, owns_shared_memory: bool, url: str,
    job: str, storage_url: str,
) -> list[str]:  # fmt: skip
    """Return the leftovers, one line each.

    Args:
        processes: those of the job that are still there.
        runtime: the job's folder for temporary files, sockets and run directories.
        owns_shared_memory: /dev/shm holds this job's files only.
        url: the coordinator.
        job: the job's name.
        storage_url: where its checkpoints lie.
    """
    left = [f"process {_describe(process)}" for process in processes]
    left += [f"file {path.relative_to(runtime)}" for path in _files(runtime)]
    if owns_shared_memory:
        left += [f"shared memory {path}" for path in _files(_SHARED_MEMORY)]
    left += [f"etcd key {key}" for key in asyncio.run(_keys(url, job))]
    # What writers left that were killed is garbage, which `keepstep ckpt gc` must find.
    collect_garbage(open_storage(storage_url), now=time.time(), grace_s=0.0)
    left += [f"unfinished object {name}" for name in open_storage(storage_url).unfinished()]
    return left


def complaints(logs: Iterable[Path]) -> list[str]:
    """Return excerpts of logs that no failure explains: tracebacks, broken invariants."""
    found = []
    for path in logs:
        lines = path.read_text(errors="replace").splitlines()
        for number, line in enumerate(lines):
            if _TRACEBACK in line or _SUSPICIOUS.search(line):
                found.append(_excerpt(path, lines, number))
    return found


def untold(logs: Iterable[Path]) -> list[str]:
    """Return excerpts of agents' logs with lines that are no message of one line."""
    found = []
    for path in logs:
        lines = path.read_text(errors="replace").splitlines()
        first = next((n for n, line in enumerate(lines) if not _LOG_LINE.match(line)), None)
        if first is not None:
            found.append(_excerpt(path, lines, first))
    return found


def _excerpt(path: Path, lines: list[str], number: int) -> str:
    excerpt = "\n".join(lines[max(0, number - 3) : number + _EXCERPT])
    return f"{path.name}: {excerpt}"


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if not path.is_dir()]


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return str(process.pid)


async def _keys(url: str, job: str) -> list[str]:
    client = await EtcdStore.connect(parse_address(url))
    try:
        return [item.key for item in (await client.read(Keys(job).prefix)).items]
    finally:
        await client.close()
