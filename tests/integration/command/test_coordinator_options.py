"""Claims about how nodes find the coordinator, and who may use the one that a node starts."""

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from keepstep.elastic.cli import coordinator as module
from keepstep.elastic.cli.coordinator import coordinator
from keepstep.elastic.errors import StoreUnavailable, UsageError
from keepstep.elastic.store.address import Access, Address
from keepstep.elastic.store.credentials import coordinator_secret
from keepstep.elastic.store.embedded import EmbeddedEtcd
from keepstep.elastic.store.ports import ReservedPort
from tests.adaptive_timeouts import patient
from tests.integration.command.test_bad_input import ROOT, keepstep, script
from tests.integration.store.test_members import reserved_pairs

OPTIONS: dict[str, Any] = {
    "store": None,
    "secret_file": None,
    "rdzv_endpoint": None,
    "master_addr": None,
    "master_port": None,
    "standalone": False,
}


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def found(min_nodes: int, directory: Path, **options: Any) -> tuple[Address, bool]:
    """Return the address of the coordinator that these options lead to, and whose it is."""

    async def connect() -> tuple[Address, bool]:
        async with coordinator({**OPTIONS, **options}, min_nodes, directory) as reached:
            await reached.store.read("/t/")
            return reached.address, reached.is_own

    return asyncio.run(connect())


@pytest.fixture
def free_port() -> Iterator[int]:
    with ReservedPort() as port:
        yield port.number


@pytest.mark.parametrize("option", [{}, {"standalone": True, "rdzv_endpoint": "127.0.0.1:1"}])
def test_several_nodes_without_a_common_coordinator_are_refused(
    tmp_path: Path, option: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=r"2 nodes.*--rdzv-endpoint HOST:PORT.*--store etcd://"):
        found(2, tmp_path, **option)


def test_node_of_its_own_gets_a_coordinator_on_loopback(tmp_path: Path) -> None:
    address, is_own = found(1, tmp_path)
    assert (address.hosts, address.access, is_own) == (("127.0.0.1",), Access.SECRET, True)


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0"])
def test_endpoint_on_the_network_without_a_secret_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(UsageError, match=r"needs a secret.*--secret-file"):
        found(2, tmp_path, rdzv_endpoint=f"{host}:29400")


