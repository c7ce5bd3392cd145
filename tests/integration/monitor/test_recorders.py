"""Claims about what is recorded of real jobs, read from outside while they run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from keepstep import autoload
from keepstep.monitor.records import (
    DTYPES,
    Ending,
    Flag,
    JobRecords,
    Kind,
    Measure,
    Operation,
    Phase,
)
from keepstep.monitor.telemetry import attachment
from keepstep.monitor.telemetry.attachment import ATTACHED_VARIABLE, _is_anothers
from keepstep.monitor.telemetry.job_rings import JobRings
from keepstep.monitor.telemetry.ring import process_started
from tests.integration.monitor.jobs import Job, is_pair, names, operations
from tests.integration.monitor.scenarios import PATHS

PATH = {act.__name__: number for number, act in enumerate(PATHS, 1)}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> JobRecords:
    """What two ranks told that went all ways into torch.distributed, read before they ended."""
    with Job(tmp_path_factory.mktemp("rings"), "everything", 2) as job:
        job.expect("done")
        told = job.rings.read(2**14)
        job.proceed()
        job.finish()
    return told


def test_user_calls_are_recorded_in_order_with_what_they_carry(everything: JobRecords) -> None:
    for rank in (0, 1):
        called = operations(everything.ranks[rank].records, PATH["user_calls"])
        assert names(called) == [
            "ALL_REDUCE", "ALL_REDUCE", "ALL_GATHER", "ALL_GATHER", "REDUCE_SCATTER", "REDUCE_SCATTER", "BROADCAST", "REDUCE",
            "GATHER", "SCATTER", "ALL_TO_ALL", "BARRIER", "BARRIER", "ALL_GATHER", "ALL_GATHER",
        ]  # fmt: skip
        assert called["nbytes"][:13].tolist() == [16, 16, 16, 16, 32, 32, 8, 16, 16, 16, 32, 0, 0]
        assert called["peer"].tolist() == [-1, -1, -1, -1, -1, -1, 1, 1, 0, 1, -1, -1, -1, -1, -1]
        assert DTYPES[called["dtype"][0]] == "float32"
        assert DTYPES[called["dtype"][6]] == "bfloat16"
        assert (called["flags"][:2] & Flag.ASYNCHRONOUS).tolist() == [0, Flag.ASYNCHRONOUS]
        first = called["number"][0]
        assert called["number"].tolist() == list(range(first, first + 15))


def test_everything_ended_after_it_was_called(everything: JobRecords) -> None:
    for rank in (0, 1):
        called = operations(everything.ranks[rank].records)
        assert (called["ended_s"] >= called["started_s"]).all()
        assert (called["started_s"] >= called["enqueued_s"]).all()
        assert not (called["flags"] & Flag.FAILED).any()


@pytest.mark.parametrize("path", ["user_calls", "subgroups", "ddp", "fsdp", "tensor_parallel"])
def test_ranks_recorded_the_same_collectives_with_the_same_numbers(
    everything: JobRecords, path: str
) -> None:
    fields = ["communicator", "code", "number", "nbytes", "dtype"]
    sequences = []
    for rank in (0, 1):
        called = operations(everything.ranks[rank].records, PATH[path])
        shared = [c for c, group in everything.communicators.items() if len(group.ranks) == 2]
        sequences.append(
            called[~is_pair(called) & np.isin(called["communicator"], shared)][fields].tolist()
        )
    assert sequences[0] == sequences[1]
    assert sequences[0]


def test_groups_are_known_by_the_same_identity_with_their_global_ranks(
    everything: JobRecords,
) -> None:
    told = {rank: operations(everything.ranks[rank].records, PATH["subgroups"]) for rank in (0, 1)}
    told = {rank: called[~is_pair(called)] for rank, called in told.items()}
    both, alone, again = told[0]["communicator"][-3:].tolist()
    assert both == again
    assert everything.communicators[both].ranks == (0, 1)
    assert everything.communicators[alone].ranks == (0,)
    assert told[1]["communicator"][-3] == both
    assert everything.communicators[int(told[1]["communicator"][-2])].ranks == (1,)
    assert told[0]["number"][-3:].tolist() == [1, 1, 2]
    assert told[0]["peer"][-1] == 1


def test_checksum_of_replicas_names_their_group(everything: JobRecords) -> None:
    for one in everything.ranks.values():
        (measured,) = one.records[one.records["kind"] == Kind.MEASURE]
        assert measured["code"] == Measure.REPLICA_CHECKSUM
        assert measured["nbytes"].view(np.float64) == 2**32 - 1
        assert everything.communicators[int(measured["communicator"])].ranks == (0, 1)


def test_receive_from_anybody_names_nobody(everything: JobRecords) -> None:
    called = operations(everything.ranks[0].records, PATH["subgroups"])
    assert called[is_pair(called)][["code", "peer"]].tolist() == [(Operation.RECEIVE, -1)]


@pytest.mark.parametrize("path", ["pairs", "pipeline"])
def test_sends_and_receives_of_a_pair_bear_the_same_numbers(
    everything: JobRecords, path: str
) -> None:
    for source, target in ((0, 1), (1, 0)):
        sent = operations(everything.ranks[source].records, PATH[path])
        received = operations(everything.ranks[target].records, PATH[path])
        sent, received = (
            sent[sent["code"] == Operation.SEND],
            received[received["code"] == Operation.RECEIVE],
        )
        assert len(sent) >= 4
        assert sent[["number", "nbytes"]].tolist() == received[["number", "nbytes"]].tolist()
        assert (sent["peer"] == target).all()
        assert (received["peer"] == source).all()


def test_send_that_nobody_waited_for_has_an_end_that_is_known_to_be_no_observation(
    everything: JobRecords,
) -> None:
    for one in everything.ranks.values():
        called = operations(one.records, PATH["pairs"])
        unobserved = called[(called["flags"] & Flag.UNOBSERVED) != 0]
        assert names(unobserved) == ["SEND"]
        assert (unobserved["ended_s"] > 0).all()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("ddp", {"ALL_GATHER", "BROADCAST", "ALL_REDUCE"}),
        ("fsdp", {"ALL_GATHER", "REDUCE_SCATTER"}),
        ("tensor_parallel", {"ALL_REDUCE"}),
        ("pipeline", {"SEND", "RECEIVE"}),
    ],
)
def test_operations_that_pytorch_calls_itself_are_seen(
    everything: JobRecords, path: str, expected: set[str]
) -> None:
    for one in everything.ranks.values():
        assert expected <= set(names(operations(one.records, PATH[path])))


def unended(told: JobRecords, rank: int) -> list[tuple[int, int]]:
    called = operations(told.ranks[rank].records)
    return called[called["ended_s"] == 0][["code", "number"]].tolist()


def test_hung_stopped_and_killed_ranks_still_tell_where_they_are(tmp_path: Path) -> None:
    """Rank 1 holds the GIL in C for ever; then rank 2 is stopped, and rank 3 is killed."""
    waiting = (Operation.ALL_REDUCE, 6)
    receiving = (Operation.RECEIVE, 1)
    with Job(tmp_path, "hang", 4) as job:
        job.expect("ready")
        told = job.read_until(
            lambda told: all(waiting in unended(told, rank) for rank in (0, 2, 3))
        )
        assert unended(told, 0) == [receiving, waiting]
        assert unended(told, 1) == []
        assert operations(told.ranks[1].records)["number"].tolist() == [1, 2, 3, 4, 5]
        assert all(one.is_alive for one in told.ranks.values())

        os.kill(job.workers[2].pid, signal.SIGSTOP)
        os.waitid(os.P_PID, job.workers[2].pid, os.WSTOPPED | os.WNOWAIT)
        told = job.rings.read(100)
        assert told.ranks[2].is_alive
        assert unended(told, 2) == [waiting]

        job.workers[3].kill()
        job.workers[3].wait()
        told = job.rings.read(100)
        assert not told.ranks[3].is_alive
        assert told.ranks[3].ending == Ending.NONE
        assert unended(told, 3) == [waiting]

        # The partner that rank 0 waits for breaks its connection: the operation ends, as a failure.
        job.workers[1].kill()
        job.expect("failed", 0)
        told = job.rings.read(100)
        last = operations(told.ranks[0].records)[-1]
        assert (last["code"], last["number"]) == waiting
        assert last["flags"] & Flag.FAILED
        assert last["ended_s"] > last["enqueued_s"]
        assert unended(told, 0) == [receiving]


def test_end_is_told_though_the_worker_holds_the_gil(tmp_path: Path) -> None:
    with Job(tmp_path, "overtaken", 2) as job:
        job.expect("called", 0)
        job.read_until(lambda told: unended(told, 0) == [(Operation.ALL_REDUCE, 2)])
        job.proceed(1)
        job.read_until(lambda told: len(operations(told.ranks[1].records)) == 2)
        job.read_until(lambda told: unended(told, 0) == [])


def test_numbers_begin_anew_with_a_generation_and_not_before(tmp_path: Path) -> None:
    with Job(tmp_path, "generations", 1) as job:
        job.expect("first")
        assert operations(job.rings.read(10).ranks[0].records)["number"].tolist() == [1, 2]
        job.proceed()
        job.expect("second")
        assert operations(job.rings.read(10).ranks[0].records)["number"].tolist() == [1]


def test_odd_calls_go_on_as_if_nobody_watched(tmp_path: Path) -> None:
    with Job(tmp_path, "odd", 1) as job:
        job.expect("done")
        called = operations(job.rings.read(10).ranks[0].records)
        assert called[["code", "nbytes", "flags"]].tolist() == [
            (Operation.ALL_REDUCE, 16, 0), (Operation.ALL_REDUCE, 0, 0), (Operation.REDUCE_SCATTER, 16, Flag.FAILED),
        ]  # fmt: skip
        assert (called["ended_s"] > 0).all()


def test_worker_says_whether_an_exception_ended_it(tmp_path: Path) -> None:
    ends = ["raise ValueError('no such batch')", "raise SystemExit(3)", "raise KeyboardInterrupt"]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", f"from keepstep import monitor; monitor.attach(job='test', rank={rank}); {end}"],
            env={**os.environ, "KEEPSTEP_MONITOR_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])},
            stderr=subprocess.PIPE, text=True,
        )
        for rank, end in enumerate(ends)
    ]  # fmt: skip
    said = [worker.communicate(timeout=60)[1] for worker in workers]
    rings = JobRings(tmp_path / "test")
    endings = [told.ending for _, told in sorted(rings.read(1).ranks.items())]
    rings.close()
    assert endings == [Ending.RAISED, Ending.FINISHED, Ending.FINISHED]
    assert "no such batch" in said[0]


def entry_point(directory: Path) -> Path:
    """Make a distribution with our entry point, as installing this project does."""
    about = directory / "keepstep_test-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: keepstep-test\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        "[torch.backends]\nmonitor_test = keepstep.autoload:attach_if_asked\n"
    )
    return directory


@pytest.mark.parametrize("way", ["environment", "run"])
def test_loop_that_knows_nothing_is_recorded_with_its_phases(tmp_path: Path, way: str) -> None:
    root = str(Path(__file__).parents[3])
    (tmp_path / "site").mkdir()
    path = os.pathsep.join([str(entry_point(tmp_path / "site")), root])
    prefix = ("-m", "keepstep.monitor.run") if way == "run" else ()
    switch = {"KEEPSTEP_MONITOR": "1"} if way == "environment" else {}
    with Job(tmp_path / "rings", "loop", 1, *prefix, PYTHONPATH=path, **switch) as job:
        job.expect("done")
        told = job.rings.read(2**12)
        assert told.ranks[0].is_alive
        assert job.rings.processes() == {0: job.workers[0].pid}
        job.proceed()
        job.finish()
        after = job.rings.read(1)
    assert after.ranks[0].ending == Ending.FINISHED
    assert not after.ranks[0].is_alive

    records = told.ranks[0].records
    marks = records[records["kind"] == Kind.PHASE]
    assert (marks["ended_s"][marks["code"] != Phase.STEP] > 0).all()
    steps = marks[marks["code"] == Phase.STEP]
    assert steps["step"].tolist() == [1, 2, 3, 4]
    assert steps["ended_s"][:3].tolist() == steps["enqueued_s"][1:].tolist()
    for step in (1, 2, 3):
        mine = marks[marks["step"] == step]
        mine = mine[mine["code"] != Phase.GARBAGE_COLLECTION]
        assert mine["code"].tolist() == [
            Phase.STEP,
            Phase.DATA_WAIT,
            Phase.FORWARD,
            Phase.BACKWARD,
            Phase.OPTIMIZER,
        ]
        whole, parts = mine[0], mine[1:]
        assert parts["enqueued_s"][0] >= whole["enqueued_s"]
        assert (parts["enqueued_s"][1:] >= parts["ended_s"][:-1]).all()
        assert parts["ended_s"][-1] <= whole["ended_s"]
        # DDP's in the backward pass, and the one after the optimizer, which is still this step's.
        assert names(operations(records, step))[-2:] == ["ALL_REDUCE", "ALL_REDUCE"]
    assert (marks["code"] == Phase.CHECKPOINT).sum() == 1
    assert Phase.GARBAGE_COLLECTION in marks["code"]


def run_python(
    code: str, cwd: Path, site: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    site.mkdir()
    inherited = {name: value for name, value in os.environ.items() if name != "RANK"}
    path = os.pathsep.join([str(entry_point(site)), str(Path(__file__).parents[3])])
    return subprocess.run(
        [sys.executable, "-c", code], env={**inherited, "KEEPSTEP_MONITOR": "1", "PYTHONPATH": path, **environment}, cwd=cwd,
        check=True, capture_output=True, text=True,
    )  # fmt: skip


def test_process_that_is_no_worker_is_not_attached(tmp_path: Path) -> None:
    code = "import torch, keepstep.monitor.telemetry.attachment; assert keepstep.monitor.telemetry.attachment.current() is None"
    run_python(code, tmp_path, tmp_path / "site", KEEPSTEP_MONITOR_DIR=str(tmp_path / "rings"))
    assert not (tmp_path / "rings").exists()


JOIN = """
import sys, torch, torch.distributed as dist
def join(rank, store):
    if store:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    else:
        dist.init_device_mesh("cpu", (2,))
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
if __name__ == "__main__":
    way, store = sys.argv[1:]
    if way == "torchrun":
        join(0, "")
    else:
        torch.multiprocessing.start_processes(join, (store,), nprocs=2, start_method=way)
