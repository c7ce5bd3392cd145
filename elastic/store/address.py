"""Parses coordinator URLs into endpoints."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.elastic.errors import UsageError

_DEFAULT_PORT = 2379


@dataclass(frozen=True, slots=True)
class Address:
    """One coordinator: its members' client endpoints, `host:port` each, and whether TLS is used."""

    endpoints: tuple[str, ...]
    is_encrypted: bool = False

    @property
    def url(self) -> str:
        """The address as a URL that `parse_address` reads."""
        return f"{'etcds' if self.is_encrypted else 'etcd'}://{','.join(self.endpoints)}"


def parse_address(text: str) -> Address:
    """Parse a coordinator URL.

    Args:
        text: `etcd://h1:2379,h2:2379`, `etcds://...` for TLS, or `host:port`, comma separated;
            the port defaults to 2379.

    Raises:
        UsageError: the scheme is another one, or a port is not a number from 1 to 65535.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "etcd", text
    if scheme not in ("etcd", "http", "etcds", "https"):
        raise UsageError(
            f"store {text!r}: give etcd://HOST:PORT[,HOST:PORT...], or etcds:// if it uses TLS"
        )
    endpoints = []
    for part in rest.rstrip("/").split(","):
        host, colon, port = part.rpartition(":")
        if not colon:
            host, port = part, str(_DEFAULT_PORT)
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UsageError(f"store {text!r}: {part!r} is not HOST:PORT")
        endpoints.append(f"{host}:{port}")
    return Address(tuple(endpoints), scheme in ("etcds", "https"))
