"""Claims about a monitored job: verdicts reach the coordinator, and actions are carried out."""

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.elastic.monitor_bridge.verdicts import CoordinatorVerdicts
from keepstep.elastic.rendezvous.actions import Open
from keepstep.elastic.rendezvous.records import Closing, Generation, Member, Record
from keepstep.elastic.rendezvous.transactions import leader_operations
from keepstep.elastic.rendezvous.view import Keys, View, from_listing
from keepstep.elastic.store.address import parse_address
from keepstep.elastic.store.blocking import BlockingStore
from keepstep.elastic.store.contract import Put
from keepstep.elastic.store.embedded import EmbeddedEtcd
from keepstep.monitor.diagnosis.policy import ActionKind, EnforcementAction
from keepstep.monitor.errors import RecorderUnavailable
from keepstep.monitor.telemetry import native
from keepstep.monitor.telemetry.ring import WorkerIdentity
from keepstep.monitor.telemetry.ring_files import ring_paths
from keepstep.monitor.telemetry.ring_reader import RingReader
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict
from tests.adaptive_timeouts import patient
from tests.integration.job.jobs import step_of
from tests.patient_cluster import PatientCluster

ROOT = Path(__file__).parents[3]
HANGS_AT = 8
SCRIPT = f"""
import functools, os, sys, time, torch, keepstep
import torch.distributed as dist

def build(world):
    return keepstep.State(torch.nn.Linear(4, 4), functools.partial(torch.optim.SGD, lr=0.1))

with keepstep.join(build) as job:
    data = torch.utils.data.TensorDataset(torch.randn(4096, 4))
    for (batch,) in job.batches(data, global_batch=4, epochs=10**6):
        is_finished = torch.tensor(0)
        with job.step():
            loss = job.model(batch).square().mean()
            hangs = str(job.world.rank) in sys.argv[2:]
            while hangs and (job.world.generation, job.steps) == (1, {HANGS_AT}):
                time.sleep(0.05)
            loss.backward()
            for parameter in job.model.parameters():
                dist.all_reduce(parameter.grad)
            job.optimizer.step()
            # The other tests need the cores, too.
            time.sleep(0.02)
            is_finished = torch.tensor(int(os.path.exists(sys.argv[1])))
            dist.all_reduce(is_finished, dist.ReduceOp.MIN)
        if is_finished:
            break
"""


def members(view: View) -> list[str]:
    return [member.node for member in view.generation.members] if view.generation else []


