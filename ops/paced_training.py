"""Trains as `examples/train.py` does, and waits in each step until a file is there.

`keepstep run ops/paced_training.py FILE --pause 0.3 ...`. Whoever disturbs the job makes the file
when it is done: until then the training takes its time, and then it ends soon.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import train  # Next to this tree's examples, which PYTHONPATH names.


class Pace:
    """The part of `time` that the example uses."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self, hurry: Path) -> None:
        self._hurry = hurry

    def sleep(self, seconds: float) -> None:
        if not self._hurry.exists():
            time.sleep(seconds)


if __name__ == "__main__":
    train.time = Pace(Path(sys.argv.pop(1)))
    train.main()
