"""Runs production's in-memory store without an event loop, and checks every revision of it.

Every transaction is sent here by one membership. It may be applied at once and confirmed, applied
without a confirmation, applied later, or lost. Production's `view.apply` folds each revision into
the view that all mirrors share; production's `invariants.check_transition` checks each of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from keepstep.elastic.errors import LeaseLost
from keepstep.elastic.rendezvous import invariants, placements, transactions
from keepstep.elastic.rendezvous.records import History
from keepstep.elastic.rendezvous.transactions import Transaction
from keepstep.elastic.rendezvous.view import (
    Keys,
    View,
    apply,
    from_listing,
    without_unlisted_chunks,
)
from keepstep.elastic.store.contract import Committed, Delete, Listing
from keepstep.elastic.store.memory import MemoryStore
from tests.sim.rules import must

KEYS = Keys("job")
_Result = TypeVar("_Result")


class UnknownOutcome(Exception):
    """The writer cannot learn whether its transaction was, or will be, applied."""


@dataclass(frozen=True, slots=True)
class Sender:
    """The membership that sends a transaction: `created` 0 before it has joined.

    `version` counts the record's versions of a membership; 0 for what is no record.
    """

    node: str
    created: int
    version: int = 0


@contextmanager
def small_requests() -> Iterator[None]:
    """Have a generation of few nodes opened by several transactions, as one of thousands is."""
    large = placements.MEMBERS_PER_CHUNK, transactions.MAX_OPERATIONS
    placements.MEMBERS_PER_CHUNK, transactions.MAX_OPERATIONS = 1, 12
    try:
        yield
    finally:
        placements.MEMBERS_PER_CHUNK, transactions.MAX_OPERATIONS = large


def followed(view: View) -> View:
    """Return what a follower's mirror shows of a view."""
    revisions = {
        name: at for name, at in view.revisions.items()
        if KEYS.single(name).startswith(KEYS.followed)
    }  # fmt: skip
    shown = replace(
        view, nodes={}, history=History(), store_failure=None, verdicts=None, revisions=revisions
    )
    return without_unlisted_chunks(shown)


