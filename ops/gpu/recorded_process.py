"""Attaches keepstep's recorder to a process, and reads the operations that it recorded.

Imported only in processes of checks for which `keepstep_tree.require` has passed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keepstep import monitor
from keepstep.monitor.records import Flag, Operation
from keepstep.monitor.telemetry.ring_files import job_directory, ring_paths
from keepstep.monitor.telemetry.ring_reader import RingReader

_SETTLING_S = 5.0


@contextmanager
def recording(directory: str, rank: int) -> Iterator[RingReader]:
    """Record this process's operations in a ring below a directory; yield the ring's reader.

    Raises:
        RuntimeError: operations are not recorded; the log says why.
    """
    os.environ["KEEPSTEP_MONITOR_DIR"] = directory
    job = f"gpu-check-{os.getpid()}"
    recorder = monitor.attach(job=job, rank=rank, generation=1)
    if not recorder.sees_operations:
        raise RuntimeError("the recorder of operations is not available")
    (path,) = ring_paths(job_directory(job))
    reader = RingReader(Path(path))
    try:
        yield reader
    finally:
        reader.close()


def operations(reader: RingReader, since: int) -> list[dict[str, Any]]:
    """Return the operations from a position on, once none is awaited, or in some seconds."""
    deadline_s = time.monotonic() + _SETTLING_S
    while True:
        records = reader.operations.last(reader.operations.position - since)
        is_settled = (records["ended_s"] > 0) | ((records["flags"] & Flag.UNOBSERVED) != 0)
        if bool(is_settled.all()) or time.monotonic() > deadline_s:
            break
        time.sleep(0.01)
    return [
        {
            "name": Operation(int(record["code"])).name,
            "has_device_times": bool(int(record["flags"]) & Flag.DEVICE_TIMES)
            and min(float(record["started_s"]), float(record["ended_s"])) > 0,
            "ended": float(record["ended_s"]) > 0,
            "seconds": float(record["ended_s"]) - float(record["started_s"]),
        }
        for record in records
    ]
