"""Reads a job's keys from the coordinator as a node needs them, before and while it is a member."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace

from keepstep.elastic.rendezvous.view import (
    Keys,
    View,
    apply,
    missing_chunks,
    with_chunks,
    without_unlisted_chunks,
)
from keepstep.elastic.store.contract import Change, KeyValue, Store

_CHUNKS_READ_ONE_BY_ONE = 8
_REREAD_S = 0.05


class ViewReader:
    """Reads for one node.

    Args:
        store: the coordinator.
        keys: the job's.
        node: the node's name.
    """

    def __init__(self, store: Store, keys: Keys, node: str) -> None:
        self._store = store
        self._keys = keys
        self._node = node

    async def before_joining(self, known: View) -> View:
        """Read what every agent follows, who joined last, one node, and the one of this name."""
        # Before the nodes: whoever joins after that changes it.
        (*joins,) = (await self._store.read(self._keys.single("last_join"), limit=1)).items
        view = await self.followed(known)
        nodes = (await self._store.read(self._keys.node(), limit=1)).items
        own = await self.own_key()
        items = (*joins, *nodes, *((own,) if own is not None else ()))
        return replace(
            apply(self._keys, view, (Change(item.key, item, view.revision) for item in items)),
            revision=view.revision,
        )

    async def own_key(self) -> KeyValue | None:
        """Read the key of this node's record."""
        key = self._keys.node(self._node)
        listing = await self._store.read(key, limit=1)
        return next((item for item in listing.items if item.key == key), None)

    async def followed(self, known: View) -> View:
        """Read what every agent follows, but for the members that are known already."""
        while True:
            listing = await self._store.read(self._keys.followed)
            bare = View(revision=listing.revision, chunks=known.chunks)
            complete = await self.with_missing_chunks(bare, listing.items)
            if complete is not None:
                changes = (Change(item.key, item, listing.revision) for item in listing.items)
                return without_unlisted_chunks(
                    replace(apply(self._keys, complete, changes), revision=listing.revision)
                )
            await asyncio.sleep(_REREAD_S)

    async def with_missing_chunks(self, view: View, items: Collection[KeyValue]) -> View | None:
        """Read the members that placements among these items list and the view lacks.

        Returns None if some are not there any more: a later generation has been opened.
        """
        missing = missing_chunks(self._keys, view, items)
        if not missing:
            return view
        if len(missing) <= _CHUNKS_READ_ONE_BY_ONE:
            listings = [await self._store.read(self._keys.chunk(digest)) for digest in missing]
            found = [item for listing in listings for item in listing.items]
        else:
            found = list((await self._store.read(self._keys.chunk())).items)
        view = with_chunks(self._keys, view, found)
        return view if missing <= view.chunks.keys() else None

    async def has_others(self) -> bool:
        """Whether another node is present."""
        listing = await self._store.read(self._keys.node(), limit=2)
        return any(item.key != self._keys.node(self._node) for item in listing.items)
