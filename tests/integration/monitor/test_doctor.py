"""Doctors as real processes on loopback: healthy, with one whose link is throttled, with one that is missing, with the wrong secret."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.elastic.store.ports import ReservedPort
from keepstep.monitor.cli.doctor import show
from keepstep.monitor.errors import MonitorUnreachable, SecretDiffers
from keepstep.monitor.preflight.doctor import Doctor, Outcome
from keepstep.monitor.preflight.judgement import NodeExamination
from keepstep.monitor.preflight.link_probe import LinkResult, ProbeConnection
from keepstep.monitor.preflight.selftests import DiskResult, MatmulResult, is_product

ROOT = Path(__file__).parents[3]


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("a secret that all doctors share")
    path.chmod(0o600)
    return path


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """Five ports, in the order of their addresses as text, by which doctors order themselves."""
    with ExitStack() as held:
        yield sorted((held.enter_context(ReservedPort()).number for _ in range(5)), key=str)


@contextmanager
def doctor(
    name: str, listen: str, peers: list[str], secret: Path, *more: str
) -> Iterator[subprocess.Popen[str]]:
    arguments = [argument for peer in peers for argument in ("--peer", peer)]
    command = [
        sys.executable, "-P", "-m", "keepstep", "doctor", "--listen", listen, "--node", name, "--secret-file", str(secret),
        "--directory", str(secret.parent), "--json", *arguments, *more,
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def outcome(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    out, err = process.communicate(timeout=120)
    assert out, err
    told: dict[str, Any] = json.loads(out)
    return process.returncode, told


class Throttle:
    """A proxy that lets so many bytes a second through, either way together: a network card with a bad cable."""

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
        for one in self._sockets:
            one.close()
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
                if len(data) > 1024:  # Bandwidth is what the cable lacks; pings pass.
                    time.sleep(max(0.0, wait_s))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # Either end is gone.


def test_node_behind_a_bad_cable_is_named_by_every_doctor(
    secret_file: Path, ports: list[int]
) -> None:
    real, outside = ports[3], ports[4]
    # The last in order is measured by all others, so everything it sends and receives passes the throttle.
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
    for code, told in results:
        assert code == 1
        named = {(finding["subject"], finding["what"]) for finding in told["findings"]}
        assert {("d", "slow sending"), ("d", "slow receiving")} <= named
        assert [node["name"] for node in told["nodes"]] == ["a", "b", "c", "d"]
        assert sum(len(node["links"]) for node in told["nodes"]) == 6
    assert all(told["findings"] == results[0][1]["findings"] for _, told in results)


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
            code, told = outcome(process)
            assert code == 1
            assert set(told["missing"]) == set(addresses[2:])
            assert "does not know this job's secret" in told["missing"][addresses[2]]
            assert "no doctor answers" in told["missing"][addresses[3]]
            assert sum(len(node["links"]) for node in told["nodes"]) == 1


def test_stranger_that_has_given_up_is_still_said_to_have_another_secret(
    secret_file: Path, ports: list[int]
) -> None:
    addresses = [f"127.0.0.1:{port}" for port in ports[:2]]
    with (
        socket.create_server(("127.0.0.1", ports[1])) as listener,
        doctor("a", addresses[0], addresses, secret_file, "--patience", "2") as process,
    ):
        connection, _ = listener.accept()
        stranger = ProbeConnection(connection, "a")
        with pytest.raises(SecretDiffers):
            stranger.authenticate(b"quite another secret", b"answerer", b"caller", 20.0)
        stranger.close()
        listener.close()
        _, told = outcome(process)
    assert "does not know this job's secret" in told["missing"][addresses[1]]


def test_table_fits_80_columns_and_tells_nodes_of_one_name_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    link = LinkResult(1e-4, 12.3e9, 12.3e9, 0.0012, 1e-5)
    found = tuple(
        NodeExamination(
            address,
            "vm",
            12.3e9,
            DiskResult(1.2e9, 0.0123),
            (MatmulResult("cpu", 0.5e12, True, True),),
            link,
            {other: link},
        )
        for address, other in (
            ("10.0.0.11:8434", "10.0.0.12:8434"),
            ("10.0.0.12:8434", "10.0.0.11:8434"),
        )
    )
    show(Outcome(found, {}))
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


def test_one_node_alone_is_examined_and_found_well(secret_file: Path, ports: list[int]) -> None:
    with doctor("a", f"127.0.0.1:{ports[0]}", [], secret_file) as process:
        code, told = outcome(process)
    assert (code, told["findings"]) == (0, [])
    (node,) = told["nodes"]
    assert node["memory_rate"] > 1e8
    assert node["matmuls"][0]["is_right"]
    assert node["matmuls"][0]["is_repeatable"]
    assert node["loopback"]["send_rate"] > 1e7
    assert node["disk"]["write_rate"] > 1e6


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--peer", "nonsense"], "HOST:PORT"),
        (["--listen", "192.0.2.1:1"], "cannot listen on 192.0.2.1:1"),
        (["--secret-file", "/no/such/file"], "the job's secret cannot be read"),
        (["--nodes", "/dev/null"], "--nodes /dev/null names no node"),
    ],
)
def test_refusal_is_one_line(arguments: list[str], says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "keepstep", "doctor", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_one_wrong_element_of_a_product_is_seen() -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randint(-4, 5, (64, 64), generator=generator).float() for _ in range(2))
    product = left @ right
    assert is_product(left, right, product)
    for place in ((0, 0), (63, 63), (5, 40)):
        wrong = product.clone()
        wrong[place] += 1
        assert not is_product(left, right, wrong)


def test_proof_cannot_be_sent_back_to_its_maker() -> None:
    """Whoever only reflects what a doctor sends is not taken for one."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = object.__new__(ProbeConnection)
        line.peer, line._socket = "mirror", ours

        def reflect() -> None:
            while data := theirs.recv(64):
                theirs.sendall(data)

        mirror = threading.Thread(target=reflect)
        mirror.start()
        with pytest.raises(MonitorUnreachable, match="does not know"):
            line.authenticate(b"a secret", b"caller", b"answerer", 5.0)
        ours.shutdown(socket.SHUT_RDWR)
        mirror.join()
