"""Implements the store contract over etcd, with messages of the `etcd3` package and asyncio gRPC.

Only agents, monitors and commands load this module, for training needs no coordinator. The
package's own client and watcher are not used: they know one endpoint, and the watcher's thread dies
with its connection.

Credentials come from the environment (`keepstep.elastic.store.credentials`). When a token has
expired, or a restarted member no longer knows it, the client authenticates again.

Promises beyond the contract: calls fail over between endpoints; a watch continues after the last
revision delivered, on any endpoint that answers; a member without a leader ends the watch instead
of keeping it open without changes (`hasleader`). A watch moves as well when calls leave an
endpoint: a member whose disk hangs keeps watches open, renews leases through its leader, and shows
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from keepstep.elastic.errors import LeaseLost, StoreUnavailable, UsageError
from keepstep.elastic.store.address import Access, Address
from keepstep.elastic.store.contract import (
    Change,
    Committed,
    Created,
    Delete,
    KeyValue,
    Listing,
    Modified,
    Put,
    Reset,
)
from keepstep.elastic.store.credentials import Credentials
from keepstep.elastic.store.etcd_messages import kv, rpc, stub
from keepstep.elastic.store.renewal_stream import RenewalStream

log = logging.getLogger("keepstep")

T = TypeVar("T")

_ATTEMPT_S = 2.0
_BACKOFF_S = 0.05
_BACKOFF_MAX_S = 1.0
_TRANSIENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)
# With these errors a write was not applied; after any other transient fault its outcome is unknown.
_NOT_APPLIED = ("failed to connect", "Connection refused", "etcdserver: no leader")
# The token has expired, or is older than a change of users; "empty": none was sent.
_TOKEN_REJECTED = ("invalid auth token", "revision of auth store is old", "user name is empty")
_HINTS = {
    Access.PLAIN: " and that --store (torchrun: --rdzv-endpoint) names it",
    Access.TLS: " and that --store (torchrun: --rdzv-endpoint) names it",
    Access.SECRET: ", and that its node has the same --secret-file as this one (torchrun: "
    "--rdzv-conf secret_file=); "
    "if it is an etcd of your own, name it with --store etcd://HOST:PORT",
}
_CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", 256 * 2**20),
    ("grpc.keepalive_time_ms", 10000),
    ("grpc.keepalive_timeout_ms", 2000),
    # A channel that carries nothing but a watch sends no data: after two pings, the default, gRPC
    # would ask no more, or once a minute, and the death of the member's host go unnoticed.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
)


class _WatchRefused(Exception):
    """A member refused a watch: the user may not read there, or the token is no longer known."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A connection to one member: its services, as etcd names them."""

    address: str
    channel: Any
    auth: Any
    kv: Any
    lease: Any
    watch: Any
    cluster: Any


