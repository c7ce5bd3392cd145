"""Claims about threads that compete with training for the processor."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from keepstep.processes import yield_to_training


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_threads_that_yield_are_behind_training_but_not_starved() -> None:
    before = niceness()
    with ThreadPoolExecutor(1, initializer=yield_to_training) as yielding:
        own = yielding.submit(niceness).result()

        def of_another(initializer: Callable[[], None] | None) -> int:
            with ThreadPoolExecutor(1, initializer=initializer) as started:
                return started.submit(niceness).result()

        # Those that it starts inherit it, and yield no more if they yield themselves.
        started = [
            yielding.submit(of_another, initializer).result()
            for initializer in (None, yield_to_training)
        ]
    # Each step of niceness is a factor of 1.25 (sched-nice-design in the kernel's documents): ten
    # are a tenth of the share of those that do not yield.
    assert before < own <= before + 10
    assert started == [own, own]
    assert niceness() == before
