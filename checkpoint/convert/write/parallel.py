"""Does the parts of a conversion in several processes at once.

Processes, because much of reading other tools' files is Python's work, which one process does one
at a time. They share nothing but the storage. The first error ends all of them; what they have
written stays, and the same conversion takes it up.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import IO

from keepstep.checkpoint.convert.write.universal import THREAD_NBYTES, Report, Run, Task
from keepstep.checkpoint.convert.write.worker_messages import Answer, PartTask, Start
from keepstep.checkpoint.errors import CheckpointError
from keepstep.processes import module_command

_MODULE = "keepstep.checkpoint.convert.write.worker"
_END_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    """A worker process and its pipes."""

    process: subprocess.Popen[str]
    orders: IO[str]
    answers: IO[str]

    def execute(self, task: PartTask, report: Report) -> None:
        """Have one part done.

        Raises:
            CheckpointError: the worker says so, or it is gone.
        """
        # If it is gone, what it said before is read below.
        with suppress(BrokenPipeError):
            self.orders.write(task.encode() + "\n")
            self.orders.flush()
        for line in self.answers:
            answer = Answer.decode(line)
            if answer.error is not None:
                raise answer.error
            if answer.is_done:
                return
            report(answer.nbytes)
        status = self.process.wait()
        raise CheckpointError(
            f"a process of the conversion ended with status {status}; if it was killed for lack of "
            "memory, give fewer --workers, and convert again: what is written is kept"
        )


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
        start: what each of them begins with; the memory is that of all together.
        workers: how many.
        report: called with bytes that were done, from several threads.

    Raises:
        CheckpointError: the memory is not enough for so many.
    """
    check_workers(workers, start.memory_nbytes)
    own = replace(start, parent=os.getpid(), memory_nbytes=start.memory_nbytes // workers)
    started: list[_Worker] = []
    try:
        for _ in range(workers):
            # By the thread that waits for them: they end with the thread that started them.
            started.append(_start(own))
        yield lambda task, numbers: _run(started, task, numbers, report)
    except BaseException:
        _kill(started)
        raise
    finally:
        for worker in started:
            _end(worker)


def _start(start: Start) -> _Worker:
    process = subprocess.Popen(
        module_command(_MODULE),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    assert process.stdin is not None, "asked for above"
    assert process.stdout is not None, "asked for above"
    worker = _Worker(process, process.stdin, process.stdout)
    # If it is gone already, the first task finds it.
    with suppress(BrokenPipeError):
        worker.orders.write(start.encode() + "\n")
        worker.orders.flush()
    return worker


def _run(workers: Sequence[_Worker], task: Task, numbers: Sequence[int], report: Report) -> None:
    """Have parts done, each by the first worker that is free; after an error no further one."""
    left = iter(numbers)
    lock = threading.Lock()

    def serve(worker: _Worker) -> None:
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            worker.execute(PartTask(task, number), report)

    with ThreadPoolExecutor(len(workers)) as pool:
        futures = [pool.submit(serve, worker) for worker in workers]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failures = [error for future in done if (error := future.exception()) is not None]
        except BaseException:
            # An interruption: no worker's answer is waited for.
            _kill(workers)
            raise
        if failures:
            _kill(workers)
            raise failures[0]


def _kill(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()


def _end(worker: _Worker) -> None:
    with suppress(BrokenPipeError):
        worker.orders.close()
    try:
        worker.process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        worker.process.kill()
        worker.process.wait()
    worker.answers.close()
