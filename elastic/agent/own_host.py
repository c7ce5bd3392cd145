"""Determines the address under which other nodes reach this one."""

from __future__ import annotations

import socket

from keepstep.elastic.errors import UsageError
from keepstep.elastic.store.address import Address
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
    endpoint = coordinator.endpoints[0]
    port = endpoint.rpartition(":")[2]
    reason: OSError | None = None
    try:
        for family, kind, number, _, target in socket.getaddrinfo(
            coordinator.hosts[0], int(port), type=socket.SOCK_DGRAM
        ):
            try:
                with socket.socket(family, kind, number) as probe:
                    probe.connect(target)
                    return str(probe.getsockname()[0])
            except OSError as error:
                reason = error  # Another of its addresses may be reached.
    except OSError as error:
        reason = error
    raise UsageError(
        f"cannot determine this host's address towards {endpoint} ({reason}); give --local-addr"
    )
