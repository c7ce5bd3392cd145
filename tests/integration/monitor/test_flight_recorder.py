"""Claims about dumps that the installed PyTorch writes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from keepstep.monitor.cli.monitor import monitor
from keepstep.monitor.records import Operation
from keepstep.monitor.telemetry.flight_recorder import read_dumps
from tests.adaptive_timeouts import patient

CODE = """
import os, sys, torch, torch.distributed as dist
import torch._C._distributed_c10d as c10d
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4)); dist.barrier()
dist.broadcast(torch.ones(2, dtype=torch.float16), 0)
for name, dump in (("json", c10d._dump_fr_trace_json()), ("pickle", c10d._dump_fr_trace())):
    with open(os.path.join(sys.argv[1], name + "_0"), "wb") as file:
        file.write(dump)
os._exit(0)
"""


def test_both_formats_of_a_real_dump_have_the_same_content(tmp_path: Path) -> None:
    environment = {"TORCH_FR_BUFFER_SIZE": "100", "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], env=environment, check=True)
    from_json, from_pickle = (read_dumps([tmp_path / name]) for name in ("json_0", "pickle_0"))
    assert from_json.communicators == from_pickle.communicators
    assert np.array_equal(from_json.ranks[0].records, from_pickle.ranks[0].records)
    assert from_json.ranks[0].records[["code", "nbytes", "number"]].tolist() == [
        (Operation.ALL_REDUCE, 16, 1), (Operation.BARRIER, 0, 2), (Operation.BROADCAST, 4, 3),
    ]  # fmt: skip


RANK = """
import json, os, sys, torch, torch.distributed as dist
import torch._C._distributed_c10d as c10d
rank, world, place, fault = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
store = dist.FileStore(os.path.join(place, "store"), world)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
dist.all_reduce(torch.ones(4)); dist.barrier()
if fault == "another" and rank == 1:
    work = dist.broadcast(torch.ones(1000), 0, async_op=True)
elif fault != "absent" or rank != 1:
    work = dist.all_reduce(torch.ones(1000), async_op=True)
if fault == "none":
    work.wait()
while True:
    dump = c10d._dump_fr_trace_json()
    # gloo's threads record an end a moment after `wait` returns.
    entries = json.loads(dump)["entries"]
    waited = [entry for entry in entries if fault == "none" or entry["collective_seq_id"] < 3]
    if all(entry["retired"] for entry in waited):
        break
with open(os.path.join(place, "dumps", f"rank_{rank}"), "wb") as file:
    file.write(dump)
store.add("dumped", 1)
while int(store.add("dumped", 0)) < world:
    pass
os._exit(0)
"""


@pytest.mark.parametrize(
    ("fault", "world", "status", "sentences"),
    [
        ("none", 2, 0, ["no fault found"]),
        ("absent", 3, 1, [
            "non-communication hang: rank 1",
            "rank 1 never came to operation 3 of group 0 (default_pg), "
            "all_reduce of 4000 bytes of float32",
            "ranks 0, 2 waited in it", "operation 2 of group 0 (default_pg), barrier",
        ]),
        ("another", 3, 1, [
            "mismatched collectives: rank 1",
            "operation 3: broadcast of 4000 bytes of float32 at rank 1",
        ]),
    ],
)  # fmt: skip
def test_command_identifies_the_faulty_rank_in_dumps_of_real_processes(
    tmp_path: Path, fault: str, world: int, status: int, sentences: list[str]
) -> None:
    (tmp_path / "dumps").mkdir()
    environment = {"TORCH_FR_BUFFER_SIZE": "100", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    arguments = [str(world), str(tmp_path), fault]
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), *arguments], env=environment)
        for rank in range(world)
    ]
    try:
        assert [rank.wait(patient(60)) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    done = analyze(str(tmp_path / "dumps"))
    assert done.exit_code == status, done.output
    for sentence in sentences:
        assert sentence in done.output
    as_json = json.loads(analyze(str(tmp_path / "dumps"), "--json").stdout)
    assert as_json["ranks"] == list(range(world))
    assert [event["event_name"] for event in as_json["verdicts"]] == [
        "keepstep.verdict.opened"
    ] * status
    if fault == "absent":
        (event,) = as_json["verdicts"]
        assert event["attributes"]["keepstep.verdict.subject.ranks"] == [1]
        (tmp_path / "dumps" / "rank_1").unlink()
        assert "no dump of rank 1" in analyze(str(tmp_path / "dumps")).output


def test_file_that_is_not_a_dump_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "rank_0").write_text("no dump")
    for place in (tmp_path, tmp_path / "rank_1"):
        done = analyze(str(place))
        assert done.exit_code == 2
        assert done.stdout == ""
        assert done.stderr.startswith(f"keepstep: {tmp_path}/rank_")
        assert done.stderr.count("\n") == 1


def analyze(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(monitor, ["analyze", *arguments])
