"""Does the parts of a conversion in several processes at once.

Processes, because much of reading other tools' files is Python's work, which one process does one
at a time. They share nothing but the storage. After the first error no further part is begun; what
is written stays, and the same conversion takes it up.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

from keepstep.checkpoint.convert.write.request import ConversionRequest, seen_in
from keepstep.checkpoint.convert.write.universal import (
    THREAD_NBYTES,
    Report,
    Run,
    Task,
    UniversalParts,
    execute,
)
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError
from keepstep.processes import die_with_parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The input of a worker process.

    Attributes:
        request: the checkpoint to read, and the conversion to apply.
        seen: the conversion's findings there; see `seen_in`.
        url: where to write.
        attempt_name: as for `UniversalParts`.
        memory_nbytes: how much memory tensors may take, in all processes together.
        part_nbytes: as for `UniversalParts`.
    """

    request: ConversionRequest
    seen: str
    url: str
    attempt_name: str
    memory_nbytes: int
    part_nbytes: int


def check_workers(workers: int, memory_nbytes: int) -> None:
    """Refuse more processes than the memory is enough for.

    Raises:
        CheckpointError: there is too little for each.
    """
    if memory_nbytes < workers * THREAD_NBYTES:
        raise CheckpointError(
            f"{workers} processes need {workers * THREAD_NBYTES / 2**20:.0f} MiB of memory at "
            f"least, {memory_nbytes / 2**20:.0f} are given; give more, or fewer --workers"
        )


@contextmanager
def run_in_processes(start: Start, workers: int, report: Report) -> Iterator[Run]:
    """Start worker processes, and yield what does parts in them; end them afterwards.

    Args:
        start: what each of them begins with.
        report: called with the bytes of each part that is done.

    Raises:
        CheckpointError: the memory is not enough for all of them.
    """
    check_workers(workers, start.memory_nbytes)
    encoded = pickle.dumps(replace(start, memory_nbytes=start.memory_nbytes // workers))
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _begin, (os.getpid(),)
    ) as pool:

        def run(task: Task, numbers: Sequence[int]) -> None:
            futures = [pool.submit(_execute, encoded, task, number) for number in numbers]
            try:
                for future in as_completed(futures):
                    report(future.result())
            except BrokenProcessPool:
                raise CheckpointError(
                    "a process of the conversion ended; if it was killed for lack of memory, give "
                    "fewer --workers, and convert again: what is written is kept"
                ) from None
            except MemoryError:
                raise CheckpointError(
                    "a process of the conversion had no memory; give less"
                ) from None
            finally:
                for future in futures:
                    future.cancel()

        yield run


def _begin(parent: int) -> None:
    # Ctrl-C reaches all processes of a terminal, and ends these without a word.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(parent)


def _execute(start: bytes, task: Task, number: int) -> int:
    """Do one part's task in a worker process; return the bytes of tensors that are done."""
    done: list[int] = []
    execute(_parts(start), task, number, done.append)
    return sum(done)


@cache
def _parts(encoded: bytes) -> UniversalParts:
    """Return the parts of a conversion; a process opens the source once."""
    start: Start = pickle.loads(encoded)
    chosen = start.request.select(start.request.open())
    if seen_in(chosen) != start.seen:
        raise CheckpointDamaged(
            f"{start.request.location.url}: it has other tensors than a moment ago; convert when "
            "nobody writes there"
        )
    return UniversalParts(
        chosen,
        start.url,
        attempt_name=start.attempt_name,
        memory_nbytes=start.memory_nbytes,
        part_nbytes=start.part_nbytes,
    )
