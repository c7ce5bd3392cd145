"""Runs a worker process of a conversion: opens the source, and does the parts it is given.

`python -m keepstep.checkpoint.convert.write.worker`; see `worker_messages` for its messages.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import TextIO

from keepstep.checkpoint.convert.write.request import seen_in
from keepstep.checkpoint.convert.write.universal import UniversalParts, execute
from keepstep.checkpoint.convert.write.worker_messages import Answer, PartTask, Start
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError
from keepstep.processes import die_with_parent


def main(orders: TextIO, answers: TextIO) -> None:
    """Do what the lines of `orders` say, until they end."""
    lock = threading.Lock()

    def tell(answer: Answer) -> None:
        with lock:
            answers.write(answer.encode() + "\n")
            answers.flush()

    start = Start.decode(orders.readline())
    die_with_parent(start.parent)
    try:
        parts = _opened(start)
        for line in orders:
            order = PartTask.decode(line)
            execute(parts, order.task, order.number, lambda nbytes: tell(Answer(nbytes)))
            tell(Answer(is_done=True))
    except CheckpointError as error:
        tell(Answer(error=error))
    except MemoryError:
        tell(Answer(error=CheckpointError("a process of the conversion had no memory; give less")))


def _opened(start: Start) -> UniversalParts:
    opened = start.request.open()
    chosen = start.request.select(opened)
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


if __name__ == "__main__":
    # Ctrl-C reaches all processes of a terminal; the conversion ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(sys.stdin, sys.stdout)
