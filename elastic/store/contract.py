"""Defines the coordinator contract: a transactional store with revisions, leases and watches.

Terms and semantics are etcd's (https://etcd.io/docs/v3.5/learning/api/): the store has one
revision counter, a transaction is atomic and takes one revision, the end of a lease deletes its
keys. `EtcdStore` and `MemoryStore` implement the contract and pass one contract test suite.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A stored key. `created` and `modified` are store revisions; `lease` is 0 if there is none."""

    key: str
    value: bytes
    created: int
    modified: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Put:
    """Write `value`. Unless `lease` is 0, its end deletes the key."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete `key`, or with `prefix` all keys that begin with it."""

    key: str
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class Modified:
    """Condition: the key was last modified at exactly this revision; 0: it does not exist."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Created:
    """Condition: the key was created at exactly this revision; 0: it does not exist.

    It may have been modified since.
    """

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
    """A watch could not be resumed without a gap because of a compaction.

    The receiver replaces what it mirrored by this listing.
    """

    listing: Listing


class Store(Protocol):
    """A coordinator. All calls are safe to cancel.

    Implementations retry transient faults; after a deadline they raise `StoreUnavailable`.
    """

    async def read(self, prefix: str, limit: int = 0) -> Listing:
        """Return the keys that begin with `prefix`, linearizably; with `limit` only the first ones.

        A key that equals the prefix comes first.
        """
        ...

    async def commit(
        self, conditions: Sequence[Modified | Created], operations: Sequence[Put | Delete]
    ) -> Committed:
        """Apply all operations in one transaction if all conditions hold, else none.

        Operations are never applied twice: if a lost reply leaves the outcome unknown,
        `StoreUnavailable` is raised with `unknown=True`.
        """
        ...

    async def grant(self, ttl_s: float) -> int:
        """Create a lease that ends unless renewed within `ttl_s` seconds; etcd rounds them up."""
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

    def watch(self, prefix: str, after: int) -> AsyncGenerator[tuple[Change, ...] | Reset]:
        """Yield every change under `prefix` after revision `after`, in order and exactly once.

        One item holds all changes of one revision. The watch survives outages, leader changes and
        endpoint failures; after a compaction it yields a `Reset` instead of the lost changes. It
        ends only when closed (`aclose`) or cancelled.
        """
        ...

    async def close(self) -> None:
        """Release connections and end all watches. Leases stay until their time to live passes."""
        ...