def test_agent_that_finds_the_port_taken_when_it_starts_its_coordinator_connects(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = Address((f"127.0.0.1:{free_port}",), Access.SECRET)
    # Nobody listens when this agent looks, but when it has started its own etcd.
    real = module._is_taken
    answers = iter([False])
    monkeypatch.setattr(
        module, "_is_taken", lambda asked: next(answers, None) is not False and real(asked)
    )
    with EmbeddedEtcd(coordinator_secret(address, os.environ), port=free_port):
        reached = found(2, tmp_path, rdzv_endpoint=address.endpoints[0])
    assert reached == (address, False)


def test_etcd_that_lost_the_port_to_another_one_is_not_taken_for_running(
    tmp_path: Path, free_port: int
) -> None:
    secret = b"the same secret on all nodes"
    with EmbeddedEtcd(secret, port=free_port):
        second = EmbeddedEtcd(secret, port=free_port)
        # It gets as far as this if both have reserved the port before the first one listens.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("keepstep.elastic.store.embedded.ReservedPort", Reserved)
            with pytest.raises(StoreUnavailable, match="did not start"):
                second.start()


class Reserved:
    """A `ReservedPort` that finds every port free."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        with ReservedPort() as other:
            self.address, self.number = other.address, port or other.number

    def close(self) -> None:
        pass


@pytest.mark.parametrize("name", [("--job", "pair"), ()], ids=["named", "unnamed"])
def test_nodes_started_at_the_same_time_with_one_endpoint_form_one_job(
    tmp_path: Path, free_port: int, name: tuple[str, ...]
) -> None:
    nodes = [
        subprocess.Popen(
            [
                sys.executable, "-P", "-m", "keepstep", "run", "--nnodes", "2", "--node", node,
                "--rdzv-endpoint", f"localhost:{free_port}", *name,
                "--no-python", "sh", "-c", "echo rank $RANK of $WORLD_SIZE",
            ],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in ("a", "b")
    ]  # fmt: skip
    outputs = [node.communicate(timeout=patient(120)) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert sorted(output for output, _ in outputs) == ["rank 0 of 2\n", "rank 1 of 2\n"]
    assert [path.name for path in (tmp_path / "keepstep").glob("node-*")] == []


@pytest.fixture
def three_names() -> Iterator[str]:
    with reserved_pairs(3) as ports:
        yield ",".join(f"127.0.0.1:{port}" for port in ports)


def test_three_nodes_that_serve_one_coordinator_form_one_job_and_leave_nothing(
    tmp_path: Path, three_names: str
) -> None:
    finish = tmp_path / "finish"
    program = f"echo rank $RANK; while [ ! -e {finish} ]; do sleep 0.1; done"
    nodes = [
        subprocess.Popen(
            [
                sys.executable, "-P", "-m", "keepstep", "run", "--nnodes", "3", "--node", node,
                "--rdzv-endpoint", three_names, "--job", "three",
                "--no-python", "sh", "-c", program,
            ],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in ("a", "b", "c")
    ]  # fmt: skip
    for node in nodes:
        assert node.stdout is not None
        assert node.stdout.readline().startswith("rank ")
    # A member's node finds the job by its name, whichever member it has.
    completed = keepstep("status", "--job", "three", "--json", "--once")
    assert completed.returncode == 0, completed.stderr
    assert len(json.loads(completed.stdout)["nodes"]) == 3
    finish.touch()
    outputs = [node.communicate(timeout=patient(120)) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0, 0], outputs
    assert not [errors for _, errors in outputs if "could not" in errors or "no answer" in errors]
    assert sorted(path.name for path in (tmp_path / "keepstep").iterdir()) == [
        "coordinator.secret", "jobs"
    ]  # fmt: skip


@pytest.mark.parametrize("count", [2, 4])
def test_number_of_names_that_outlives_no_more_than_one_less_is_refused(
    tmp_path: Path, count: int
) -> None:
    names = ",".join(f"h{number}:29400" for number in range(count))
    with pytest.raises(UsageError, match="give one name, or three or five"):
        found(2, tmp_path, rdzv_endpoint=names)


def test_job_of_a_node_that_no_other_finds_has_a_name_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "keepstep", "run", "--no-python", "sh", "-c", ":"],
        cwd=ROOT, capture_output=True, text=True, timeout=patient(60), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"job sh-[0-9a-f]{6} on", done.stderr), done.stderr


def test_interrupted_node_keeps_serving_the_coordinator_that_others_still_need(
    tmp_path: Path, free_port: int
) -> None:
    finish = tmp_path / "finish"

    def started(node: str) -> subprocess.Popen[str]:
        program = f"echo one of $WORLD_SIZE; while [ ! -e {finish} ]; do sleep 0.1; done"
        return subprocess.Popen(
            [
                sys.executable, "-P", "-m", "keepstep", "run", "--nnodes", "1:2", "--node", node,
                "--rdzv-endpoint", f"localhost:{free_port}", "--job", "pair", "--no-python",
                "sh", "-c", program,
            ],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def read_until(stream: IO[str] | None, text: str) -> None:
        assert stream is not None
        while line := stream.readline():
            if text in line:
                return
        raise AssertionError(f"the process has ended before {text!r}")

    host = started("a")
    read_until(host.stderr, "this node serves the coordinator")
    other = started("b")
    read_until(other.stdout, "one of 2")
    host.send_signal(signal.SIGINT)
    read_until(host.stderr, "still serving the coordinator")
    finish.touch()
    other.communicate(timeout=patient(120))
    assert other.returncode == 0
    host.communicate(timeout=patient(120))
    assert host.returncode == 128 + signal.SIGINT


def waiting_job(tmp_path: Path) -> subprocess.Popen[str]:
    """Start a job with its own coordinator; return when it is registered."""
    waiting = script(tmp_path, "import signal\nprint('ready', flush=True)\nsignal.pause()\n")
    agent = subprocess.Popen(
        [sys.executable, "-P", "-m", "keepstep", "run", "--job", "here", waiting],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert agent.stdout is not None
    assert agent.stdout.readline() == "ready\n"
    return agent


def read_terminal(controller: int) -> bytes:
    """Return what a process wrote to its terminal; nothing once it has ended."""
    try:
        return os.read(controller, 4096)
    except OSError:
        return b""


def test_status_without_a_terminal_prints_once_and_with_one_ends_with_the_coordinator(
    tmp_path: Path,
) -> None:
    agent = waiting_job(tmp_path)
    try:
        completed = keepstep("status")
        assert completed.returncode == 0, completed.stderr
        assert completed.stdout.count("job here") == 1
        controller, terminal = pty.openpty()
        following = subprocess.Popen(
            [sys.executable, "-P", "-m", "keepstep", "status"],
            cwd=ROOT, stdout=terminal, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        os.close(terminal)
        shown = b""
        while b"job here" not in shown:
            shown += os.read(controller, 4096)
        # With the agent its etcd dies, and nobody records the job's end.
        agent.kill()
        while read_terminal(controller):
            pass
        os.close(controller)
        _, errors = following.communicate()
        assert following.returncode == 75
        assert "no answer from etcd" in errors
    finally:
        agent.kill()
        agent.wait()
        if agent.stdout is not None:
            agent.stdout.close()


def test_files_of_a_killed_agent_are_removed_when_the_next_one_starts(tmp_path: Path) -> None:
    agent = waiting_job(tmp_path)
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    assert agent.stdout is not None
    agent.stdout.close()
    left = {path.name for path in (tmp_path / "keepstep").glob("node-*")}
    assert len(left) == 1
    completed = keepstep("run", "--no-python", "true")
    assert completed.returncode == 0, completed.stderr
    assert list((tmp_path / "keepstep").glob("node-*")) == []
    assert list((tmp_path / "keepstep" / "jobs").iterdir()) == []
