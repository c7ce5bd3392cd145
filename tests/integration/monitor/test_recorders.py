"""Claims about the records of real jobs, read from outside while they run."""

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
from keepstep.monitor.telemetry.attachment import ATTACHED_VARIABLE, _is_child_of_recorded
from keepstep.monitor.telemetry.job_rings import JobRings
from keepstep.monitor.telemetry.ring import process_started
from tests.adaptive_timeouts import patient
from tests.integration.monitor.jobs import Job, is_pair, names, operations
from tests.integration.monitor.scenarios import PATHS

PATH = {act.__name__: number for number, act in enumerate(PATHS, 1)}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> JobRecords:
    """Return the records of two ranks that used every API of torch.distributed, before they end."""
    with Job(tmp_path_factory.mktemp("rings"), "everything", 2) as job:
        job.expect("done")
        records = job.rings.read(2**14)
        job.proceed()
        job.finish()
    return records


def test_user_calls_are_recorded_in_order_with_their_fields(everything: JobRecords) -> None:
    for rank in (0, 1):
        called = operations(everything.ranks[rank].records, PATH["user_calls"])
        assert names(called) == [
            "ALL_REDUCE", "ALL_REDUCE", "ALL_GATHER", "ALL_GATHER", "REDUCE_SCATTER",
            "REDUCE_SCATTER", "BROADCAST", "REDUCE", "GATHER", "SCATTER", "ALL_TO_ALL", "BARRIER",
            "BARRIER", "ALL_GATHER", "ALL_GATHER",
        ]  # fmt: skip
        assert called["nbytes"][:13].tolist() == [16, 16, 16, 16, 32, 32, 8, 16, 16, 16, 32, 0, 0]
        assert called["peer"].tolist() == [-1, -1, -1, -1, -1, -1, 1, 1, 0, 1, -1, -1, -1, -1, -1]
        assert DTYPES[called["dtype"][0]] == "float32"
        assert DTYPES[called["dtype"][6]] == "bfloat16"
        assert (called["flags"][:2] & Flag.ASYNCHRONOUS).tolist() == [0, Flag.ASYNCHRONOUS]
        first = called["number"][0]
        assert called["number"].tolist() == list(range(first, first + 15))


def test_operations_end_after_they_were_called(everything: JobRecords) -> None:
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


def test_groups_have_the_same_identity_on_all_ranks_and_global_ranks(
    everything: JobRecords,
) -> None:
    first, second = (
        operations(everything.ranks[rank].records, PATH["subgroups"]) for rank in (0, 1)
    )
    first, second = first[~is_pair(first)], second[~is_pair(second)]
    both, alone, again = first["communicator"][-3:].tolist()
    assert both == again
    assert everything.communicators[both].ranks == (0, 1)
    assert everything.communicators[alone].ranks == (0,)
    assert second["communicator"][-3] == both
    assert everything.communicators[int(second["communicator"][-2])].ranks == (1,)
    assert first["number"][-3:].tolist() == [1, 1, 2]
    assert first["peer"][-1] == 1


def test_checksum_of_replicas_names_their_group(everything: JobRecords) -> None:
    for rank in everything.ranks.values():
        (measured,) = rank.records[rank.records["kind"] == Kind.MEASURE]
        assert measured["code"] == Measure.REPLICA_CHECKSUM
        assert measured["nbytes"].view(np.float64) == 2**32 - 1
        assert everything.communicators[int(measured["communicator"])].ranks == (0, 1)


def test_receive_from_any_source_has_no_peer(everything: JobRecords) -> None:
    called = operations(everything.ranks[0].records, PATH["subgroups"])
    assert called[is_pair(called)][["code", "peer"]].tolist() == [(Operation.RECEIVE, -1)]


