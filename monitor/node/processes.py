"""Samples what workers' processes have used so far: processor time, and bytes read and written.

Descendants count as well: a worker that waits for its data loaders, or for a compiler that it
started, is not idle. Those that have ended and were waited for are in their parent's counters.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress

import psutil

from keepstep.monitor.diagnosis.metrics import ProcessSample


def sample_processes(workers: Mapping[int, int]) -> tuple[ProcessSample, ...]:
    """Return a sample of each worker's process; a process that may not be read is left out.

    Takes about 20 us for each process of the node.

    Args:
        workers: process id of each rank.
    """
    if not workers:
        return ()
    children = _children()
    samples = []
    for rank, pid in sorted(workers.items()):
        at_s = time.monotonic()
        # A worker that ended or belongs to another user is not known; nothing is concluded then.
        with suppress(psutil.Error):
            cpu_s, io_nbytes = _used(psutil.Process(pid))
            for descendant in _descendants(pid, children):
                with suppress(psutil.Error):
                    more_cpu_s, more_nbytes = _used(psutil.Process(descendant))
                    cpu_s, io_nbytes = cpu_s + more_cpu_s, io_nbytes + more_nbytes
            samples.append(ProcessSample(rank, pid, at_s, cpu_s, io_nbytes))
    return tuple(samples)


def _used(process: psutil.Process) -> tuple[float, int]:
    """Return the processor seconds and the bytes that a process has used.

    Both those of system calls and those of disks count: mapped files cause only the latter.
    """
    times, transfers = process.cpu_times(), process.io_counters()
    cpu_s = times.user + times.system + times.children_user + times.children_system
    nbytes = (
        transfers.read_chars + transfers.write_chars + transfers.read_bytes + transfers.write_bytes
    )
    return float(cpu_s), int(nbytes)


def _children() -> Mapping[int, list[int]]:
    """Return the children of all processes of the node."""
    children: dict[int, list[int]] = defaultdict(list)
    for process in psutil.process_iter(["ppid"]):
        children[process.info["ppid"] or 0].append(process.pid)
    return children


def _descendants(pid: int, children: Mapping[int, list[int]]) -> Iterable[int]:
    waiting = [*children.get(pid, ())]
    while waiting:
        child = waiting.pop()
        yield child
        waiting += children.get(child, ())
