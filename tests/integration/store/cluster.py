"""Starts an etcd cluster without authentication on loopback, whose members tests may kill."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from keepstep.elastic.store.embedded import binary
from keepstep.elastic.store.ports import ReservedPort
from tests.adaptive_timeouts import patient

_START_S = 60.0


class EtcdCluster:
    """An etcd cluster; `url` names the client endpoints of all members."""

    def __init__(self, members: int = 3, options: Sequence[str] = ()) -> None:
        self._options = options
        self._members = range(members)
        self._directory = Path(tempfile.mkdtemp(prefix="keepstep-cluster-"))
        self._ports = [ReservedPort() for _ in range(2 * members)]
        self.clients = [f"127.0.0.1:{port.number}" for port in self._ports[:members]]
        self._peers = [f"http://127.0.0.1:{port.number}" for port in self._ports[members:]]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return f"etcd://{','.join(self.clients)}"

    def __enter__(self) -> Self:
        for member in self._members:
            self.start(member)
        for member in self._members:
            self.wait_for(member)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for member in list(self._processes):
            self.kill(member)
        for port in self._ports:
            port.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def start(self, member: int) -> None:
        client, peer = f"http://{self.clients[member]}", self._peers[member]
        initial_cluster = ",".join(f"m{number}={url}" for number, url in enumerate(self._peers))
        with (self._directory / f"{member}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", "keepstep.processes", str(os.getpid()),
                    binary(), "--name", f"m{member}",
                    "--data-dir", str(self._directory / str(member)),
                    "--log-level", "error", "--unsafe-no-fsync",
                    "--listen-client-urls", client, "--advertise-client-urls", client,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", initial_cluster, *self._options,
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def kill(self, member: int) -> None:
        """Kill a member with SIGKILL."""
        process = self._processes.pop(member)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def wait_for(self, member: int) -> None:
        """Wait until a member serves."""
        deadline_s = time.monotonic() + patient(_START_S)
        while time.monotonic() < deadline_s:
            try:
                with urllib.request.urlopen(
                    f"http://{self.clients[member]}/health", timeout=patient(5)
                ) as answer:
                    if b'"health":"true"' in answer.read():
                        return
            except OSError:
                assert self._processes[member].poll() is None, (
                    self._directory / f"{member}.log"
                ).read_text()
        raise AssertionError(f"member {member} does not serve")
