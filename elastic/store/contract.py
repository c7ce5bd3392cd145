"""What keepstep asks of a coordinator: a small, revisioned, transactional key-value store with leases and watches.

The words and the meaning are etcd's (https://etcd.io/docs/v3.5/learning/api/): one revision counter for the whole store,
a transaction is atomic and takes one revision, a lease's end deletes its keys. `EtcdStore` and `MemoryStore` implement it
and pass one contract test suite.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as stored: `created` and `modified` are store revisions; `lease` is 0 when none is attached."""

    key: str
    value: bytes
    created: int
    modified: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Put:
    """Write `value`; the key dies with `lease` unless that is 0."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete `key`, or all keys that begin with it when `prefix`."""

    key: str
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class Modified:
    """Condition: the key's last modification has exactly this revision; 0 means the key does not exist."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Created:
    """Condition: the key was created at exactly this revision (it may have been modified since); 0 means absent."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Outcome of a transaction: whether its conditions held, and the store revision after it."""

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All keys under a prefix at one revision, ordered by key."""

    revision: int
    items: tuple[KeyValue, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One watched change: `value` is None when the key was deleted (or its lease ended)."""

    key: str
    value: KeyValue | None
    revision: int


@dataclass(frozen=True, slots=True)
class Reset:
    """The watch could not be resumed without a gap (compaction): forget what was mirrored and take this listing instead."""

    listing: Listing


class Store(Protocol):
    """A coordinator. All calls are safe to cancel. Transient faults are retried inside until `StoreUnavailable`."""

    async def read(self, prefix: str) -> Listing:
        """Return all keys that begin with `prefix`, linearizably."""
        ...

    async def commit(
        self, conditions: Sequence[Modified | Created], operations: Sequence[Put | Delete]
    ) -> Committed:
        """Apply all operations in one transaction if all conditions hold, else none.

        After a lost reply the outcome can be unknown; then `StoreUnavailable` is raised with `unknown=True`, never a
        silent second application.
        """
        ...

    async def grant(self, ttl_s: float) -> int:
        """Create a lease that ends unless renewed within `ttl_s` seconds (rounded up to whole seconds by etcd)."""
        ...

    async def renew(self, lease: int) -> float:
        """Renew a lease once and return its new time to live in seconds.

        Raises:
            LeaseLost: the lease has ended or was revoked; its keys are gone.
        """
        ...

    async def revoke(self, lease: int) -> None:
        """End a lease now, deleting its keys. Revoking an ended lease is not an error."""
        ...

    def watch(self, prefix: str, after: int) -> AsyncIterator[tuple[Change, ...] | Reset]:
        """Yield every change under `prefix` with a revision greater than `after`, in order, none twice, none missing.

        One item holds all changes of one revision. Outages, leader changes and endpoint failures are bridged inside; after
        a compaction a `Reset` comes instead of the lost changes. Ends only when closed (`aclose`) or cancelled.
        """
        ...

    async def close(self) -> None:
        """Release connections and end all watches. Leases are left to end by themselves."""
        ...