"""


@pytest.mark.parametrize("way", ["torchrun", "spawn", "fork"])
def test_workers_are_recorded_and_not_what_launches_them(tmp_path: Path, way: str) -> None:
    """Slurm's variables are torchrun's agent's; who spawns processes has no rank, and PyTorch is imported before they have theirs."""
    (tmp_path / "site").mkdir()
    (tmp_path / "join.py").write_text(JOIN)
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        if way == "torchrun"
        else []
    )
    slurm = (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "4711"}
        if way == "torchrun"
        else {}
    )
    subprocess.run(
        [sys.executable, *launcher, "join.py", way, str(tmp_path / "store")],
        env={
            **{name: value for name, value in os.environ.items() if name != "RANK"}, **slurm, "KEEPSTEP_MONITOR": "1",
            "KEEPSTEP_JOB": "x", "KEEPSTEP_MONITOR_DIR": str(tmp_path / "rings"), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(entry_point(tmp_path / "site")), str(Path(__file__).parents[3])]),
        },
        cwd=tmp_path, check=True, timeout=60,
    )  # fmt: skip
    rings = JobRings(tmp_path / "rings" / "x")
    told, size = rings.read(100), rings.world_size()
    rings.close()
    assert (set(told.ranks), size) == ({0, 1}, 2)
    for one in told.ranks.values():
        assert one.ending == Ending.FINISHED
        assert "ALL_REDUCE" in names(operations(one.records))