@pytest.mark.parametrize("path", ["pairs", "pipeline"])
def test_sends_and_receives_of_a_pair_have_the_same_numbers(
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


def test_end_of_a_send_that_was_not_waited_for_is_flagged_as_unobserved(
    everything: JobRecords,
) -> None:
    for rank in everything.ranks.values():
        called = operations(rank.records, PATH["pairs"])
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
def test_operations_that_pytorch_calls_itself_are_recorded(
    everything: JobRecords, path: str, expected: set[str]
) -> None:
    for rank in everything.ranks.values():
        assert expected <= set(names(operations(rank.records, PATH[path])))


def open_operations(job: JobRecords, rank: int) -> list[tuple[int, int]]:
    called = operations(job.ranks[rank].records)
    return called[called["ended_s"] == 0][["code", "number"]].tolist()


def test_open_operations_of_hung_stopped_and_killed_ranks_are_readable(tmp_path: Path) -> None:
    """Rank 1 holds the GIL in C for ever; then rank 2 is stopped, and rank 3 is killed."""
    waiting = (Operation.ALL_REDUCE, 6)
    receiving = (Operation.RECEIVE, 1)
    with Job(tmp_path, "hang", 4) as job:
        job.expect("ready")
        records = job.read_until(
            lambda records: all(waiting in open_operations(records, r) for r in (0, 2, 3))
        )
        assert open_operations(records, 0) == [receiving, waiting]
        assert open_operations(records, 1) == []
        assert operations(records.ranks[1].records)["number"].tolist() == [1, 2, 3, 4, 5]
        assert all(rank.is_alive for rank in records.ranks.values())

        os.kill(job.workers[2].pid, signal.SIGSTOP)
        os.waitid(os.P_PID, job.workers[2].pid, os.WSTOPPED | os.WNOWAIT)
        records = job.rings.read(100)
        assert records.ranks[2].is_alive
        assert open_operations(records, 2) == [waiting]

        job.workers[3].kill()
        job.workers[3].wait()
        records = job.rings.read(100)
        assert not records.ranks[3].is_alive
        assert records.ranks[3].ending == Ending.NONE
        assert open_operations(records, 3) == [waiting]

        # The peer that rank 0 waits for closes its connection: the operation ends, with a failure.
        job.workers[1].kill()
        job.expect("failed", 0)
        records = job.rings.read(100)
        last = operations(records.ranks[0].records)[-1]
        assert (last["code"], last["number"]) == waiting
        assert last["flags"] & Flag.FAILED
        assert last["ended_s"] > last["enqueued_s"]
        assert open_operations(records, 0) == [receiving]


def test_end_is_recorded_while_the_worker_holds_the_gil(tmp_path: Path) -> None:
    with Job(tmp_path, "overtaken", 2) as job:
        job.expect("called", 0)
        job.read_until(lambda records: open_operations(records, 0) == [(Operation.ALL_REDUCE, 1)])
        job.proceed(1)
        job.read_until(lambda records: len(operations(records.ranks[1].records)) == 1)
        job.read_until(lambda records: open_operations(records, 0) == [])


def test_numbers_restart_with_a_generation_and_not_with_a_process_group(tmp_path: Path) -> None:
    with Job(tmp_path, "generations", 1) as job:
        job.expect("first")
        assert operations(job.rings.read(10).ranks[0].records)["number"].tolist() == [1, 2]
        job.proceed()
        job.expect("second")
        assert operations(job.rings.read(10).ranks[0].records)["number"].tolist() == [1]


def test_unusual_calls_behave_as_if_they_were_not_recorded(tmp_path: Path) -> None:
    with Job(tmp_path, "odd", 1) as job:
        job.expect("done")
        called = operations(job.rings.read(10).ranks[0].records)
        assert called[["code", "nbytes", "flags"]].tolist() == [
            (Operation.ALL_REDUCE, 16, 0),
            (Operation.ALL_REDUCE, 0, 0),
            (Operation.REDUCE_SCATTER, 16, Flag.FAILED),
        ]
        assert (called["ended_s"] > 0).all()


def test_worker_records_whether_an_exception_ended_it(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[3])
    ends = ["raise ValueError('no such batch')", "raise SystemExit(3)", "raise KeyboardInterrupt"]
    workers = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from keepstep import monitor; monitor.attach(job='test', rank={rank}); {end}",
            ],
            env={**os.environ, "KEEPSTEP_MONITOR_DIR": str(tmp_path), "PYTHONPATH": root},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, end in enumerate(ends)
    ]
    error_outputs = [worker.communicate(timeout=patient(60))[1] for worker in workers]
    rings = JobRings(tmp_path / "test")
    endings = [records.ending for _, records in sorted(rings.read(1).ranks.items())]
    rings.close()
    assert endings == [Ending.RAISED, Ending.FINISHED, Ending.FINISHED]
    assert "no such batch" in error_outputs[0]


def entry_point(directory: Path) -> Path:
    """Create a distribution with this project's entry point, as installing it does."""
    about = directory / "keepstep_test-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: keepstep-test\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        "[torch.backends]\nmonitor_test = keepstep.autoload:attach_if_asked\n"
    )
    return directory


@pytest.mark.parametrize("way", ["environment", "run"])
def test_unmodified_loop_is_recorded_with_its_phases(tmp_path: Path, way: str) -> None:
    root = str(Path(__file__).parents[3])
    (tmp_path / "site").mkdir()
    path = os.pathsep.join([str(entry_point(tmp_path / "site")), root])
    prefix = ("-m", "keepstep.monitor.run") if way == "run" else ()
    switch = {"KEEPSTEP_MONITOR": "1"} if way == "environment" else {}
    with Job(tmp_path / "rings", "loop", 1, *prefix, PYTHONPATH=path, **switch) as job:
        job.expect("done")
        before = job.rings.read(2**12)
        assert before.ranks[0].is_alive
        assert job.rings.processes() == {0: job.workers[0].pid}
        job.proceed()
        job.finish()
        after = job.rings.read(1)
    assert after.ranks[0].ending == Ending.FINISHED
    assert not after.ranks[0].is_alive

    records = before.ranks[0].records
    marks = records[records["kind"] == Kind.PHASE]
    assert (marks["ended_s"][marks["code"] != Phase.STEP] > 0).all()
    steps = marks[marks["code"] == Phase.STEP]
    assert steps["step"].tolist() == [1, 2, 3, 4]
    assert steps["ended_s"][:3].tolist() == steps["enqueued_s"][1:].tolist()
    for step in (1, 2, 3):
        of_step = marks[marks["step"] == step]
        of_step = of_step[of_step["code"] != Phase.GARBAGE_COLLECTION]
        assert of_step["code"].tolist() == [
            Phase.STEP,
            Phase.DATA_WAIT,
            Phase.FORWARD,
            Phase.BACKWARD,
            Phase.OPTIMIZER,
        ]
        step_mark, phases = of_step[0], of_step[1:]
        assert phases["enqueued_s"][0] >= step_mark["enqueued_s"]
        assert (phases["enqueued_s"][1:] >= phases["ended_s"][:-1]).all()
        assert phases["ended_s"][-1] <= step_mark["ended_s"]
        # DDP's in the backward pass, and the one after the optimizer, which belongs to this step.
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
        [sys.executable, "-c", code],
        env={**inherited, "KEEPSTEP_MONITOR": "1", "PYTHONPATH": path, **environment},
        cwd=cwd,
        check=True,
        capture_output=True,
        text=True,
    )


