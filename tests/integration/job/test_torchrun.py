"""Claims about torchrun with `--rdzv-backend keepstep`: real agents, workers over gloo and etcd."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.local_cluster import process_tree
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.elastic.rendezvous.view import Keys, View, from_listing
from keepstep.elastic.store.address import parse_address
from keepstep.elastic.store.embedded import EmbeddedEtcd
from keepstep.elastic.store.etcd import EtcdStore
from keepstep.elastic.store.ports import ReservedPort
from keepstep.private_files import write_file
from ops.bench.processes import kill_tree
from tests.adaptive_timeouts import patient
from tests.integration.job.jobs import (
    Lines,
    committed_in,
    committed_step_of,
    last_run_of_each_step,
    made_once,
    samples,
)
from tests.integration.job.test_attach import EPOCHS, STEPS, run_undisturbed
from tests.integration.job.test_attach import SCRIPT as ATTACHED

ROOT = Path(__file__).parents[3]
WORKER = ROOT / "ops" / "bench" / "torchrun_worker.py"
LEASE_TTL_S = 3
CONF = f"last_call_timeout=3,lease_ttl_s={LEASE_TTL_S}"

Line = dict[str, Any]


def torchrun(endpoint: str, *options: str, conf: str = CONF, job: str = "run7") -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "keepstep",
        "--rdzv-endpoint", endpoint, "--rdzv-id", job, "--rdzv-conf", conf,
        "--local-addr", "127.0.0.1", *options,
    ]  # fmt: skip


class Nodes:
    """torchrun agents of one job on this machine, and the steps of their workers.

    They run `attached.py` if its options are given, with two workers each.
    """

    def __init__(self, directory: Path, etcd: EmbeddedEtcd, **attached: Any) -> None:
        self.directory = directory
        self.etcd = etcd
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.script = [str(WORKER), str(directory)]
        if attached:
            (directory / "log").mkdir()
            given = {"epochs": EPOCHS, "dropout": 0.1, "log": str(directory / "log"), **attached}
            self.script = ["--nproc-per-node", "2", str(ATTACHED), json.dumps(given)]

    def start(self, name: str, *options: str, conf: str = CONF) -> None:
        limits = options or ("--nnodes", "1:2", "--max-restarts", "3")
        command = torchrun(self.etcd.url, *limits, conf=conf)
        with (self.directory / f"{name}.log").open("ab") as output:
            self.agents[name] = subprocess.Popen(
                [*command, *self.script],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self, name: str) -> float:
        at_s = time.time()
        agent = self.agents.pop(name)
        kill_tree(agent.pid)
        agent.wait()
        return at_s

    def signal(self, name: str, number: signal.Signals) -> float:
        """Send a signal to all processes of a node, as a frozen machine has all of them stopped."""
        for process in process_tree(self.agents[name].pid):
            process.send_signal(number)
        return time.time()

    def worker(self, name: str) -> psutil.Process:
        scripts = (WORKER.name, ATTACHED.name)
        return next(
            it
            for it in psutil.Process(self.agents[name].pid).children()
            if any(script in " ".join(it.cmdline()) for script in scripts)
        )

    def lines(self, since_s: float = 0.0) -> list[Line]:
        found = []
        for path in self.directory.glob("steps-*.jsonl"):
            for text in path.read_text().splitlines():
                try:
                    line = json.loads(text)
                except ValueError:
                    continue  # Its process was killed while it wrote.
                if line["at"] > since_s:
                    found.append(line)
        return sorted(found, key=lambda line: float(line["at"]))

    def steps(self, world_size: int, *names: str, since_s: float = 0.0) -> list[Line]:
        """Return the first step of each of these nodes with so many ranks, once all have made one.

        Their processes are those that run now.
        """
        first: dict[int, Line] = {}

        def is_reached() -> bool:
            for line in self.lines(since_s):
                if line["world"] == world_size:
                    first.setdefault(line["agent"], line)
            return all(self.agents[name].pid in first for name in names)

        self.until(is_reached)
        return [first[self.agents[name].pid] for name in names]

    def until(self, is_reached: Callable[[], bool]) -> None:
        until_s = time.monotonic() + patient(60)
        while not is_reached():
            assert time.monotonic() < until_s, self.output()
            time.sleep(0.05)

    def view(self) -> View:
        async def read() -> View:
            store = await EtcdStore.connect(parse_address(self.etcd.url))
            try:
                keys = Keys("run7")
                return from_listing(keys, await store.read(keys.prefix))
            finally:
                await store.close()

        return asyncio.run(read())

    def view_where(self, is_reached: Callable[[View], bool]) -> View:
        """Wait until the job's keys are as the test wants them."""
        view = self.view()

        def read() -> bool:
            nonlocal view
            view = self.view()
            return is_reached(view)

        self.until(read)
        return view

    def finish(self, *names: str) -> None:
        """Let the workers end, and check that the agents do so, and leave nothing in etcd."""
        (self.directory / "end").touch()
        for name in names:
            assert self.agents.pop(name).wait(patient(60)) == 0, self.output()
        assert self.view().secret is None

    def output(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-8000:]}" for path in self.directory.glob("*.log")
        )


