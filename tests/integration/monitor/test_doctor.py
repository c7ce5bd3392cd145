"""Claims about `keepstep doctor`: real processes on loopback.

Healthy ones, one behind a slow link, one that is missing, one with another secret, one that is
flooded.
"""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.elastic.store.ports import ReservedPort
from keepstep.monitor.cli.doctor import show
from keepstep.monitor.errors import MonitorError
from keepstep.monitor.preflight.doctor import Doctor, Outcome, Participants
from keepstep.monitor.preflight.examination import (
    DiskResult,
    LinkResult,
    MatmulResult,
    NodeExamination,
)
from keepstep.monitor.preflight.messages import PROTOCOL
from keepstep.monitor.preflight.selftests import is_product
from keepstep.transport import ConnectionLost, Identity, accept
from keepstep.transport.admission import MAX_PENDING
from tests.adaptive_timeouts import patient

ROOT = Path(__file__).parents[3]


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("a secret that all doctors share")
    path.chmod(0o600)
    return path


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """Return five ports, in the order of their addresses as text, by which doctors are ordered."""
    with ExitStack() as held:
        yield sorted((held.enter_context(ReservedPort()).number for _ in range(5)), key=str)


@contextmanager
def doctor(
    name: str, listen: str, peers: list[str], secret: Path, *more: str
) -> Iterator[subprocess.Popen[str]]:
    arguments = [argument for peer in peers for argument in ("--peer", peer)]
    command = [
        sys.executable, "-P", "-m", "keepstep", "doctor", "--listen", listen, "--node", name,
        "--secret-file", str(secret), "--directory", str(secret.parent), "--json",
        *arguments, *more,
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def outcome(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    out, err = process.communicate(timeout=patient(120))
    assert out, err
    printed: dict[str, Any] = json.loads(out)
    return process.returncode, printed


class Throttle:
    """A proxy that passes so many bytes a second, both ways together, like a bad cable."""

    def __init__(self, port: int, target: int, rate: float) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self._target, self._rate = target, rate
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._due_s = 0.0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for connection in self._sockets:
            connection.close()
        for thread in self._threads[1:]:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                inward, _ = self._listener.accept()
            except OSError:
                return
            try:
                outward = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                inward.close()  # Not begun yet.
                continue
            self._sockets += [inward, outward]
            for source, sink in ((inward, outward), (outward, inward)):
                self._threads.append(threading.Thread(target=self._pump, args=(source, sink)))
                self._threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                with self._lock:
                    self._due_s = max(self._due_s, time.monotonic()) + len(data) / self._rate
                    wait_s = self._due_s - time.monotonic()
                if len(data) > 1024:  # The cable lacks bandwidth; pings pass.
                    time.sleep(max(0.0, wait_s))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # Either end is gone.


class Forger(Throttle):
    """A proxy that changes a node's name in examinations, and nothing else."""

    def __init__(self, port: int, target: int) -> None:
        self.changes = 0
        super().__init__(port, target, 1e12)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                changed = data.replace(b'"name":"liar","memory', b'"name":"good","memory')
                self.changes += changed != data
                sink.sendall(changed)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # Either end is gone.


def test_node_behind_a_slow_link_is_named_by_every_doctor(
    secret_file: Path, ports: list[int]
) -> None:
    real, outside = ports[3], ports[4]
    # The last in order is measured by all others: all that it moves passes the throttle.
    addresses = [f"127.0.0.1:{port}" for port in (*ports[:3], outside)]
    throttle = Throttle(outside, real, 40e6)
    try:
        with ExitStack() as running:
            processes = [
                running.enter_context(doctor(name, address, addresses, secret_file))
                for name, address in zip("abc", addresses[:3], strict=True)
            ]
            processes.append(
                running.enter_context(
                    doctor(
                        "d", f"127.0.0.1:{real}", addresses, secret_file, "--address", addresses[3]
                    )
                )
            )
            results = [outcome(process) for process in processes]
    finally:
        throttle.close()
    for code, printed in results:
        assert code == 1
        named = {(finding["subject"], finding["what"]) for finding in printed["findings"]}
        assert {("d", "slow sending"), ("d", "slow receiving")} <= named
        assert [node["name"] for node in printed["nodes"]] == ["a", "b", "c", "d"]
        assert sum(len(node["links"]) for node in printed["nodes"]) == 6
    assert all(printed["findings"] == results[0][1]["findings"] for _, printed in results)


def test_missing_node_and_stranger_are_named_and_the_others_go_on(
    secret_file: Path, ports: list[int]
) -> None:
    addresses = [f"127.0.0.1:{port}" for port in ports[:4]]
    with (
        Doctor("stranger", ("127.0.0.1", ports[2]), b"quite another secret", 20.0),
        ExitStack() as running,
    ):
        processes = [
            running.enter_context(
                doctor(name, addresses[place], addresses, secret_file, "--patience", "20")
            )
            for place, name in enumerate("ab")
        ]
        for process in processes:
            code, printed = outcome(process)
            assert code == 1
            assert set(printed["missing"]) == set(addresses[2:])
            assert "does not know this job's secret" in printed["missing"][addresses[2]]
            assert "no doctor answers" in printed["missing"][addresses[3]]
            assert sum(len(node["links"]) for node in printed["nodes"]) == 1


def test_stranger_that_has_given_up_is_still_reported_to_have_another_secret(
    secret_file: Path, ports: list[int]
) -> None:
    addresses = [f"127.0.0.1:{port}" for port in ports[:2]]
    with (
        socket.create_server(("127.0.0.1", ports[1])) as listener,
        doctor("a", addresses[0], addresses, secret_file, "--patience", "2") as process,
    ):
        connection, _ = listener.accept()
        with pytest.raises(ConnectionLost):
            accept(connection, PROTOCOL, Identity("stranger", b"quite another secret"))
        listener.close()
        _, printed = outcome(process)
    assert "does not know this job's secret" in printed["missing"][addresses[1]]


def test_flooded_doctor_still_serves_its_peers(secret_file: Path, ports: list[int]) -> None:
    """Without the secret, connections exhaust its descriptors and it goes on (S2)."""
    addresses = [f"127.0.0.1:{port}" for port in ports[:2]]
    with doctor("a", addresses[0], addresses, secret_file, "--patience", "60") as flooded:
        wait_until_listening(ports[0])
        descriptors = len(os.listdir(f"/proc/{flooded.pid}/fd"))
        # Too few for those that are not authenticated, and enough for the examination.
        limit = descriptors + 16
        resource.prlimit(flooded.pid, resource.RLIMIT_NOFILE, (limit, limit))
        flood = [socket.create_connection(("127.0.0.1", ports[0])) for _ in range(MAX_PENDING + 8)]
        wait_until_exhausted(flooded.pid, limit)
        for connection in flood:
            connection.close()
        with doctor("b", addresses[1], addresses, secret_file, "--patience", "60") as other:
            results = [outcome(process)[1] for process in (flooded, other)]
    for printed in results:
        assert printed["missing"] == {}
        assert sum(len(node["links"]) for node in printed["nodes"]) == 1


def test_doctor_under_a_steady_flood_is_still_measured(
    secret_file: Path, ports: list[int], tmp_path: Path
) -> None:
    """Connections that send nothing are dropped for those that authenticate."""
    addresses = [f"127.0.0.1:{port}" for port in ports[:2]]
    secret = secret_file.read_bytes()
    with Doctor("b", ("127.0.0.1", ports[1]), secret, 30.0) as flooded:
        flood = [socket.create_connection(("127.0.0.1", ports[1])) for _ in range(MAX_PENDING + 8)]
        with doctor("a", addresses[0], addresses, secret_file, "--patience", "30") as process:
            result = flooded.examine(Participants.of(addresses[1], addresses), tmp_path)
            _, printed = outcome(process)
        for connection in flood:
            connection.close()
    assert result.missing == printed["missing"] == {}


def test_relay_cannot_change_a_result(secret_file: Path, ports: list[int], tmp_path: Path) -> None:
    """A proxy turns the name of a node into another one, on a connection that authenticates."""
    real, outside = ports[3], ports[4]
    addresses = [f"127.0.0.1:{ports[0]}", f"127.0.0.1:{outside}"]
    proxy = Forger(outside, real)
    secret = secret_file.read_bytes()
    try:
        with (
            Doctor("victim", ("127.0.0.1", ports[0]), secret, 60.0) as examining,
            doctor(
                "liar", f"127.0.0.1:{real}", addresses, secret_file,
                "--address", addresses[1], "--patience", "60",
            ),
        ):  # fmt: skip
            result = examining.examine(Participants.of(addresses[0], addresses), tmp_path)
    finally:
        proxy.close()
    assert proxy.changes
    assert [examination.name for examination in result.examinations] == ["victim"]
    assert "changed" in result.missing[addresses[1]]


def wait_until_listening(port: int) -> None:
    deadline_s = time.monotonic() + patient(60)
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError(f"nobody listens on {port}")


def wait_until_exhausted(pid: int, limit: int) -> None:
    deadline_s = time.monotonic() + patient(60)
    while time.monotonic() < deadline_s:
        # It may have closed one at this moment, to take the next.
        if len(os.listdir(f"/proc/{pid}/fd")) >= limit - 1:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} has not opened its {limit} descriptors")


def test_table_fits_80_columns_and_distinguishes_nodes_of_one_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    link = LinkResult(
        latency_s=1e-4,
        send_rate=12.3e9,
        receive_rate=12.3e9,
        clock_offset_s=0.0012,
        clock_error_s=1e-5,
    )
    matmul = MatmulResult(device="cpu", flops=0.5e12, is_right=True, is_repeatable=True)
    addresses = ("10.0.0.11:8434", "10.0.0.12:8434")
    examinations = tuple(
        NodeExamination(
            address=address,
            name="vm",
            memory_rate=12.3e9,
            disk=DiskResult(write_rate=1.2e9, fsync_s=0.0123),
            matmuls=(matmul,),
            loopback=link,
            links={other: link},
        )
        for address, other in (addresses, addresses[::-1])
    )
    show(Outcome(examinations, {}))
    text = capsys.readouterr().out
    for heading in (
        "node",
        "memory",
        "products",
        "disk",
        "fsync",
        "loopback",
        "sends",
        "receives",
        "latency",
        "clock",
    ):
        assert re.search(rf"\b{heading}\b", text)
    assert "\u2026" not in text
    assert "2 nodes are called vm" in text
    lines = text.splitlines()
    end = next(line.index("memory") for line in lines if "memory" in line)
    named = "".join(line[:end].strip() for line in lines)
    assert "vm(10.0.0.11:8434)vm(10.0.0.12:8434)" in named.replace(" ", "")


def test_single_healthy_node_has_no_findings(secret_file: Path, ports: list[int]) -> None:
    with doctor("a", f"127.0.0.1:{ports[0]}", [], secret_file) as process:
        code, printed = outcome(process)
    assert (code, printed["findings"]) == (0, [])
    (node,) = printed["nodes"]
    assert node["memory_rate"] > 1e8
    assert node["matmuls"][0]["is_right"]
    assert node["matmuls"][0]["is_repeatable"]
    assert node["loopback"]["send_rate"] > 1e7
    assert node["disk"]["write_rate"] > 1e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "nonsense"], "HOST:PORT"),
        (["--listen", "192.0.2.1:1"], "cannot listen on 192.0.2.1:1"),
        (["--secret-file", "/no/such/file"], "the job's secret cannot be read"),
        (["--nodes", "/dev/null"], "--nodes /dev/null names no node"),
    ],
)
def test_refusal_is_one_line(arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "keepstep", "doctor", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_single_wrong_element_of_a_product_is_detected() -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randint(-4, 5, (64, 64), generator=generator).float() for _ in range(2))
    product = left @ right
    assert is_product(left, right, product)
    for place in ((0, 0), (63, 63), (5, 40)):
        wrong = product.clone()
        wrong[place] += 1
        assert not is_product(left, right, wrong)


def test_node_name_that_cannot_be_sent_is_refused() -> None:
    with (
        pytest.raises(MonitorError, match="cannot name a node"),
        Doctor("n" * 200, ("127.0.0.1", 0), bytes(32), 1.0),
    ):
        pass


def test_one_node_says_what_it_tests_and_that_it_is_healthy(
    tmp_path: Path, ports: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{ports[0]}"
    begun: list[str] = []
    with Doctor("alone", ("127.0.0.1", ports[0]), bytes(32), 1.0) as examining:
        outcome_alone = examining.examine(Participants.of(address, []), tmp_path, begun.append)
    assert [line.split()[-1] for line in begun] == [str(tmp_path), "node", "memory", "matrices"]
    show(replace(outcome_alone, findings=()))
    assert "healthy: this node; no link to another one was measured" in capsys.readouterr().out
