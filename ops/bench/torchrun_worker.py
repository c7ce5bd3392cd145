"""Runs one worker under torchrun: a sum over all ranks in each step, and a line for each step.

`torchrun_worker.py DIRECTORY`. It ends with the step in which rank 0 finds the file `end` there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

PAUSE_S = 0.05


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with (directory / f"steps-{os.getpid()}.jsonl").open("a", buffering=1) as lines:
        while True:
            ends = rank == 0 and (directory / "end").exists()
            summed = torch.tensor([1.0, float(ends)])
            dist.all_reduce(summed)
            assert summed[0] == world_size, "every rank adds 1"
            line = {
                "at": time.time(),
                "rank": rank,
                "world": world_size,
                "pid": os.getpid(),
                "agent": os.getppid(),
                "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
            }
            lines.write(json.dumps(line) + "\n")
            if summed[1]:
                break
            time.sleep(PAUSE_S)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