@pytest.fixture
def nodes(tmp_path: Path, etcd_server: EmbeddedEtcd) -> Iterator[Nodes]:
    with running(Nodes(tmp_path, etcd_server)) as them:
        yield them


@contextmanager
def running(them: Nodes) -> Iterator[Nodes]:
    try:
        yield them
    finally:
        for name in list(them.agents):
            them.signal(name, signal.SIGCONT)
            them.kill(name)


@pytest.mark.long
def test_others_go_on_without_a_killed_node_and_with_it_when_it_comes_back(nodes: Nodes) -> None:
    nodes.start("a")
    nodes.start("b")
    nodes.steps(2, "a", "b")
    killed_s = nodes.kill("b")
    (alone,) = nodes.steps(1, "a", since_s=killed_s)
    # Sooner than the lease ends: its port refuses connections at once.
    assert "is dead" in (nodes.directory / "a.log").read_text()
    nodes.start("b")
    # The last step of both before the loss may have been written after the kill.
    both = nodes.steps(2, "a", "b", since_s=alone["at"])
    assert sorted(line["rank"] for line in both) == [0, 1]
    # Another round over gloo, in which nobody may read an address of the round before.
    crashed_s = time.time()
    nodes.worker("b").kill()
    again = nodes.steps(2, "a", "b", since_s=crashed_s + 0.5)
    assert {line["pid"] for line in again}.isdisjoint(line["pid"] for line in both)
    assert [line["rank"] for line in again] == [line["rank"] for line in both]
    nodes.finish("a", "b")


@pytest.mark.long
def test_node_that_freezes_is_lost_with_its_lease_and_returns_when_it_thaws(nodes: Nodes) -> None:
    nodes.start("a")
    nodes.start("b")
    nodes.steps(2, "a", "b")
    frozen_s = nodes.signal("b", signal.SIGSTOP)
    (alone,) = nodes.steps(1, "a", since_s=frozen_s)
    assert alone["at"] - frozen_s < patient(LEASE_TTL_S + 15)
    thawed_s = nodes.signal("b", signal.SIGCONT)
    nodes.steps(2, "a", "b", since_s=thawed_s + 0.1)
    nodes.finish("a", "b")


@pytest.mark.long
def test_round_is_not_begun_with_a_node_that_does_not_enter_it(nodes: Nodes) -> None:
    limits = ("--nnodes", "2")
    for name in ("a", "b"):
        nodes.start(name, *limits)
    nodes.steps(2, "a", "b")
    for name in ("c", "d"):
        nodes.start(name, *limits)
        count = len(nodes.agents)
        nodes.until(lambda count=count: len(nodes.view().nodes) == count)  # type: ignore[misc]
    # It stands by first, so it is given the lost one's place, and cannot take it.
    nodes.signal("c", signal.SIGSTOP)
    killed_s = nodes.kill("b")
    nodes.steps(2, "a", "d", since_s=killed_s)
    nodes.signal("c", signal.SIGCONT)
    nodes.kill("c")
    nodes.finish("a", "d")