def test_process_that_is_not_a_worker_is_not_attached(tmp_path: Path) -> None:
    code = (
        "import torch; from keepstep.monitor.telemetry import attachment; "
        "assert attachment.current() is None"
    )
    run_python(code, tmp_path, tmp_path / "site", KEEPSTEP_MONITOR_DIR=str(tmp_path / "rings"))
    assert not (tmp_path / "rings").exists()


@pytest.mark.parametrize("named", ["", "/their/plugin.so"])
def test_nccl_knows_the_recorder_before_a_process_group_may_exist(
    tmp_path: Path, named: str
) -> None:
    code = (
        "import os, torch.distributed as dist; "
        "from keepstep.monitor.telemetry.native import library_path\n"
        "try: dist.init_process_group('gloo', init_method='unknown://')\n"
        "except (RuntimeError, ValueError): pass\n"
        f"expected = {named!r} or str(library_path())\n"
        "assert os.environ['NCCL_PROFILER_PLUGIN'] == expected\n"
    )
    given = {"NCCL_PROFILER_PLUGIN": named} if named else {}
    run_python(code, tmp_path, tmp_path / "site", **given)


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
def test_workers_are_recorded_and_their_launcher_is_not(tmp_path: Path, way: str) -> None:
    """Slurm's variables are those of torchrun's agent; a process that spawns others has no rank.

    The spawned processes import PyTorch before they have their rank.
    """
    (tmp_path / "site").mkdir()
    (tmp_path / "join.py").write_text(JOIN)
    path = os.pathsep.join([str(entry_point(tmp_path / "site")), str(Path(__file__).parents[3])])
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
            **{name: value for name, value in os.environ.items() if name != "RANK"},
            **slurm,
            "KEEPSTEP_MONITOR": "1",
            "KEEPSTEP_JOB": "x",
            "KEEPSTEP_MONITOR_DIR": str(tmp_path / "rings"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
        },
        cwd=tmp_path,
        check=True,
        timeout=patient(60),
    )
    rings = JobRings(tmp_path / "rings" / "x")
    records, size = rings.read(100), rings.world_size()
    rings.close()
    assert (set(records.ranks), size) == ({0, 1}, 2)
    for rank in records.ranks.values():
        assert rank.ending == Ending.FINISHED
        assert "ALL_REDUCE" in names(operations(rank.records))


def test_environment_of_a_recorded_process_counts_only_while_that_process_lives() -> None:
    parent = os.getppid()
    assert _is_child_of_recorded({ATTACHED_VARIABLE: f"3 {parent} {process_started(parent)}"}, 3)
    assert not _is_child_of_recorded(
        {ATTACHED_VARIABLE: f"3 {parent} {process_started(parent)}"}, 4
    )
    assert not _is_child_of_recorded({ATTACHED_VARIABLE: f"3 {parent} 1"}, 3)
    assert not _is_child_of_recorded(
        {ATTACHED_VARIABLE: f"3 {os.getpid()} {process_started(os.getpid())}"}, 3
    )
    assert not _is_child_of_recorded({}, 3)


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        (" True", "attached"),
        ("yes", "attached"),
        ("ON", "attached"),
        ("off", ""),
        ("False", ""),
        ("", ""),
        ("2", "set it to 1"),
    ],
)
def test_variable_attaches_the_recorder_or_an_invalid_value_is_logged(
    value: str, outcome: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(attachment, "attach_at_initialization", lambda: calls.append("attached"))
    monkeypatch.setenv("KEEPSTEP_MONITOR", value)
    autoload.attach_if_asked()
    outcomes = calls + [record.getMessage() for record in caplog.records]
    assert [outcome in text for text in outcomes] == [True] * bool(outcome)


def test_module_of_the_user_named_monitor_does_not_prevent_attaching(tmp_path: Path) -> None:
    (tmp_path / "monitor.py").write_text("OWNER = 'user'")
    code = "import torch, monitor; print(monitor.OWNER)"
    done = run_python(code, tmp_path, tmp_path / "site", RANK="0")
    assert (done.stdout, done.stderr) == ("user\n", "")
