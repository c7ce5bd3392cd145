"""Registers the monitors that run on this machine, so that pages and `keepstep top` find them.

There is one small file per port in the user's runtime directory. The daemon holds it, and removes
it when it ends; a file that nobody holds is ignored. Without a usable directory nothing is found,
and all else works.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from keepstep.private_files import (
    NotPrivate,
    check_directory,
    created_directory,
    held_file,
    is_held,
    read_file,
    runtime_directory,
)

_LOG = logging.getLogger("keepstep.monitor")
_DIRECTORY = "monitors"


@dataclass(frozen=True, slots=True)
class LocalMonitor:
    """A monitor on this machine.

    Args:
        job: that it watches.
        url: where it listens.
        diagnoses: whether it is the topmost of its job, and not a relay.
    """

    job: str
    url: str
    diagnoses: bool


@contextmanager
def registered(monitor: LocalMonitor) -> Iterator[None]:
    """Register a monitor while the context lasts."""
    port = monitor.url.rpartition(":")[2]
    with ExitStack() as stack:
        try:
            created_directory(runtime_directory())
            directory = created_directory(runtime_directory() / _DIRECTORY)
            content = json.dumps(asdict(monitor)).encode()
            stack.enter_context(held_file(directory / f"{port}.json", content))
        except (NotPrivate, OSError) as error:
            _LOG.info("other pages and `keepstep top` do not find this monitor: %s", error)
        yield


def local_monitors() -> tuple[LocalMonitor, ...]:
    """Return the monitors of this user that run on this machine, by job."""
    directory = runtime_directory() / _DIRECTORY
    try:
        check_directory(directory.parent)
        check_directory(directory)
        paths = sorted(directory.glob("*.json"))
    except (NotPrivate, OSError):
        return ()
    found = []
    for path in paths:
        try:
            if is_held(path):
                found.append(LocalMonitor(**json.loads(read_file(path))))
        except (NotPrivate, OSError, ValueError, TypeError):
            continue  # It has just ended, or is of another version.
    return tuple(sorted(found, key=lambda monitor: monitor.job))
