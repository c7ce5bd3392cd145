"""Connects `keepstep run` to the job's coordinator, and starts one where the options ask for it."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keepstep.elastic.errors import StoreUnavailable, UsageError
from keepstep.elastic.store.address import Access, Address, is_loopback, parse_address
from keepstep.elastic.store.contract import Store
from keepstep.elastic.store.credentials import coordinator_secret
from keepstep.elastic.store.embedded import EmbeddedEtcd
from keepstep.elastic.store.etcd import EtcdStore
from keepstep.elastic.store.member_process import CoordinatorMember
from keepstep.elastic.store.members import Member, parse_members
from keepstep.private_files import NotPrivate
from keepstep.transport.addresses import (
    bound_socket,
    host_and_port,
    loopback,
    without_brackets,
)

log = logging.getLogger("keepstep")

_ENDPOINT_PORT = 29400
"""Default port of `--rdzv-endpoint HOST`, as torchrun has it."""
_PROBE_S = 1.0
_CONNECT_S = 10.0
_START_S = 20.0
"""Seconds that a coordinator which listens on this machine may take until it serves."""
_OTHER_NODE_S = 60.0
"""Seconds to wait for the coordinator of another node, which may be started later than this one."""


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The job's coordinator, connected.

    Args:
        store: the connection.
        address: of the coordinator.
        is_own: whether this process started it, and it ends with this process.
        member: its member on this node, where it has several and this is one of theirs.
        is_private: whether no other node can find it by the options of this one.
    """

    store: Store
    address: Address
    is_own: bool
    is_private: bool
    member: CoordinatorMember | None = None


@asynccontextmanager
async def coordinator(
    options: Mapping[str, Any], min_nodes: int, directory: Path, patience_s: float = math.inf
) -> AsyncIterator[Coordinator]:
    """Connect to the coordinator that the options name, or start one, or a member of one.

    Args:
        options: of `keepstep run`.
        min_nodes: the number of nodes that the job needs.
        directory: private, for the files of a coordinator that is started.
        patience_s: how long to wait for a majority of the members on several nodes.

    Raises:
        UsageError: other nodes could not find the coordinator, or its clients could not be
            authenticated; or its address is not available.
        StoreUnavailable: it does not answer.
    """
    address = _named_address(options)
    if address is None and min_nodes > 1:
        raise UsageError(
            f"--nnodes asks for {min_nodes} nodes, but no other finds the coordinator that a node "
            f"starts for itself; give all of them --rdzv-endpoint HOST:PORT, with the address of "
            f"one of them, or --store etcd://HOST:PORT of a running etcd"
        )
    if address is not None and not options["store"] and len(address.endpoints) > 1:
        async with _one_of_several(address, patience_s) as connected:
            yield connected
        return
    with _started(address, options, directory) as own:
        reached = own or address
        assert reached is not None, "without an address a coordinator is started"
        store = await _connect(reached, is_shared=not options["store"])
        try:
            yield Coordinator(
                store,
                reached,
                is_own=own is not None,
                is_private=address is None,
            )
        finally:
            await store.close()


@asynccontextmanager
async def _one_of_several(address: Address, patience_s: float) -> AsyncIterator[Coordinator]:
    """Start this node's member of a coordinator, if it has one, and connect to the coordinator."""
    members = parse_members(address.endpoints)
    try:
        own = CoordinatorMember.started(members, coordinator_secret(address, os.environ))
    except (NotPrivate, OSError) as error:
        raise UsageError(f"the coordinator's member of this node cannot start: {error}") from error
    try:
        store = await _connect_to_majority(address, own.member if own else None, patience_s)
        try:
            yield Coordinator(store, address, is_own=False, is_private=False, member=own)
        finally:
            await store.close()
    finally:
        if own is not None:
            await own.close()