class EtcdStore:
    """A coordinator in etcd, created by `connect`. `close` releases its connections."""

    def __init__(self, address: Address, deadline_s: float, credentials: Credentials) -> None:
        self._address = address
        self._deadline_s = deadline_s
        self._credentials = credentials
        self._token: tuple[tuple[str, str], ...] = ()
        self._endpoints = [
            open_endpoint(endpoint, address.access, credentials) for endpoint in address.endpoints
        ]
        self._current = 0
        self._watches: dict[Any, Endpoint] = {}
        self._renewals: tuple[Endpoint, RenewalStream] | None = None
        self._is_renewing = asyncio.Lock()

    @classmethod
    async def connect(
        cls, address: Address, *, deadline_s: float = 10.0, credentials: Credentials | None = None
    ) -> EtcdStore:
        """Connect to the first endpoint that answers.

        Args:
            address: the coordinator's endpoints.
            deadline_s: seconds for which every call, this one included, retries.
            credentials: of this client; by default `Credentials.for_address` of the environment.

        Raises:
            StoreUnavailable: no endpoint answers.
            UsageError: etcd rejects the credentials, or requires some; or they cannot be read.
        """
        store = cls(
            address, deadline_s, credentials or Credentials.for_address(address, os.environ)
        )
        try:
            await store.read("/keepstep/ping")
        except (StoreUnavailable, UsageError):
            await store.close()
            raise
        return store

    async def read(self, prefix: str, limit: int = 0) -> Listing:
        """See `Store.read`."""
        request = rpc.RangeRequest(key=prefix.encode(), range_end=_prefix_end(prefix), limit=limit)
        reply = await self._call(lambda endpoint: endpoint.kv.Range(request, **self._options()))
        return Listing(reply.header.revision, tuple(_key_value(item) for item in reply.kvs))

    async def commit(
        self, conditions: Sequence[Modified | Created], operations: Sequence[Put | Delete]
    ) -> Committed:
        """See `Store.commit`."""
        request = rpc.TxnRequest(
            compare=[_compare(condition) for condition in conditions],
            success=[_operation(operation) for operation in operations],
        )
        reply = await self._call(
            lambda endpoint: endpoint.kv.Txn(request, **self._options()), is_write=True
        )
        return Committed(reply.succeeded, reply.header.revision)

    async def grant(self, ttl_s: float) -> int:
        """See `Store.grant`."""
        request = rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        reply = await self._call(
            lambda endpoint: endpoint.lease.LeaseGrant(request, **self._options())
        )
        return int(reply.ID)

    async def renew(self, lease: int) -> float:
        """See `Store.renew`. Renewals of one store wait for each other."""
        async with self._is_renewing:
            reply = await self._call(lambda endpoint: self._renewals_at(endpoint).renew(lease))
        if reply.TTL <= 0:
            raise LeaseLost(f"lease {lease:x} has ended")
        return float(reply.TTL)

    async def revoke(self, lease: int) -> None:
        """See `Store.revoke`."""
        request = rpc.LeaseRevokeRequest(ID=lease)
        try:
            await self._call(
                lambda endpoint: endpoint.lease.LeaseRevoke(request, **self._options())
            )
        except LeaseLost:
            return

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[tuple[Change, ...] | Reset]:
        """See `Store.watch`."""
        backoff_s = _BACKOFF_S
        is_token_new = False
        while True:
            endpoint = self._endpoints[self._current]
            try:
                async for item in self._watch_once(endpoint, prefix, after):
                    after = item.listing.revision if isinstance(item, Reset) else item[0].revision
                    backoff_s, is_token_new = _BACKOFF_S, False
                    yield item
                    if isinstance(item, Reset):
                        break
            except _WatchRefused as refused:
                # Members before 3.5.5 refuse a watch with an unknown token as one without the
                # right to read. A member may know a new token later than the one that gave it.
                is_final = is_token_new and not _is_token_rejected(str(refused))
                if is_final or self._credentials.user is None:
                    raise UsageError(
                        f"etcd at {endpoint.address} refuses a watch on {prefix}: {refused}; "
                        "give the user a role that may read and write there"
                    ) from None
                is_token_new = await self._authenticate(endpoint)
            except grpc.aio.AioRpcError as error:
                _end_if_cancelled()
                details = error.details() or ""
                if _is_token_rejected(details):
                    await self._authenticate(endpoint)
                elif error.code() not in _TRANSIENT:
                    raise
                log.debug("watch on %s broke: %s", endpoint.address, details)
                self._switch_endpoint(endpoint)
            except asyncio.CancelledError:
                _end_if_cancelled()
                log.debug("the watch on %s goes along to another endpoint", endpoint.address)
            # However it ended: a member may cancel a watch for any reason.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))
            backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)

    async def close(self) -> None:
        """See `Store.close`."""
        if self._renewals is not None:
            self._renewals[1].close()
        await asyncio.gather(*(endpoint.channel.close() for endpoint in self._endpoints))

    async def _watch_once(
        self, endpoint: Endpoint, prefix: str, after: int
    ) -> AsyncIterator[tuple[Change, ...] | Reset]:
        create = rpc.WatchCreateRequest(
            key=prefix.encode(), range_end=_prefix_end(prefix), start_revision=after + 1
        )

        ended = asyncio.Event()

        async def requests() -> AsyncIterator[Any]:
            yield rpc.WatchRequest(create_request=create)
            # Their end would end the watch.
            await ended.wait()

        # Not by `write`: it never ends if the call is cancelled before the member has answered.
        call = endpoint.watch.Watch(requests(), metadata=(("hasleader", "true"), *self._token))
        self._watches[call] = endpoint
        try:
            while (reply := await call.read()) is not grpc.aio.EOF:
                if reply.compact_revision > after:
                    yield Reset(await self.read(prefix))
                    return
                if reply.canceled and _is_refusal(reply.cancel_reason):
                    raise _WatchRefused(reply.cancel_reason)
                if reply.canceled:
                    log.debug("%s cancels a watch: %s", endpoint.address, reply.cancel_reason)
                    return
                for changes in _by_revision(reply.events):
                    yield changes
        finally:
            del self._watches[call]
            call.cancel()
            # gRPC leaves the requests of a call waiting that the member has ended.
            ended.set()

    async def _call(
        self, attempt: Callable[[Endpoint], Awaitable[T]], *, is_write: bool = False
    ) -> T:
        """Try endpoints in turn until one answers or the deadline passes."""
        until_s = time.monotonic() + self._deadline_s
        backoff_s = _BACKOFF_S
        has_authenticated = False
        while True:
            endpoint = self._endpoints[self._current]
            try:
                return await attempt(endpoint)
            except grpc.aio.AioRpcError as error:
                _end_if_cancelled()
                details = error.details() or ""
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    raise LeaseLost(details) from None
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    # An operator can mend that while the job goes on.
                    raise StoreUnavailable(
                        f"etcd at {endpoint.address} takes no writes: {details}; compact and "
                        "defragment it, then run `etcdctl alarm disarm` (docs/etcd.md)"
                    ) from None
                if _is_token_rejected(details) and time.monotonic() < until_s:
                    if has_authenticated:
                        await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))
                        backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
                    has_authenticated = True
                    await self._authenticate(endpoint)
                    continue
                if error.code() not in _TRANSIENT:
                    raise UsageError(f"etcd at {endpoint.address} refused: {details}") from error
                self._switch_endpoint(endpoint)
                if is_write and not any(text in details for text in _NOT_APPLIED):
                    raise StoreUnavailable(
                        f"etcd at {endpoint.address} did not confirm a write ({details})",
                        unknown=True,
                    ) from None
            if time.monotonic() + backoff_s > until_s:
                raise StoreUnavailable(
                    f"no answer from etcd at {', '.join(self._address.endpoints)} "
                    f"for {self._deadline_s:.0f} s ({details}); "
                    f"check that it runs{_HINTS[self._address.access]}"
                )
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))
            backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)

    def _renewals_at(self, endpoint: Endpoint) -> RenewalStream:
        """Return the stream on which leases are renewed, to this endpoint from now on."""
        if self._renewals is not None:
            used, stream = self._renewals
            if used is endpoint and not stream.has_ended:
                return stream
            stream.close()
        stream = RenewalStream(
            lambda: endpoint.lease.LeaseKeepAlive(metadata=self._token), _ATTEMPT_S
        )
        self._renewals = (endpoint, stream)
        return stream

    def _options(self) -> dict[str, Any]:
        return {"timeout": _ATTEMPT_S, "metadata": self._token}

    async def _authenticate(self, endpoint: Endpoint) -> bool:
        """Get a token for the user and password.

        Returns False if the member did not answer; then the next endpoint is used.

        Raises:
            UsageError: no user is set, or etcd rejects user and password.
        """
        if self._credentials.user is None:
            raise UsageError(
                f"etcd at {endpoint.address} requires a user; "
                "set ETCDCTL_USER and ETCDCTL_PASSWORD, as for etcdctl"
            )
        request = rpc.AuthenticateRequest(
            name=self._credentials.user, password=self._credentials.password
        )
        try:
            reply = await endpoint.auth.Authenticate(request, timeout=_ATTEMPT_S)
        except grpc.aio.AioRpcError as error:
            _end_if_cancelled()
            if error.code() in _TRANSIENT:
                self._switch_endpoint(endpoint)
                return False
            raise UsageError(
                f"etcd at {endpoint.address} rejected user {self._credentials.user} "
                f"with this password: {error.details()}"
            ) from error
        self._token = (("token", reply.token),)
        return True

    def _switch_endpoint(self, failed: Endpoint) -> None:
        """Use the next endpoint from now on, unless another call has already switched."""
        if self._endpoints[self._current] is not failed or len(self._endpoints) == 1:
            return
        self._current = (self._current + 1) % len(self._endpoints)
        for call, endpoint in self._watches.items():
            if endpoint is failed:
                call.cancel()


