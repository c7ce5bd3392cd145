"""Claims about what a run that ended too soon leaves in memory, and the next one goes on from."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepstep.elastic.rendezvous.view import Keys
from keepstep.elastic.store.address import parse_address
from keepstep.elastic.store.embedded import EmbeddedEtcd
from keepstep.elastic.store.etcd import EtcdStore
from tests.adaptive_timeouts import patient
from tests.integration.job.jobs import made_once

SCRIPT = Path(__file__).parent / "warm.py"
STEPS = 24
Losses = dict[tuple[int, int], tuple[str, str]]


class Runs:
    """Runs of one script on this machine, and what is left of them.

    Args:
        directory: of the script, its records and its runtime directory.
        way: how the script takes part, `attach` or `join`.
        keep: as for `--keep-state`.
    """

    def __init__(self, directory: Path, way: str = "attach", keep: str = "10m") -> None:
        self.directory, self.keep = directory, keep
        self.runtime = directory / "run"
        self.runtime.mkdir(mode=0o700, parents=True)
        self.script = directory / "train.py"
        self.script.write_text(SCRIPT.read_text())
        self.options: dict[str, Any] = {"way": way, "directory": str(directory)}
        self.slow = directory / "slow"
        self.agents: list[subprocess.Popen[str]] = []

    def edit(self, **values: object) -> None:
        """Change constants of the script."""
        text = self.script.read_text()
        for name, value in values.items():
            text, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
            assert count == 1
        self.script.write_text(text)

    def start(self, *arguments: str, workers: int = 2, **options: Any) -> subprocess.Popen[str]:
        """Start an agent; its output is in `<number>.log`."""
        with (self.directory / f"{len(self.agents)}.log").open("w") as output:
            agent = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", "keepstep", "run", "--keep-state", self.keep,
                    "--nproc-per-node", str(workers), "--spares", "0", *arguments,
                    str(self.script), json.dumps(self.options | options),
                ],
                stdout=output, stderr=subprocess.STDOUT, text=True, cwd=self.directory,
                env={**os.environ, "XDG_RUNTIME_DIR": str(self.runtime)}, start_new_session=True,
            )  # fmt: skip
        self.agents.append(agent)
        return agent

    def output(self, number: int) -> str:
        return (self.directory / f"{number}.log").read_text()

    def finish(self, *arguments: str, **options: Any) -> str:
        """Run until the job has succeeded; return the agent's output."""
        agent = self.start(*arguments, **options)
        status = agent.wait(patient(120))
        output = self.output(len(self.agents) - 1)
        assert status == 0, output
        return output

    def losses(self) -> Losses:
        """Return each step's loss and weights by step and rank; the last run of each counts."""
        lines = [
            json.loads(line)
            for path in sorted(self.directory.glob("*.jsonl"), key=lambda path: path.stat().st_ino)
            for line in path.read_text().splitlines()
        ]
        return {(it["step"], it["rank"]): (it["loss"], it["weights"]) for it in lines}

    def step(self) -> int:
        return max((step for step, _ in self.losses()), default=0)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + patient(60)
        while not condition():
            outputs = "\n".join(self.output(number) for number in range(len(self.agents)))
            assert time.monotonic() < deadline_s, outputs
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        """Return the processes that live, whoever their parent is."""
        found = []
        for process in psutil.process_iter():
            try:
                is_own = process.environ().get("XDG_RUNTIME_DIR") == str(self.runtime)
                if is_own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def files(self) -> list[str]:
        """Return the files and sockets that are left of runs."""
        return sorted(
            path.name
            for path in (self.runtime / "keepstep").rglob("*")
            # The lock of a name that a killed agent had is of nobody.
            if path.name not in ("coordinator.secret", "jobs") and "name-" not in path.name
        )

    def kill(self, agent: subprocess.Popen[str]) -> None:
        """Kill an agent alone."""
        agent.kill()
        agent.wait()

    def close(self) -> None:
        for process in self.processes():
            process.kill()
        for agent in self.agents:
            agent.wait()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path / "r")
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Losses]:
    def make(directory: Path) -> None:
        for way in ("attach", "join"):
            made = Runs(directory / way, way)
            try:
                made.finish()
                assert made.files() == []
                assert made.processes() == []
            finally:
                made.close()
            (directory / f"{way}.json").write_text(json.dumps(list(made.losses().items())))

    directory = made_once(tmp_path_factory, "warm", make)
    return {
        way: {
            (step, rank): (loss, weights)
            for (step, rank), (loss, weights) in json.loads((directory / f"{way}.json").read_text())
        }
        for way in ("attach", "join")
    }