def complete(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: _Result = done.value
        return result
    raise AssertionError("the in-memory store waits for nothing")


class Coordinator:
    """The job's keys, their history as views, and the transactions that are still on their way."""

    def __init__(self, rng: random.Random, on_change: Callable[[View, View], None]) -> None:
        self._rng = rng
        self._on_change = on_change
        self._store = MemoryStore()
        self._views = [from_listing(KEYS, Listing(1, ()))]
        self._in_flight: list[tuple[float, Transaction, Sender]] = []
        self._now_s = 0.0
        self._versions: dict[tuple[str, int], int] = {}
        self._followed: dict[int, View] = {}
        self._read_at = 0
        self.away_until_s = 0.0
        self.mute_until_s = 0.0
        """Until then it does what it is asked to, and no answer arrives."""
        self.is_reliable = False
        self.losses = 0
        """How often all keys were lost: what nodes saw before is newer than what is there now."""

    @property
    def view(self) -> View:
        """The newest view."""
        return self._views[-1]

    def view_at(self, revision: int) -> View:
        """Return the view at a revision."""
        return self._views[revision - 1]

    def followed_at(self, revision: int) -> View:
        """Return what a follower mirrors at a revision, as if folded from what it watches."""
        if revision not in self._followed:
            self._followed[revision] = followed(self.view_at(revision))
        return self._followed[revision]

    def grant(self, ttl_s: float) -> int:
        """Grant a lease."""
        return complete(self._store.grant(ttl_s))

    def renew(self, lease: int) -> float:
        """Renew a lease; raises LeaseLost."""
        return complete(self._store.renew(lease))

    def lease_end_s(self, lease: int) -> float | None:
        """Return when a lease ends unless it is renewed; None if it has ended."""
        held = self._store._leases.get(lease)
        return held[1] if held is not None else None

    def revoke(self, lease: int) -> None:
        """End a lease, if the coordinator answers."""
        if self.away_until_s:
            return
        complete(self._store.revoke(lease))
        self._fold()

    def advance(self, now_s: float) -> None:
        """Move the clock, and apply some of the transactions that are on their way."""
        self._now_s = now_s
        if now_s < self.away_until_s:
            return
        if self.away_until_s:
            # As etcd: a new leader restarts the count of all leases, for nobody could renew them.
            self.away_until_s = 0.0
            for lease, (ttl_s, _) in self._store._leases.items():
                self._store._leases[lease] = (ttl_s, now_s + ttl_s)
        complete(self._store.advance(now_s))
        self._fold()
        arrived = [late for late in self._in_flight if late[0] <= now_s or self.is_reliable]
        self._in_flight = [late for late in self._in_flight if late not in arrived]
        for _, transaction, sender in arrived:
            try:
                self._apply(transaction, sender)
            except LeaseLost:
                continue

    def go_away(self, until_s: float) -> None:
        """Answer nobody for a while; the caller cuts off all nodes."""
        self.away_until_s = until_s

    def lose_keys(self) -> None:
        """Lose all keys and leases, as a new etcd under the same address."""
        self.losses += 1
        self._in_flight.clear()
        for lease in list(self._store._leases):
            complete(self._store.revoke(lease))
        complete(self._store.commit((), (Delete(KEYS.prefix, prefix=True),)))
        self._fold()

    @property
    def is_mute(self) -> bool:
        """Whether its answers are lost."""
        return self._now_s < self.mute_until_s

    def send(self, transaction: Transaction, sender: Sender) -> Committed:
        """Apply a transaction, or leave its sender in doubt.

        Raises:
            UnknownOutcome: the reply is lost, or the transaction is late or lost.
            LeaseLost: an operation's lease has ended.
        """
        if self.is_mute:
            with suppress(LeaseLost):
                self._apply(transaction, sender)
            raise UnknownOutcome
        chance = 0.0 if self.is_reliable else self._rng.random()
        if chance < 0.88:
            return self._apply(transaction, sender)
        if chance < 0.92:
            self._apply(transaction, sender)
        elif chance < 0.98:
            self.postpone(transaction, sender)
        raise UnknownOutcome

    def postpone(self, transaction: Transaction, sender: Sender) -> None:
        """Apply a transaction some time later, or soon when all is reliable."""
        delay_s = self._rng.choice([1.0, 3.0, 12.0]) * self._rng.random()
        self._in_flight.append((self._now_s + delay_s, transaction, sender))

    def apply_now(self, transaction: Transaction) -> None:
        """Apply a transaction that no membership sends, if the coordinator answers."""
        if self.away_until_s:
            return
        complete(self._store.commit(transaction.conditions, transaction.operations))
        self._fold()

    def read(self) -> View:
        """Read the keys as a mirror does at its beginning, which must equal the folded changes.

        A revision is read once: the next reading of it would find the same keys.
        """
        if self._read_at == self._store._revision:
            return self.view
        view = from_listing(KEYS, complete(self._store.read(KEYS.prefix)))
        must(view == self.view, "a listing equals the folded changes")
        listing = complete(self._store.read(KEYS.followed))
        chunks = complete(self._store.read(KEYS.chunk())).items
        mirror = from_listing(KEYS, Listing(listing.revision, (*chunks, *listing.items)))
        must(
            without_unlisted_chunks(mirror) == self.followed_at(listing.revision),
            "a follower's listing equals what it folds",
        )
        self._read_at = self._store._revision
        return view

    def stored(self, key: str) -> Any:
        """Return a key as stored, or None."""
        items = complete(self._store.read(key)).items
        return next((item for item in items if item.key == key), None)

    def _apply(self, transaction: Transaction, sender: Sender) -> Committed:
        before = self.view
        joined = before.nodes.get(sender.node)
        done = complete(self._store.commit(transaction.conditions, transaction.operations))
        if done.succeeded:
            owner = joined.created if joined is not None else 0
            must(owner == sender.created, "a node that was declared gone writes nothing")
            if sender.version:
                known = self._versions.get((sender.node, sender.created), 0)
                must(sender.version >= known, "a node's record never goes back")
                self._versions[sender.node, sender.created] = sender.version
        self._fold()
        if before.secret is not None and self.view.secret is None:
            must(
                set(before.nodes) <= {sender.node},
                "a job's keys are deleted by its last member only",
            )
        return done

    def _fold(self) -> None:
        for changes in self._store._log[len(self._views) - 1 :]:
            before = self._views[-1]
            after = apply(KEYS, before, changes)
            self._views.append(after)
            invariants.check_transition(before, after)
            self._on_change(before, after)
