"""Implements the store contract in memory, for tests and simulations. Time is an argument.

Deterministic: equal calls give equal results. `advance` moves the clock and ends leases; `compact`
drops old changes as etcd does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from keepstep.elastic.errors import LeaseLost
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


class MemoryStore:
    """A coordinator inside one event loop."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s
        self._revision = 1
        self._compacted = 0
        self._items: dict[str, KeyValue] = {}
        self._leases: dict[int, tuple[float, float]] = {}
        self._next_lease = 1
        self._log: list[tuple[Change, ...]] = []
        self._changed = asyncio.Condition()

    async def read(self, prefix: str, limit: int = 0) -> Listing:
        """See `Store.read`."""
        items = sorted(
            (item for key, item in self._items.items() if key.startswith(prefix)),
            key=lambda item: item.key,
        )
        return Listing(self._revision, tuple(items[: limit or None]))

    async def commit(
        self, conditions: Sequence[Modified | Created], operations: Sequence[Put | Delete]
    ) -> Committed:
        """See `Store.commit`."""
        if not all(self._holds(condition) for condition in conditions):
            return Committed(False, self._revision)
        for operation in operations:
            if (
                isinstance(operation, Put)
                and operation.lease
                and operation.lease not in self._leases
            ):
                raise LeaseLost(f"lease {operation.lease:x} has ended")
        await self._apply(operations)
        return Committed(True, self._revision)

    async def grant(self, ttl_s: float) -> int:
        """See `Store.grant`."""
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        self._leases[lease] = (ttl_s, self._now_s + ttl_s)
        return lease

    async def renew(self, lease: int) -> float:
        """See `Store.renew`."""
        if lease not in self._leases:
            raise LeaseLost(f"lease {lease:x} has ended")
        ttl_s, _ = self._leases[lease]
        self._leases[lease] = (ttl_s, self._now_s + ttl_s)
        return ttl_s

    async def revoke(self, lease: int) -> None:
        """See `Store.revoke`."""
        if self._leases.pop(lease, None) is not None:
            await self._apply(
                [Delete(key) for key, item in self._items.items() if item.lease == lease]
            )

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[tuple[Change, ...] | Reset]:
        """See `Store.watch`."""
        while True:
            if after < self._compacted:
                listing = await self.read(prefix)
                after = listing.revision
                yield Reset(listing)
            batch = next((changes for changes in self._log if changes[0].revision > after), None)
            if batch is None:
                await self._wait_for_change()
                continue
            after = batch[0].revision
            matching = tuple(change for change in batch if change.key.startswith(prefix))
            if matching:
                yield matching

    async def close(self) -> None:
        """See `Store.close`. There is nothing to release."""

    async def advance(self, now_s: float) -> None:
        """Move the clock. Leases not renewed in time end, in the order of their deadlines."""
        self._now_s = now_s
        for lease in sorted(self._leases, key=lambda lease: self._leases[lease][1]):
            if self._leases[lease][1] <= now_s:
                await self.revoke(lease)

    async def compact(self) -> None:
        """Drop all changes so far; a watch that still needs them yields a `Reset`."""
        self._compacted = self._revision
        self._log.clear()

    async def _wait_for_change(self) -> None:
        async with self._changed:
            present = self._revision
            await self._changed.wait_for(lambda: self._revision > present)

    def _holds(self, condition: Modified | Created) -> bool:
        item = self._items.get(condition.key)
        if isinstance(condition, Modified):
            return (item.modified if item else 0) == condition.revision
        return (item.created if item else 0) == condition.revision

    async def _apply(self, operations: Sequence[Put | Delete]) -> None:
        revision = self._revision + 1
        changes: dict[str, Change] = {}
        for operation in operations:
            if isinstance(operation, Put):
                old = self._items.get(operation.key)
                created = old.created if old else revision
                item = KeyValue(operation.key, operation.value, created, revision, operation.lease)
                self._items[operation.key] = item
                changes[operation.key] = Change(operation.key, item, revision)
                continue
            for key in [
                k
                for k in self._items
                if k == operation.key or (operation.prefix and k.startswith(operation.key))
            ]:
                del self._items[key]
                changes[key] = Change(key, None, revision)
        if changes:
            self._revision = revision
            self._log.append(tuple(changes.values()))
            async with self._changed:
                self._changed.notify_all()