def resumed_step(output: str) -> int:
    """Return the step from which an agent says that it goes on from memory."""
    found = re.search(r"goes on after step (\d+), from memory", output)
    assert found is not None, output
    return int(found[1])


@pytest.mark.parametrize(
    ("way", "error", "options"),
    [
        ("attach", 'ValueError("again and again")', ()),
        pytest.param(
            "attach", "SystemExit(3)", ("--max-restarts", "0"), marks=pytest.mark.campaign
        ),
        ("join", 'ValueError("again and again")', ()),
    ],
)
def test_script_that_failed_and_was_edited_goes_on_from_memory(
    tmp_path: Path, undisturbed: dict[str, Losses], way: str, error: str, options: tuple[str, ...]
) -> None:
    runs = Runs(tmp_path / "r", way)
    try:
        runs.slow.touch()
        runs.edit(RAISES_AT=15, ERROR=error)
        assert runs.start(*options).wait(patient(120)) == 1
        kept = re.search(r"the state of step (\d+) is kept in memory for 10 min", runs.output(0))
        assert kept is not None, runs.output(0)
        runs.slow.unlink()
        runs.edit(RAISES_AT=None)
        output = runs.finish(*options)
        assert 12 <= int(kept[1]) == resumed_step(output) <= 14
        assert f"; {14 - int(kept[1])} step" in output
        assert runs.losses() == undisturbed[way]
        assert runs.files() == []
        assert runs.processes() == []
    finally:
        runs.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_run_that_a_person_ends_or_that_is_killed_goes_on_from_memory(
    runs: Runs, undisturbed: dict[str, Losses], number: signal.Signals
) -> None:
    runs.slow.touch()
    agent = runs.start()
    runs.wait_for(lambda: runs.step() >= 13)
    agent.send_signal(number)
    agent.wait(patient(60))
    runs.slow.unlink()
    # Nothing but the server lives on.
    runs.wait_for(lambda: len(runs.processes()) == 1)
    assert resumed_step(runs.finish()) >= 12
    assert runs.losses() == undisturbed["attach"]
    assert runs.files() == []
    assert runs.processes() == []


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("before the first step", marks=pytest.mark.campaign),
        "in a recovery",
        "while storing",
    ],
)
def test_agent_may_be_killed_at_any_moment(
    runs: Runs, undisturbed: dict[str, Losses], tmp_path: Path, moment: str
) -> None:
    storage = {"checkpoint": str(tmp_path / "stored"), "checkpoint_every": 6}
    limited = ("--storage-limit", "2kB", "--abort-timeout", "60")
    runs.slow.touch()
    agent = runs.start(*limited, storage=storage)
    if moment == "before the first step":
        runs.wait_for(lambda: "generation 1:" in runs.output(0))
    elif moment == "in a recovery":
        runs.wait_for(lambda: runs.step() >= 13)
        next(it for it in runs.processes() if "rank 1 of" in " ".join(it.cmdline())).kill()
        runs.wait_for(lambda: "generation 1 ends" in runs.output(0))
    else:
        runs.wait_for(lambda: runs.step() >= 13 and bool(list(tmp_path.glob("stored/**/*"))))
    runs.kill(agent)
    runs.slow.unlink()
    output = runs.finish(*limited, storage=storage)
    if moment != "before the first step":
        assert resumed_step(output) >= 12
    assert runs.losses() == undisturbed["attach"]
    assert runs.files() == []
    assert runs.processes() == []


def start_pair(runs: Runs, etcd: EmbeddedEtcd, *options: str, **script: Any) -> None:
    for node in ("a", "b"):
        start_one(runs, etcd, node, *options, **script)


def start_one(
    runs: Runs, etcd: EmbeddedEtcd, node: str, *options: str, nnodes: str = "2", **script: Any
) -> subprocess.Popen[str]:
    return runs.start(
        "--store", etcd.url, "--job", "pair", "--node", node, "--nnodes", nnodes,
        "--secret-file", str(runs.directory / "secret"), *options, workers=1, **script,
    )  # fmt: skip


