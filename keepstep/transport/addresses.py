"""Connects to and listens at addresses: `unix:PATH` and `tcp:HOST:PORT` (IPv6 hosts in brackets).

Sockets are returned non-blocking, with TCP's delay for small packets off.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from keepstep.transport.errors import PeerRefused, PeerTimeout, PeerUnavailable

LOST_S = 60
"""Seconds after which a host that acknowledges or takes nothing is lost; networks are cut for
seconds."""

_BACKLOG = 1024
_TIMEVAL = struct.Struct("@ll")


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket in the file system of this host."""

    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A port of a host."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:{host_and_port(self.host, self.port)}"


def host_and_port(host: str, port: int) -> str:
    """Return `HOST:PORT`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound_socket(host: str, port: int, *, reuse: bool = False) -> socket.socket:
    """Return a TCP socket that is bound to an address of this host; port 0 takes a free one.

    Args:
        host: an address, or a name: its first address that is of this host, IPv4 ones first.
        port: the port.
        reuse: connections that have ended, and listeners that allow it too, may have the port.

    Raises:
        OSError: the port is taken, or the address is not of this host.
    """
    candidates = socket.getaddrinfo(
        without_brackets(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    candidates.sort(key=lambda one: one[0] != socket.AF_INET)
    for left, (family, kind, number, _, target) in zip(
        range(len(candidates))[::-1], candidates, strict=True
    ):
        bound = socket.socket(family, kind, number)
        try:
            if reuse:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # As Python's servers: the same port of IPv4 is another address.
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind(target)
        except OSError:
            bound.close()
            if not left:
                raise
        else:
            return bound
    raise OSError(f"{host} has no address")


def without_brackets(host: str) -> str:
    """Return a host without the brackets around an IPv6 address."""
    return host.removeprefix("[").removesuffix("]")


def loopback() -> str:
    """Return the address by which this host reaches itself: that of IPv4, if it has any."""
    try:
        bound_socket("127.0.0.1", 0).close()
    except OSError:
        return "::1"
    return "127.0.0.1"


def parse_address(text: str) -> UnixAddress | TcpAddress:
    """Return the address that a text names.

    Raises:
        ValueError: it names none.
    """
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest:
        return UnixAddress(Path(rest))
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isascii() and port.isdigit() and int(port) < 2**16:
        return TcpAddress(without_brackets(host), int(port))
    raise ValueError(f"{text!r} is no address; write unix:PATH or tcp:HOST:PORT")


@contextmanager
def socket_name(path: Path) -> Iterator[str]:
    """Name a Unix socket however long its path is.

    The kernel takes 107 bytes of a name (unix(7)), and clusters' scratch directories alone may be
    longer; through its directory's descriptor the name is short. It holds while the context lasts.

    Raises:
        OSError: there is no such directory.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listen(address: str) -> socket.socket:
    """Return a socket that listens at an address; port 0 takes a free one.

    A Unix socket's file must not exist yet; its directory decides who may connect.

    Raises:
        OSError: the address is taken, or is not of this host.
    """
    place = parse_address(address)
    if isinstance(place, TcpAddress):
        listener = bound_socket(place.host, place.port, reuse=True)
        listener.listen(_BACKLOG)
    else:
        listener = socket.socket(socket.AF_UNIX)
        try:
            with socket_name(place.path) as name:
                listener.bind(name)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    listener.setblocking(False)
    return listener


def tcp_address_of(listener: socket.socket) -> str:
    """Return the address at which a TCP socket listens."""
    host, port = listener.getsockname()[:2]
    return str(TcpAddress(host, port))


def peer_name(connection: socket.socket) -> str:
    """Return the name of an accepted connection's other end, for errors.

    Raises:
        OSError: it is gone already.
    """
    if connection.family == socket.AF_UNIX:
        return "a process of this host"
    host, port = connection.getpeername()[:2]
    return str(TcpAddress(host, port))


def prepare(connection: socket.socket) -> None:
    """Make a connection non-blocking, send small frames without delay, and look for lost hosts."""
    connection.setblocking(False)
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host without power says nothing, and TCP by itself takes 15 minutes or for ever to notice.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_S // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, LOST_S // 6)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def open_socket(address: str, deadline_s: float) -> socket.socket:
    """Connect to an address.

    Args:
        address: where to connect.
        deadline_s: the instant of `time.monotonic` at which it stops trying. Resolving a host's
            name is not interrupted by it.

    Raises:
        PeerRefused: the host answers that no process listens there.
        PeerTimeout: the host did not answer in time.
        PeerUnavailable: it cannot be reached.
    """
    place = parse_address(address)
    try:
        if isinstance(place, UnixAddress):
            return _open_unix(place.path, deadline_s)
        return _open_tcp(place, deadline_s)
    except OSError as error:
        raise unreachable(address, error) from error


def unreachable(address: str, error: OSError) -> PeerUnavailable:
    """Return the error for a failure to connect."""
    match error:
        case ConnectionRefusedError():
            return PeerRefused(f"{address}: no process listens there; has it ended?")
        case TimeoutError() | BlockingIOError():
            return PeerTimeout(f"{address}: did not answer in time; is the host alive?")
        case _:
            return PeerUnavailable(f"{address}: cannot be reached: {error}")


def _open_unix(path: Path, deadline_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        # A connect without blocking fails at once while the listener's backlog is full, and Python
        # implements timeouts without blocking; the kernel's own timeout waits for a place.
        seconds, fraction = divmod(max(deadline_s - time.monotonic(), 1e-3), 1)
        timeout = _TIMEVAL.pack(int(seconds), int(fraction * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        with socket_name(path) as name:
            connection.connect(name)
        prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _open_tcp(place: TcpAddress, deadline_s: float) -> socket.socket:
    candidates = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    for left, (family, kind, number, _, target) in zip(
        range(len(candidates))[::-1], candidates, strict=True
    ):
        connection = socket.socket(family, kind, number)
        try:
            connection.settimeout(max(deadline_s - time.monotonic(), 1e-3))
            connection.connect(target)
            prepare(connection)
        except OSError:
            connection.close()
            if not left:
                raise
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise OSError(f"{place.host} has no address")