@pytest.mark.long
def test_outage_of_etcd_stops_no_worker_and_losses_are_noticed_after_it(nodes: Nodes) -> None:
    nodes.start("a")
    nodes.start("b")
    before = nodes.steps(2, "a", "b")
    etcd = psutil.Process(nodes.etcd.pid)
    etcd.suspend()
    away_s = time.time()
    outlasted_s = away_s + 2 * LEASE_TTL_S
    during = nodes.steps(2, "a", "b", since_s=outlasted_s)
    etcd.resume()
    assert [line["pid"] for line in during] == [line["pid"] for line in before]
    killed_s = nodes.kill("b")
    nodes.steps(1, "a", since_s=killed_s)
    nodes.finish("a")


def test_terminated_node_leaves_at_once_and_does_not_end_the_job(nodes: Nodes) -> None:
    nodes.start("a")
    nodes.start("b")
    nodes.steps(2, "a", "b")
    nodes.agents["b"].terminate()
    assert nodes.agents.pop("b").wait(patient(60)) != 0
    assert len(nodes.view().nodes) == 1
    nodes.steps(1, "a")
    nodes.agents["a"].terminate()
    assert nodes.agents.pop("a").wait(patient(60)) != 0
    # Nobody is left who could have declared it gone.
    assert nodes.view().secret is None


def test_failure_for_good_on_one_node_ends_the_job_on_all(nodes: Nodes) -> None:
    limits = ("--nnodes", "2", "--max-restarts", "0")
    nodes.start("a", *limits)
    nodes.start("b", *limits)
    nodes.steps(2, "a", "b")
    nodes.worker("b").kill()
    for name in ("a", "b"):
        assert nodes.agents.pop(name).wait(patient(60)) != 0
    assert nodes.view().secret is None


@pytest.mark.frameworks
def test_second_job_of_a_name_is_refused_and_the_first_goes_on(nodes: Nodes) -> None:
    nodes.start("a")
    (before,) = nodes.steps(1, "a")
    command = torchrun(nodes.etcd.url, "--nnodes", "1:3", str(WORKER), str(nodes.directory))
    refused = subprocess.run(
        command, capture_output=True, text=True, timeout=patient(60), check=False
    )
    assert refused.returncode != 0
    assert "RendezvousStateError: job 'run7' is already running something else" in refused.stderr
    assert "--rdzv-id" in refused.stderr
    (after,) = nodes.steps(1, "a", since_s=time.time())
    assert after["pid"] == before["pid"]
    nodes.finish("a")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return last_run_of_each_step(made_once(tmp_path_factory, "attached", run_undisturbed))


def test_lost_worker_and_then_a_lost_node_that_returns_change_no_loss_of_an_attached_script(
    tmp_path: Path, etcd_server: EmbeddedEtcd, undisturbed: Lines
) -> None:
    conf = f"last_call_timeout=600,lease_ttl_s={LEASE_TTL_S}"
    options = {"pause_s": 1.0, "finishes": True, "checkpoint": str(tmp_path / "checkpoint")}
    with running(Nodes(tmp_path, etcd_server, **options)) as nodes:
        for name in "ab":
            nodes.start(name, conf=conf)
        before = nodes.view_where(lambda view: committed_step_of(view) >= 3)
        nodes.worker("b").kill()
        nodes.view_where(lambda view: committed_in(view, 2))
        nodes.kill("b")
        nodes.view_where(lambda view: committed_in(view, 3))
        nodes.start("b", conf=conf)
        view = nodes.view_where(lambda view: committed_in(view, 4))
        (tmp_path / "log/hurry").touch()
        nodes.finish("a", "b")
    _, *recoveries = view.history.recoveries
    assert [it.world_size for it in recoveries] == [4, 2, 4]
    assert all("storage" not in it.source and "memory" in it.source for it in recoveries)
    assert recoveries[0].resumed_step >= committed_step_of(before)
    # Nodes that join wait for the end of a step.
    assert recoveries[2].lost_steps == 0
    (stored,) = list_steps(open_storage(str(tmp_path / "checkpoint")))
    assert stored.step == STEPS
    lines = last_run_of_each_step(tmp_path)
    assert sorted(lines) == list(range(1, STEPS + 1))
    assert samples(lines) == samples(undisturbed)
    for step, ranks in lines.items():
        for rank, line in ranks.items():
            # Fewer ranks draw other numbers for their dropout.
            if line["world_size"] == 4 and line["generation"] < 3:
                assert line["loss"] == undisturbed[step][rank]["loss"], (step, rank)
    # A lost peer is not the script's error.
    assert "Traceback" not in nodes.output()


