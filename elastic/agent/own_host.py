"""Determines the address under which other nodes reach this one."""

from __future__ import annotations

import socket

from keepstep.elastic.errors import UsageError
from keepstep.elastic.store.address import Address, is_loopback
from keepstep.transport.addresses import bound_socket, without_brackets


def own_host(coordinator: Address, local_addr: str | None) -> str:
    """Return the address that the user gives, else that of this host on its route to etcd.

    Args:
        coordinator: the coordinator's address.
        local_addr: as for `--local-addr`.

    Raises:
        UsageError: the given address is not of this host, or there is no route.
    """
    if not local_addr:
        return _address_towards(coordinator)
    host = without_brackets(local_addr)
    try:
        bound_socket(host, 0).close()
    except OSError as error:
        raise UsageError(
            f"--local-addr {host}: {error.strerror or error}; give an address of this host"
        ) from None
    return host


def _address_towards(coordinator: Address) -> str:
    """Return the address of this host on its route to a member on another one, if there is any."""
    own: str | None = None
    reason: OSError | None = None
    for endpoint, host in zip(coordinator.endpoints, coordinator.hosts, strict=True):
        port = int(endpoint.rpartition(":")[2])
        try:
            for family, kind, number, _, target in socket.getaddrinfo(
                host, port, type=socket.SOCK_DGRAM
            ):
                try:
                    with socket.socket(family, kind, number) as probe:
                        probe.connect(target)
                        address = str(probe.getsockname()[0])
                    if not is_loopback(address):
                        return address
                    own = own or address
                except OSError as error:
                    reason = error  # Another of its addresses may be reached.
        except OSError as error:
            reason = error  # A lost host may have lost its name.
    if own is None:
        raise UsageError(
            f"cannot determine this host's address towards {coordinator.endpoints[0]} ({reason}); "
            "give --local-addr"
        )
    return own
