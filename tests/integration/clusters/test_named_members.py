"""Claims about a job whose nodes serve one coordinator together, of which nodes are lost."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from keepstep.elastic.errors import StoreUnavailable
from keepstep.elastic.rendezvous.view import View
from keepstep.elastic.store.members import Member, parse_members
from tests.integration.job.jobs import cluster, set_module_path, step_of, wait_for_output
from tests.integration.store.test_members import reserved_pairs

NODES = ("a", "b", "c")


class NamedMembers:
    """A job of three nodes on this machine, each of which serves a member of its coordinator."""

    def __init__(self, directory: Path, runtime: Path, ports: Sequence[int]) -> None:
        self.runtime = runtime / "keepstep"
        self.members = parse_members([f"127.0.0.1:{port}" for port in ports])
        self.names = ",".join(member.endpoint for member in self.members)
        store = f"keepstep://{self.names}"
        self.job = cluster(directory, "1:3", store, workers=1, endless=True)

    def start(self, *nodes: str, keep: str = "0") -> None:
        options = ("--store", "", "--rdzv-endpoint", self.names, "--keep-state", keep)
        for node in nodes:
            self.job.start(node, *options)

    def begin(self, keep: str = "0") -> View:
        """Start all nodes; return once they have trained."""
        self.start(*NODES, keep=keep)
        wait_for_output(self.job, "job job on")
        return self.wait_until(lambda view: step_of(view) >= 5 and is_on(view, *NODES))

    def wait_until(self, condition: Callable[[View], bool]) -> View:
        for _ in range(10):
            # Its own client waits 10 s for a majority.
            with suppress(StoreUnavailable):
                return self.job.wait_until(condition, 120)
        raise AssertionError(self.job.output())

    def etcd_of(self, node: str) -> psutil.Process:
        """Return the process of the member that a node serves."""
        return self.job._processes_of(node, "--listen-client-urls")[0]

    def member_of(self, node: str) -> Member:
        command = self.etcd_of(node).cmdline()
        url = command[command.index("--listen-client-urls") + 1]
        return next(it for it in self.members if url.endswith(f":{it.port}"))

    def leader(self) -> str:
        """Return the node whose member leads the etcd."""
        script = (
            "import asyncio, os, sys\n"
            "from keepstep.elastic.store.address import Access, Address\n"
            "from keepstep.elastic.store.credentials import Credentials\n"
            "from keepstep.elastic.store.etcd import open_endpoint\n"
            "from keepstep.elastic.store.etcd_messages import rpc, stub\n"
            "async def main(name):\n"
            "    address = Address((name,), Access.SECRET)\n"
            "    credentials = Credentials.for_address(address, os.environ)\n"
            "    endpoint = open_endpoint(name, Access.SECRET, credentials)\n"
            "    status = stub('etcdserverpb.Maintenance', endpoint.channel).Status\n"
            "    reply = await status(rpc.StatusRequest(), timeout=30)\n"
            "    print(reply.leader == reply.header.member_id)\n"
            "    await endpoint.channel.close()\n"
            "asyncio.run(main(sys.argv[1]))\n"
        )
        for node in NODES:
            endpoint = self.member_of(node).endpoint
            asked = [sys.executable, "-c", script, endpoint]
            if subprocess.run(asked, capture_output=True, check=True).stdout == b"True\n":
                return node
        raise AssertionError("no member leads")

    def lose_data(self) -> None:
        """Remove the data of members whose nodes were killed."""
        for path in self.runtime.glob("coordinator-*"):
            directory = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            except BlockingIOError:
                continue  # Its node lives.
            finally:
                os.close(directory)

    def interrupt_all(self) -> None:
        """End all nodes as a scheduler does, and check that nothing is left of them."""
        for node in list(self.job.agents):
            self.job.terminate(node)
        for node in list(self.job.agents):
            self.job.wait(node, 60)
        assert [path.name for path in self.runtime.glob("coordinator-*")] == []
        left = [it for it in psutil.process_iter() if self.names in " ".join(arguments(it))]
        assert left == []


def arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def is_on(view: View, *nodes: str) -> bool:
    """Return whether the job trains on these nodes."""
    generation = view.generation
    return (
        generation is not None
        and {member.node for member in generation.members} == set(nodes)
        and any(it.generation == generation.generation for it in view.history.recoveries)
    )


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NamedMembers]:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    set_module_path(monkeypatch)
    with reserved_pairs(3) as ports:
        made = NamedMembers(tmp_path, runtime, ports)
        with made.job:
            yield made


def test_job_outlives_the_node_whose_member_leads_and_takes_it_back(named: NamedMembers) -> None:
    named.begin()
    lost = named.leader()
    others = [node for node in NODES if node != lost]
    named.job.kill(lost)
    view = named.wait_until(lambda view: is_on(view, *others))
    assert view.history.recoveries[-1].lost_steps <= 1
    assert "memory" in view.history.recoveries[-1].source
    named.start(lost)
    named.wait_until(lambda view: is_on(view, *NODES))
    assert "is replaced" not in named.job.output()
    named.interrupt_all()


@pytest.mark.clusters
def test_node_that_has_lost_the_data_of_its_member_is_replaced(named: NamedMembers) -> None:
    named.begin()
    named.job.kill("b")
    named.lose_data()
    named.start("b")
    wait_for_output(named.job, "is replaced")
    named.wait_until(lambda view: is_on(view, *NODES))
    # Now another one may be lost.
    named.job.kill("c")
    view = named.wait_until(lambda view: is_on(view, "a", "b"))
    assert view.history.recoveries[-1].lost_steps <= 1
    named.lose_data()
    named.interrupt_all()


@pytest.mark.clusters
def test_job_trains_on_without_a_majority_and_goes_on_when_it_is_back(named: NamedMembers) -> None:
    reached = step_of(named.begin())
    stopped = [named.etcd_of(node) for node in ("a", "b")]
    for member in stopped:
        member.suspend()
    wait_for_output(named.job, "training goes on")
    for member in stopped:
        member.resume()
    # A leader that was stopped may find that all leases have ended: then the nodes join again.
    after = named.wait_until(lambda view: is_on(view, *NODES) and step_of(view) > reached + 5)
    # Members alone that end are started again by their nodes.
    for node in ("b", "c"):
        named.etcd_of(node).kill()
    reached = step_of(after)
    last = named.wait_until(lambda view: is_on(view, *NODES) and step_of(view) > reached + 5)
    assert all(recovery.lost_steps <= 1 for recovery in last.history.recoveries)
    named.interrupt_all()


@pytest.mark.clusters
def test_job_goes_on_when_two_of_its_nodes_come_back_at_once(named: NamedMembers) -> None:
    """The third has nobody to train with, and its coordinator no majority."""
    named.begin()
    for node in ("a", "b"):
        named.job.kill(node)
    named.start("a", "b")
    named.wait_until(lambda view: is_on(view, *NODES))
    named.interrupt_all()


@pytest.mark.clusters
def test_node_that_is_sent_away_takes_its_member_along(named: NamedMembers) -> None:
    named.begin()
    named.job.terminate("a")
    named.job.wait("a", 60)
    assert len(list(named.runtime.glob("coordinator-*"))) == 2
    named.wait_until(lambda view: is_on(view, "b", "c"))
    named.interrupt_all()


@pytest.mark.clusters
def test_job_whose_agents_were_all_killed_goes_on_from_memory(named: NamedMembers) -> None:
    before = named.begin(keep="5m")
    for node in NODES:
        named.job.agents[node].kill()
        named.job.agents.pop(node).wait()
    try:
        named.start(*NODES, keep="5m")
        # The etcd comes back with what it held.
        after = named.wait_until(
            lambda view: is_on(view, *NODES) and view.generation_number > before.generation_number
        )
        assert after.history.recoveries[-1].resumed_step >= step_of(before)
        named.interrupt_all()
    finally:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("XDG_RUNTIME_DIR") == str(named.runtime.parent):
                    process.kill()