async def _connect_to_majority(
    address: Address, own: Member | None, patience_s: float
) -> EtcdStore:
    """Connect once a majority of the members has been started.

    Raises:
        StoreUnavailable: that takes too long.
    """
    begun_s = time.monotonic()
    # First to this node's member, which needs no network.
    endpoints = sorted(address.endpoints, key=lambda it: own is None or it != own.endpoint)
    nearest = replace(address, endpoints=tuple(endpoints))
    while True:
        try:
            return await EtcdStore.connect(nearest, deadline_s=_START_S)
        except StoreUnavailable:
            waited_s = time.monotonic() - begun_s
            if waited_s > patience_s:
                raise
            log.warning(
                "for %.0f s no majority of the coordinator's members %s has answered; each is "
                "started by the agent of its node, which is given the same names and secret",
                waited_s, ", ".join(address.endpoints),
            )  # fmt: skip


def _named_address(options: Mapping[str, Any]) -> Address | None:
    """Return the address that the options name; None if the node starts its own coordinator."""
    if options["standalone"]:
        return None
    if options["store"]:
        return parse_address(options["store"], options["secret_file"])
    endpoint = options["rdzv_endpoint"]
    if not endpoint and options["master_addr"] and options["master_port"]:
        endpoint = host_and_port(without_brackets(options["master_addr"]), options["master_port"])
    if not endpoint or _is_any_port(endpoint):
        return None
    return parse_address(f"{Access.SECRET}://{endpoint}", options["secret_file"], _ENDPOINT_PORT)


def _is_any_port(endpoint: str) -> bool:
    """Whether it is `localhost:0`, by which torchrun takes a free port of this machine."""
    host, _, port = endpoint.rpartition(":")
    return port == "0" and is_loopback(without_brackets(host))


@contextmanager
def _started(
    address: Address | None, options: Mapping[str, Any], directory: Path
) -> Iterator[Address | None]:
    """Start a coordinator if it is this node's to do so; yield its address, else None.

    Among the nodes of one `--rdzv-endpoint`, the first one with that address starts it.
    """
    if address is None:
        address = Address((host_and_port(loopback(), 0),), Access.SECRET, options["secret_file"])
    elif options["store"] or not _is_here(address) or _is_taken(address):
        yield None
        return
    port = address.endpoints[0].rpartition(":")[2]
    secret = coordinator_secret(address, os.environ)
    server = EmbeddedEtcd(secret, address.hosts[0], int(port), parent=directory)
    try:
        server.start()
    except (StoreUnavailable, UsageError):
        # Several agents of this machine may have started at the same time: one of them has the
        # port.
        if int(port) == 0 or not _is_taken(address):
            raise
        yield None
        return
    try:
        yield replace(parse_address(server.url), secret_file=address.secret_file)
    finally:
        server.stop()


async def _connect(address: Address, *, is_shared: bool) -> EtcdStore:
    """Connect to a coordinator, waiting for one that several nodes share until it serves."""
    if not is_shared:
        return await EtcdStore.connect(address, deadline_s=_CONNECT_S)
    if not _is_here(address):
        log.info("waiting for the coordinator at %s", address.endpoints[0])
        return await EtcdStore.connect(address, deadline_s=_OTHER_NODE_S)
    try:
        return await EtcdStore.connect(address, deadline_s=_START_S)
    except StoreUnavailable as error:
        raise StoreUnavailable(
            f"{address.endpoints[0]} is in use, but not by a coordinator of this user with this "
            f"secret; choose another port, or give the --secret-file of that coordinator ({error})"
        ) from error


def _is_here(address: Address) -> bool:
    """Return whether the address is this machine's."""
    try:
        bound_socket(address.hosts[0], 0).close()
    except OSError:
        return False
    return True


def _is_taken(address: Address) -> bool:
    """Return whether a process listens at the address."""
    port = address.endpoints[0].rpartition(":")[2]
    try:
        socket.create_connection((address.hosts[0], int(port)), _PROBE_S).close()
    except OSError:
        return False
    return True
