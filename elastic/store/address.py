"""Parses coordinator URLs into endpoints, and decides how each kind is authenticated."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from keepstep.elastic.errors import UsageError

_DEFAULT_PORT = 2379


class Access(StrEnum):
    """The way clients and coordinator authenticate each other; the value is the URL's scheme."""

    PLAIN = "etcd"
    """No authentication: an etcd without TLS. It may ask for a user and a password."""
    TLS = "etcds"
    """By TLS, with certificates from etcdctl's environment variables."""
    SECRET = "keepstep"
    """By mutual TLS with certificates derived from a secret: an etcd that keepstep started."""


@dataclass(frozen=True, slots=True)
class Address:
    """One coordinator.

    Args:
        endpoints: its members' client endpoints, `host:port` each.
        access: how its clients are authenticated.
        secret_file: file with the secret of a coordinator that keepstep started; None: this user's
            own secret on this machine.
    """

    endpoints: tuple[str, ...]
    access: Access = Access.PLAIN
    secret_file: Path | None = None

    @property
    def url(self) -> str:
        """The address as a URL that `parse_address` reads."""
        return f"{self.access}://{','.join(self.endpoints)}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The members' hosts."""
        return tuple(endpoint.rpartition(":")[0].strip("[]") for endpoint in self.endpoints)


def parse_address(
    text: str, secret_file: Path | None = None, default_port: int = _DEFAULT_PORT
) -> Address:
    """Parse a coordinator URL.

    Args:
        text: `etcd://h1:2379,h2:2379`, `etcds://...` for TLS, `keepstep://HOST:PORT` for a
            coordinator that keepstep started, or `host:port`, comma separated; IPv6 addresses are
            in brackets.
        secret_file: see `Address`.
        default_port: the port where none is given.

    Raises:
        UsageError: the scheme is another one, or a port is not a number from 1 to 65535.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "etcd", text
    if scheme not in list(Access):
        raise UsageError(
            f"store {text!r}: give etcd://HOST:PORT[,HOST:PORT...], etcds:// if it uses TLS, or "
            "keepstep://HOST:PORT for one that keepstep started"
        )
    endpoints = []
    for part in rest.rstrip("/").split(","):
        host, colon, port = part.rpartition(":")
        if not colon or part.endswith("]"):
            host, port = part, str(default_port)
        is_bracketed = host.startswith("[") and host.endswith("]")
        if ":" in host and not is_bracketed:
            raise UsageError(
                f"store {text!r}: write an IPv6 address in brackets, such as "
                f"[{part}]:{default_port}"
            )
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UsageError(f"store {text!r}: {part!r} is not HOST:PORT")
        endpoints.append(f"{host}:{port}")
    return Address(tuple(endpoints), Access(scheme), secret_file)


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's loopback, and so not reached over a network.

    A name counts if all addresses that it resolves to do.
    """
    try:
        candidates = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in candidates)