def open_endpoint(address: str, access: Access, credentials: Credentials) -> Endpoint:
    """Return a connection to one member, whose channel the caller closes."""
    if access is not Access.PLAIN:
        channel_credentials = grpc.ssl_channel_credentials(
            credentials.authority, credentials.key, credentials.certificate
        )
        options = _CHANNEL_OPTIONS
        if credentials.server_name is not None:
            options += (("grpc.ssl_target_name_override", credentials.server_name),)
        channel = grpc.aio.secure_channel(address, channel_credentials, options=options)
    else:
        channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    services = ("Auth", "KV", "Lease", "Watch", "Cluster")
    return Endpoint(
        address, channel, *(stub(f"etcdserverpb.{service}", channel) for service in services)
    )


def _end_if_cancelled() -> None:
    """End the current task if it was cancelled, although a call has raised another error.

    A streaming call of gRPC for asyncio swallows a cancellation if it has just failed, and raises
    only its failure. A caller that tried again would never end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _is_refusal(reason: str) -> bool:
    """Whether a watch was cancelled for want of a valid token, or of the right to read."""
    return "permission denied" in reason or _is_token_rejected(reason)


def _is_token_rejected(details: str) -> bool:
    return any(text in details for text in _TOKEN_REJECTED)


def _prefix_end(prefix: str) -> bytes:
    """Return etcd's range end for a prefix: the first key after all that begin with it."""
    raw = prefix.encode()
    return raw[:-1] + bytes([raw[-1] + 1])