def identity_of(path: Path) -> WorkerIdentity:
    reader = RingReader(path)
    assert reader.is_alive()
    assert reader.step > 0
    reader.close()
    return reader.identity


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script of a job whose operations are recorded in `rings`."""
    try:
        native.build()
    except RecorderUnavailable as error:
        pytest.skip(f"operations cannot be recorded here: {error}")
    monkeypatch.setenv("PYTHONPATH", os.fspath(ROOT))
    monkeypatch.setenv("XDG_RUNTIME_DIR", os.fspath(tmp_path))
    monkeypatch.setenv("KEEPSTEP_MONITOR_DIR", os.fspath(tmp_path / "rings"))
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@contextmanager
def monitored(*options: str, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `keepstep monitor` of the job while the context lasts."""
    command = [sys.executable, "-P", "-m", "keepstep", "monitor", "--job", "job", "--port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *options], stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(patient(20))


@pytest.mark.long
def test_verdict_of_a_hanging_rank_is_published_and_its_restart_lets_the_job_continue(
    tmp_path: Path, script: Path
) -> None:
    rings, finish = tmp_path / "rings", tmp_path / "finish"

    def is_published(view: View) -> bool:
        hang = ((1,), "b", Syndrome.NON_COMMUNICATION_HANG)
        return any(
            (verdict.ranks, verdict.node, verdict.syndrome) == hang
            for verdict in view.current_verdicts
        )

    running = PatientCluster(
        "job",
        [str(script), str(finish), "1"],
        nnodes="2:2",
        workers=1,
        log=tmp_path / "agents",
        last_call_s=60.0,
    )
    monitor_log = tmp_path / "monitor.log"
    with running, monitored("--store", running.url, "--act", "restart", log=monitor_log):
        running.start("a", "--monitor")
        running.wait_until(lambda view: view.leader == "a", 60)
        running.start("b", "--monitor")
        # Only the monitor ends the loop.
        view = running.wait_until(is_published, 120)
        assert view.generation_number == 1
        view = running.wait_until(
            lambda view: len(view.history.recoveries) == 2 and step_of(view) > 2 * HANGS_AT, 120
        )
        assert view.history.recoveries[1].reason.startswith(
            "rank 1 on b is restarted: non-communication hang"
        )
        # Each node says that the job goes on, and its agent has printed the stack before.
        for node in "ab":
            log = (tmp_path / "agents" / f"{node}.log").read_text()
            assert "generation 2: training goes on after step" in log
        assert re.search(r"rank 1, process \d+, stands at:\n +<module> \(.*train.py", log)
        # Others may be right: on a machine that is overloaded communication is slow.
        assert not is_published(view)
        assert view.restarts == {}
        # Both ranks still record: the survivor and the spare that replaced the hanging worker.
        assert [identity_of(path) for path in ring_paths(rings / "job")] == [
            WorkerIdentity("job", 0, "a", generation=2, world_size=2),
            WorkerIdentity("job", 1, "b", generation=2, world_size=2),
        ]
        finish.touch()
        assert [running.wait(node, 120) for node in ("a", "b")] == [0, 0], (
            running.output() + monitor_log.read_text()
        )
    assert "restart worker: rank 1 on b, non-communication hang" in monitor_log.read_text()
    # The agents removed the rings at the end of the job.
    assert not list(rings.rglob("*.ring"))


@pytest.mark.long
def test_monitor_that_starts_before_a_local_job_acts_in_each_of_its_runs(
    tmp_path: Path, script: Path
) -> None:
    finish, monitor_log = tmp_path / "finish", tmp_path / "monitor.log"
    command = [
        sys.executable, "-P", "-m", "keepstep", "run",
        "--nproc-per-node", "2", "--monitor", "--job", "job",
    ]  # fmt: skip

    def wait_for_log(text: str, times: int) -> None:
        # A hang is acted on after half a minute.
        deadline_s = time.monotonic() + patient(120)
        while monitor_log.read_text().count(text) < times:
            assert time.monotonic() < deadline_s, monitor_log.read_text()
            time.sleep(0.05)

    with monitored("--act", "restart", log=monitor_log):
        wait_for_log("no coordinator of it was found here yet", 1)
        # In the second run rank 1 hangs, and only the monitor ends its loop.
        for run, hanging_rank, expected_text in (
            (1, "none", "reports generation 1"),
            (2, "1", "restart worker: rank 1 on "),
        ):
            finish.unlink(missing_ok=True)
            with (tmp_path / f"run-{run}.log").open("wb") as output:
                job = subprocess.Popen(
                    [*command, str(script), str(finish), hanging_rank], stdout=output, stderr=output
                )
            try:
                wait_for_log(expected_text, 1)
                finish.touch()
                assert job.wait(patient(120)) == 0, (tmp_path / f"run-{run}.log").read_text()
            finally:
                job.terminate()
                job.wait()
            wait_for_log("it has ended, and its coordinator with it", run)
    assert "Traceback" not in monitor_log.read_text()
    assert "ERROR" not in monitor_log.read_text()


@pytest.mark.long
def test_node_with_only_hanging_ranks_is_evicted_and_replaced_by_a_spare_node(
    tmp_path: Path, script: Path
) -> None:
    finish = tmp_path / "finish"
    # Node a joins first and has ranks 0 and 1, so ranks 2 and 3 are those of node b.
    running = PatientCluster(
        "job",
        [str(script), str(finish), "2", "3"],
        nnodes="1:2",
        workers=2,
        log=tmp_path / "agents",
        last_call_s=60.0,
    )
    monitor_log = tmp_path / "monitor.log"
    with running, monitored("--store", running.url, "--act", "replace", log=monitor_log):
        running.start("a", "--monitor")
        running.wait_until(lambda view: view.leader == "a", 60)
        running.start("b", "--monitor")
        running.wait_until(lambda view: view.generation_number == 1, 60)
        running.start("c", "--monitor")
        # Only the monitor ends the loops. The node may return before the others have gone on.
        view = running.wait_until(lambda view: "b" in view.evictions, 120)
        assert view.evictions["b"].reason.startswith("non-communication hang")
        view = running.wait_until(
            lambda view: (
                members(view) == ["a", "c"]
                and step_of(view) > 2 * HANGS_AT
                and len(view.history.recoveries) >= 2
            ),
            120,
        )
        # Node c, ready by then, gets the state from node a.
        assert view.history.recoveries[1].source in ("memory", "memory, peers' memory")
        # The node returns by itself, because its check finds nothing; now it is on standby.
        running.wait_until(lambda view: "b" in view.nodes and not view.evictions, 120)
        finish.touch()
        assert [running.wait(node, 120) for node in "abc"] == [0, 0, 0], (
            running.output() + monitor_log.read_text()
        )
    assert "replace node: node b" in monitor_log.read_text()


def test_job_that_cannot_be_recorded_runs_and_logs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings = tmp_path / "rings"
    rings.mkdir()
    # Other users could create files in this directory, so the recorder refuses it.
    rings.chmod(0o777)
    monkeypatch.setenv("PYTHONPATH", os.fspath(ROOT))
    monkeypatch.setenv("KEEPSTEP_MONITOR_DIR", os.fspath(rings))
    script, finish = tmp_path / "train.py", tmp_path / "finish"
    script.write_text(SCRIPT)
    finish.touch()
    running = PatientCluster(
        "job", [str(script), str(finish)], nnodes="1:1", workers=1, log=tmp_path / "agents"
    )
    with running:
        running.start("a", "--monitor")
        assert running.wait("a", 120) == 0, running.output()
    assert running.output().count("rank 0 is not monitored") == 1


def test_verdicts_and_actions_of_an_ended_generation_are_not_written(
    etcd_server: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepstep.elastic.monitor_bridge.verdicts._REPUBLISH_S", math.inf)
    address = parse_address(etcd_server.url)
    keys, store = Keys("job"), BlockingStore(address)
    verdicts = CoordinatorVerdicts(address, "job")
    members = (Member("a", "h", 2, 0, "h:1", "tcp:h:2"),)
    hang = Verdict(
        subject=Subject("rank", (1,), "a"),
        syndrome=Syndrome.NON_COMMUNICATION_HANG,
        since_s=0.0,
        evidence=("rank 1 never arrived",),
        confidence=0.95,
        cost_s_per_step=math.inf,
        advice=Advice.RESTART_WORKER,
    )
    restart = EnforcementAction(ActionKind.RESTART_WORKER, hang.subject, hang, "", ranks=(1,))

    def put(name: str, record: Record) -> None:
        store.commit((), (Put(keys.single(name), record.encode()),))

    def view() -> View:
        return from_listing(keys, store.read(keys.prefix))

    opening = Open(Generation(2, members, "h", 5, "start"))
    store.commit((), leader_operations(keys, view(), opening, 0.0))
    assert not verdicts.publish([hang], 1, 10.0)
    assert view().verdicts is None
    assert not verdicts.enforce(restart, 1)
    assert verdicts.publish([hang], 2, 10.0)
    # Evidence alone is written again at an interval: until then the caller has to try again.
    assert not verdicts.publish([replace(hang, evidence=("it stands still",))], 2, 10.1)
    assert [verdict.subject for verdict in view().current_verdicts] == ["rank 1 on a"]
    assert verdicts.enforce(restart, 2) is ActionKind.RESTART_WORKER
    assert [request.rank for request in view().restarts_on("a")] == [1]
    # Once the generation closes, the runtime handles its dead ranks.
    put("closing", Closing(2, "rank 1 on a is restarted", True, 0.0))
    assert not verdicts.enforce(restart, 2)
    assert verdicts.publish([], 2, 11.0)
    assert view().verdicts is None
    verdicts.close()
    store.close()