def test_rank_is_anothers_only_while_that_one_lives() -> None:
    parent = os.getppid()
    assert _is_anothers({ATTACHED_VARIABLE: f"3 {parent} {process_started(parent)}"}, 3)
    assert not _is_anothers({ATTACHED_VARIABLE: f"3 {parent} {process_started(parent)}"}, 4)
    assert not _is_anothers({ATTACHED_VARIABLE: f"3 {parent} 1"}, 3)
    assert not _is_anothers(
        {ATTACHED_VARIABLE: f"3 {os.getpid()} {process_started(os.getpid())}"}, 3
    )
    assert not _is_anothers({}, 3)


@pytest.mark.parametrize(
    ("told", "outcome"),
    [
        (" True", "asked"),
        ("yes", "asked"),
        ("ON", "asked"),
        ("off", ""),
        ("False", ""),
        ("", ""),
        ("2", "set it to 1"),
    ],
)
def test_switch_is_understood_or_complained_about(
    told: str, outcome: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(attachment, "attach_at_initialization", lambda: asked.append("asked"))
    monkeypatch.setenv("KEEPSTEP_MONITOR", told)
    autoload.attach_if_asked()
    said = asked + [record.getMessage() for record in caplog.records]
    assert [outcome in one for one in said] == [True] * bool(outcome)


def test_users_own_monitor_module_does_not_shadow_the_recorder(tmp_path: Path) -> None:
    (tmp_path / "monitor.py").write_text("")
    done = run_python(
        "import torch; print(torch.ones(2).sum().item())", tmp_path, tmp_path / "site", RANK="0"
    )
    assert done.stdout == "2.0\n"
    assert "not recorded" not in done.stderr