@pytest.fixture
def etcd(runs: Runs) -> Iterator[EmbeddedEtcd]:
    """An etcd that outlives all agents."""
    secret = b"0123456789abcdef0123456789abcdef"
    path = runs.directory / "secret"
    path.touch(mode=0o600)
    path.write_bytes(secret)
    with EmbeddedEtcd(secret) as server:
        yield server


def keys_left(etcd: EmbeddedEtcd, runs: Runs) -> list[str]:
    async def read() -> list[str]:
        store = await EtcdStore.connect(parse_address(etcd.url, runs.directory / "secret"))
        try:
            items = (await store.read(Keys("pair").prefix)).items
            return sorted(Keys("pair").name(item.key) for item in items)
        finally:
            await store.close()

    return asyncio.run(read())


def test_pair_of_killed_nodes_goes_on_from_memory(
    runs: Runs, etcd: EmbeddedEtcd, undisturbed: dict[str, Losses]
) -> None:
    runs.slow.touch()
    start_pair(runs, etcd)
    runs.wait_for(lambda: runs.step() >= 13)
    for agent in runs.agents:
        runs.kill(agent)
    runs.slow.unlink()
    start_pair(runs, etcd)
    assert [agent.wait(patient(120)) for agent in runs.agents[2:]] == [0, 0], runs.output(2)
    assert resumed_step(runs.output(2) + runs.output(3)) >= 12
    assert runs.losses() == undisturbed["attach"]
    assert runs.files() == []
    assert runs.processes() == []
    assert keys_left(etcd, runs) == []


@pytest.mark.campaign
def test_pair_whose_script_raised_goes_on_from_memory(
    runs: Runs, etcd: EmbeddedEtcd, undisturbed: dict[str, Losses]
) -> None:
    runs.slow.touch()
    runs.edit(RAISES_AT=15)
    start_pair(runs, etcd)
    assert [agent.wait(patient(120)) for agent in runs.agents] == [1, 1], runs.output(0)
    assert keys_left(etcd, runs) == ["result", "secret"]
    runs.slow.unlink()
    runs.edit(RAISES_AT=None)
    start_pair(runs, etcd)
    assert [agent.wait(patient(120)) for agent in runs.agents[2:]] == [0, 0], runs.output(2)
    assert 12 <= resumed_step(runs.output(2) + runs.output(3)) <= 14
    assert runs.losses() == undisturbed["attach"]
    assert runs.files() == []
    assert runs.processes() == []
    assert keys_left(etcd, runs) == []


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ((), False),
        (("--parity", "0"), True),
        pytest.param(("--parity", "0"), False, marks=pytest.mark.campaign),
    ],
)
def test_node_that_returns_alone_has_parity_or_storage_or_begins_again_and_says_so(
    runs: Runs, etcd: EmbeddedEtcd, tmp_path: Path, options: tuple[str, ...], stored: bool
) -> None:
    storage = {"checkpoint": str(tmp_path / "stored"), "checkpoint_every": 4} if stored else {}
    runs.slow.touch()
    common = ("--lease-ttl", "2", "--rdzv-conf", "last_call_timeout=60", *options)
    for node in ("a", "b"):
        start_one(runs, etcd, node, *common, nnodes="1:2", storage=storage)
    runs.wait_for(lambda: runs.step() >= 14)
    servers = [it for it in runs.processes() if "snapshot.server.server" in " ".join(it.cmdline())]
    assert len(servers) == 2
    for agent in runs.agents:
        runs.kill(agent)
    for server in servers:
        if "of b" in " ".join(server.cmdline()):
            server.kill()
    runs.slow.unlink()
    agent = start_one(runs, etcd, "a", *common, nnodes="1:2", storage=storage)
    assert agent.wait(patient(120)) == 0, runs.output(2)
    output = runs.output(2)
    if not options:
        assert resumed_step(output) >= 12
    elif stored:
        # A checkpoint is due every 4 steps, and stored with the next snapshot that is complete.
        resumed = re.search(r"goes on after step (\d+), from storage", output)
        assert resumed is not None, output
        assert 4 <= int(resumed[1]) <= 14, output
    else:
        assert "or without one begins again" in output, output
    assert runs.files() == []
    assert runs.processes() == []


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.campaign), signal.SIGKILL]
)
def test_node_without_which_the_job_went_on_does_not_take_it_back(
    runs: Runs, etcd: EmbeddedEtcd, number: signal.Signals
) -> None:
    runs.edit(STEPS=400)
    runs.slow.touch()
    common = ("--lease-ttl", "2", "--rdzv-conf", "last_call_timeout=60")
    for node in ("a", "b"):
        start_one(runs, etcd, node, *common, nnodes="1:2")
    runs.wait_for(lambda: runs.step() >= 13)
    first, second = runs.agents
    second.send_signal(number)
    second.wait(patient(60))
    # The leader prints it, which the node that leaves may still be.
    runs.wait_for(lambda: "generation 2: 1 rank" in runs.output(0) + runs.output(1))
    if number == signal.SIGTERM:
        assert "kept in memory" not in runs.output(1)
        assert len(list(runs.runtime.glob("keepstep/state-*"))) == 1
        runs.slow.unlink()
        assert first.wait(patient(120)) == 0, runs.output(0)
        assert runs.files() == []
        assert runs.processes() == []
        return
    returned = start_one(runs, etcd, "b", *common, nnodes="1:2")
    runs.wait_for(lambda: "generation 3: 2 ranks" in runs.output(0))
    runs.slow.unlink()
    assert [first.wait(patient(120)), returned.wait(patient(120))] == [0, 0], runs.output(0)
    assert runs.files() == []
    assert runs.processes() == []


