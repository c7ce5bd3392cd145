"""Claims about addresses of this host: names, brackets, and which family is taken."""

from __future__ import annotations

import socket

import pytest

from keepstep.transport.addresses import bound_socket, host_and_port, listen, tcp_address_of


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_address_of_ipv6_is_taken_with_and_without_brackets(host: str) -> None:
    with bound_socket(host, 0) as bound:
        assert bound.getsockname()[0] == "::1"
    with listen(f"tcp:{host}:0") as listening:
        assert tcp_address_of(listening).startswith("tcp:[::1]:")


def resolving_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    def found(host: object, port: int, **_: object) -> list[object]:
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 0, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port))
            for address in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.mark.parametrize(
    ("addresses", "taken"),
    [
        (["::1"], "::1"),
        (["::1", "127.0.0.1"], "127.0.0.1"),
        # Of documentation, so not of this host.
        (["192.0.2.7", "2001:db8::7", "::1"], "::1"),
    ],
)
def test_name_stands_for_its_first_address_that_is_of_this_host(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], taken: str
) -> None:
    resolving_to(monkeypatch, *addresses)
    with bound_socket("node7", 0) as bound:
        assert bound.getsockname()[0] == taken


def test_name_of_another_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving_to(monkeypatch, "192.0.2.7", "2001:db8::7")
    with pytest.raises(OSError, match="Cannot assign"):
        bound_socket("node7", 0)


def test_host_and_port_are_distinguished() -> None:
    assert host_and_port("2001:db8::7", 29400) == "[2001:db8::7]:29400"
    assert host_and_port("node7", 29400) == "node7:29400"