def _key_value(item: Any) -> KeyValue:
    return KeyValue(
        key=item.key.decode(errors="replace"),
        value=item.value,
        created=item.create_revision,
        modified=item.mod_revision,
        lease=item.lease,
    )


def _compare(condition: Modified | Created) -> Any:
    fields = {"key": condition.key.encode(), "result": rpc.Compare.EQUAL}
    if isinstance(condition, Modified):
        return rpc.Compare(target=rpc.Compare.MOD, mod_revision=condition.revision, **fields)
    return rpc.Compare(target=rpc.Compare.CREATE, create_revision=condition.revision, **fields)


def _operation(operation: Put | Delete) -> Any:
    if isinstance(operation, Put):
        put = rpc.PutRequest(
            key=operation.key.encode(), value=operation.value, lease=operation.lease
        )
        return rpc.RequestOp(request_put=put)
    end = _prefix_end(operation.key) if operation.prefix else b""
    delete = rpc.DeleteRangeRequest(key=operation.key.encode(), range_end=end)
    return rpc.RequestOp(request_delete_range=delete)


def _by_revision(events: Sequence[Any]) -> list[tuple[Change, ...]]:
    """Group the events of a reply by revision.

    etcd sends events in order, and all events of a revision in one reply.
    """
    grouped: list[list[Change]] = []
    for event in events:
        deleted = event.type == kv.Event.DELETE
        revision = event.kv.mod_revision
        change = Change(
            event.kv.key.decode(errors="replace"),
            None if deleted else _key_value(event.kv),
            revision,
        )
        if grouped and grouped[-1][0].revision == revision:
            grouped[-1].append(change)
        else:
            grouped.append([change])
    return [tuple(changes) for changes in grouped]