@pytest.mark.campaign
def test_node_that_returns_after_the_job_has_ended_begins_another_and_says_so(
    runs: Runs, etcd: EmbeddedEtcd
) -> None:
    runs.slow.touch()
    common = ("--lease-ttl", "2", "--rdzv-conf", "last_call_timeout=60")
    for node in ("a", "b"):
        start_one(runs, etcd, node, *common, nnodes="1:2")
    runs.wait_for(lambda: runs.step() >= 13)
    first, second = runs.agents
    runs.kill(second)
    runs.slow.unlink()
    assert first.wait(patient(120)) == 0, runs.output(0)
    returned = start_one(
        runs, etcd, "b", "--lease-ttl", "2", "--rdzv-conf", "last_call_timeout=0", nnodes="1:2"
    )
    assert returned.wait(patient(120)) == 0
    assert "has ended or gone on without this node" in runs.output(2)
    assert "from memory" not in runs.output(2)
    assert runs.files() == []
    assert runs.processes() == []


def test_nothing_is_left_if_nobody_returns(runs: Runs) -> None:
    runs.keep = "2s"
    runs.edit(RAISES_AT=5)
    assert runs.start().wait(patient(120)) == 1
    assert "is kept in memory for 2 s" in runs.output(0)
    runs.wait_for(lambda: not runs.processes() and not runs.files())


def test_state_of_another_line_is_dropped_and_said_so(runs: Runs) -> None:
    runs.edit(RAISES_AT=5)
    assert runs.start().wait(patient(120)) == 1
    runs.edit(RAISES_AT=None)
    output = runs.finish(other=True)
    assert "is dropped: it is of another command line" in output
    assert "from memory" not in output
    assert runs.processes() == []
    assert runs.files() == []


def test_nothing_is_kept_if_the_option_says_so(runs: Runs) -> None:
    runs.edit(RAISES_AT=5)
    assert runs.start().wait(patient(120)) == 1
    (server,) = runs.processes()
    # Whoever reads the output of the run, as `tee` does, waits for its end.
    runs.wait_for(
        lambda: {os.readlink(f"/proc/{server.pid}/fd/{n}") for n in (1, 2)} == {os.devnull}
    )
    runs.keep = "0"
    assert runs.start().wait(patient(120)) == 1
    assert "is dropped: --keep-state is 0" in runs.output(1)
    assert runs.processes() == []
    assert runs.files() == []


@pytest.mark.campaign
def test_run_of_the_same_line_at_the_same_time_is_left_alone(runs: Runs) -> None:
    runs.slow.touch()
    first = runs.start()
    runs.wait_for(lambda: runs.step() >= 12)
    second = runs.start()
    runs.wait_for(lambda: "goes on after" in runs.output(1) or "generation 1" in runs.output(1))
    runs.slow.unlink()
    assert [first.wait(patient(120)), second.wait(patient(120))] == [0, 0]
    for number in range(2):
        assert "kept in memory" not in runs.output(number)
    assert runs.processes() == []
    assert runs.files() == []