@pytest.mark.long
@pytest.mark.frameworks
def test_terminated_node_hands_over_the_state_of_an_attached_script(
    tmp_path: Path, etcd_server: EmbeddedEtcd
) -> None:
    """There is no parity that others could rebuild it from."""
    conf = f"last_call_timeout=600,lease_ttl_s={LEASE_TTL_S},parity=0,grace={patient(60):.0f}"
    with running(Nodes(tmp_path, etcd_server, pause_s=1.0, finishes=True)) as nodes:
        for name in "ab":
            nodes.start(name, conf=conf)
        before = nodes.view_where(lambda view: committed_step_of(view) >= 3)
        nodes.agents["b"].terminate()
        assert nodes.agents.pop("b").wait(patient(120)) != 0
        view = nodes.view_where(lambda view: committed_in(view, 2))
        (tmp_path / "log/hurry").touch()
        nodes.finish("a")
    *_, recovery = view.history.recoveries
    assert "memory" in recovery.source
    assert recovery.resumed_step >= committed_step_of(before)
    assert recovery.world_size == 2


@pytest.mark.parametrize(
    ("endpoint", "conf", "error"),
    [
        ("etcd://127.0.0.1:{free}", CONF, "RendezvousConnectionError: no answer from etcd at"),
        pytest.param(
            "{etcd}",
            "secret_file={secret}",
            "RendezvousConnectionError: no answer from etcd at",
            marks=pytest.mark.frameworks,
        ),
        pytest.param(
            "{etcd}",
            "is_host=1",
            "ValueError: --rdzv-conf is_host: the back end keepstep has no",
            marks=pytest.mark.frameworks,
        ),
        pytest.param(
            "{etcd}",
            "join_timeout=1",
            "RendezvousTimeoutError: job run7: no round within 1 s",
            marks=pytest.mark.frameworks,
        ),
    ],
    ids=["no coordinator", "wrong secret", "unknown option", "too few nodes"],
)
def test_what_cannot_work_is_said_in_an_error_of_torchrun(
    tmp_path: Path, etcd_server: EmbeddedEtcd, endpoint: str, conf: str, error: str
) -> None:
    secret = tmp_path / "secret"
    write_file(secret, b"another secret of this test")
    with ReservedPort() as free:
        filled = endpoint.format(free=free.number, etcd=etcd_server.url)
        command = torchrun(filled, "--nnodes", "2", str(WORKER), conf=conf.format(secret=secret))
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=patient(90), check=False
        )
    assert done.returncode != 0
    assert error in done.stderr, done.stderr


def test_back_end_is_registered_without_a_warning_and_is_light() -> None:
    code = (
        "import sys; from torch.distributed.elastic.rendezvous import rendezvous_handler_registry; "
        "print(rendezvous_handler_registry._registry['keepstep'].__module__, 'grpc' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.stdout.split() == ["keepstep.elastic.torchrun", "False"]
    assert "keepstep" not in done.stderr
