"""Gives callers without an event loop access to the coordinator.

Each `BlockingStore` runs its own event loop, and may be used by one thread at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from keepstep.elastic.store.address import Address
from keepstep.elastic.store.contract import Committed, Created, Delete, Listing, Modified, Put
from keepstep.elastic.store.etcd import EtcdStore


class BlockingStore:
    """A store with blocking calls. The first call connects; `close` may be called twice."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._runner = asyncio.Runner()
        self._store: EtcdStore | None = None

    def read(self, prefix: str) -> Listing:
        """Return all keys under a prefix; see `Store.read`."""
        return self._runner.run(self._read(prefix))

    def commit(
        self, conditions: Sequence[Modified | Created], operations: Sequence[Put | Delete]
    ) -> Committed:
        """Perform the operations if all conditions hold; see `Store.commit`."""
        return self._runner.run(self._commit(conditions, operations))

    def close(self) -> None:
        """End the connection."""
        if self._store is not None:
            self._runner.run(self._store.close())
            self._store = None
        self._runner.close()

    async def _connected(self) -> EtcdStore:
        if self._store is None:
            self._store = await EtcdStore.connect(self._address)
        return self._store

    async def _read(self, prefix: str) -> Listing:
        return await (await self._connected()).read(prefix)

    async def _commit(
        self, conditions: Sequence[Modified | Created], operations: Sequence[Put | Delete]
    ) -> Committed:
        return await (await self._connected()).commit(conditions, operations)
