"""The import of dumps that this PyTorch really writes."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from monitor.records import Operation
from monitor.telemetry.flight_recorder import read_dumps

CODE = """
import os, sys, torch, torch.distributed as dist
import torch._C._distributed_c10d as c10d
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4)); dist.barrier(); dist.broadcast(torch.ones(2, dtype=torch.float16), 0)
for name, dump in (("json", c10d._dump_fr_trace_json()), ("pickle", c10d._dump_fr_trace())):
    with open(os.path.join(sys.argv[1], name + "_0"), "wb") as file:
        file.write(dump)
os._exit(0)
"""


def test_both_forms_of_a_real_dump_tell_the_same(tmp_path: Path) -> None:
    environment = {"TORCH_FR_BUFFER_SIZE": "100", "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], env=environment, check=True)
    one, other = (read_dumps([tmp_path / name]) for name in ("json_0", "pickle_0"))
    assert one.communicators == other.communicators
    assert np.array_equal(one.ranks[0].records, other.ranks[0].records)
    assert one.ranks[0].records[["code", "nbytes", "number"]].tolist() == [
        (Operation.ALL_REDUCE, 16, 1), (Operation.BARRIER, 0, 2), (Operation.BROADCAST, 4, 3),
    ]  # fmt: skip
