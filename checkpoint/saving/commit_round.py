"""Commits one save of all ranks, over the job's store: parts are reported, rank 0 decides.

Each rank reports its part, or why there is none. When rank 0 has all parts it publishes the
checkpoint, and then stores the outcome, which the others wait for.

This runs in the background while training computes, so it uses no collective: collectives of one
process group from two threads would meet in different orders on different ranks. The store that
the process group was made with is there, reaches every rank, and keeps what one rank left for
another to find later. Its client serves one call at a time, and training may wait in one, so the
round uses a connection of its own. It looks for a key now and then, at most once a second after a
while: a store's own wait that ends without the key prints warnings.

A store's answer is waited for as long as a rank's sign of life (`store_calls`): the host that
serves it may be gone, too.

A store does not tell that a rank is gone. So each rank counts up a number of its own while the
round lasts. Whoever waits for a rank whose number stands still for `peer_timeout_s` gives up: rank
0 for others, the others for rank 0. Only rank 0 publishes, and it needs all parts: a save that a
rank died in is not committed. If rank 0 gives no sign of life, whether it published is not known.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from keepstep.checkpoint.errors import CheckpointError, RankFailed
from keepstep.checkpoint.saving.store_calls import StoreCalls

_FAILED = b"!"
"""Begins the report of a rank whose part was not written; any other is JSON."""

_FIRST_LOOK_S = 0.005
_LONGEST_LOOK_S = 1.0

_Result = TypeVar("_Result")


class CommitRound:
    """One save's round, for one thread.

    Args:
        store: the job's; None if there is one rank.
        rank: this rank.
        world_size: the number of ranks.
        name: of the attempt; the same on all ranks, and never used again.
        peer_timeout_s: how long to wait for a rank that gives no sign of life.
        calls: makes the calls of the store; once they are given up, nothing is waited for any more.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        name: str,
        peer_timeout_s: float,
        calls: StoreCalls,
    ) -> None:
        self._calls = calls
        self._given_up = calls.given_up
        self._rank = rank
        self._world_size = world_size
        self._peer_timeout_s = peer_timeout_s
        self._own_report = b""
        self._next_beat_s = 0.0
        self._signs_of_life: dict[int, tuple[int, float]] = {}
        self._store: Store | None = None
        if store is not None:
            connection = self._call(lambda: _own_connection(store))
            self._store = PrefixStore(f"keepstep/save/{name}", connection)

    @property
    def tick_s(self) -> float:
        """How often to call `tick` while something else is waited for, in seconds."""
        return self._peer_timeout_s / 6

    def tick(self) -> None:
        """Give a sign of life, if it is time to.

        Raises:
            RankFailed: the store is gone.
            CheckpointError: the save was given up on this rank.
        """
        if self._given_up.is_set():
            raise CheckpointError("the save was given up on this rank, which does not wait longer")
        store, now_s = self._store, time.monotonic()
        if store is not None and now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self.tick_s
            self._call(lambda: store.add(f"alive/{self._rank}", 1))

    def report(self, report: bytes) -> None:
        """Tell rank 0 that this rank's part is written.

        Raises:
            RankFailed: the store is gone.
        """
        self._own_report = report
        self._set(f"part/{self._rank}", report)

    def report_failure(self, reason: str) -> None:
        """Tell rank 0 that this rank has no part. Raises as `report` does."""
        self._set(f"part/{self._rank}", _FAILED + reason.encode())

    def collect(self) -> list[bytes]:
        """On rank 0: wait for all ranks' reports, and return them in order of ranks.

        Raises:
            RankFailed: a rank has no part, or gives no sign of life; or the store is gone.
        """
        reports = [self._own_report]
        for rank in range(1, self._world_size):
            pending = range(rank, self._world_size)
            report = self._await(f"part/{rank}", partial(self._unreported, pending))
            # There may be ten thousand of them, and others wait for this rank's sign of life.
            self.tick()
            if report.startswith(_FAILED):
                raise RankFailed(f"rank {rank}: {report.removeprefix(_FAILED).decode()}")
            reports.append(report)
        return reports

    def conclude(self, error: CheckpointError | None) -> None:
        """On rank 0: tell all ranks the outcome; None if the checkpoint is committed.

        Raises:
            RankFailed: the store is gone.
        """
        text = None if error is None else as_told_by(0, error)
        self._set("outcome", json.dumps(text).encode())

    def await_others(self, has_next: Callable[[], bool]) -> None:
        """On rank 0: wait until the others have seen the outcome.

        They may need rank 0's process for it, which may serve the store and be about to exit.

        Args:
            has_next: whether the next save has begun: then all have seen it.
        """
        if self._world_size == 1:
            return
        try:
            self._await(
                "all_seen", lambda: range(1, self._world_size), self._peer_timeout_s, has_next
            )
        except CheckpointError:
            return  # A rank that has ended needs to know nothing; the outcome stands.

    def outcome(self) -> None:
        """On other ranks: wait for the outcome.

        Raises:
            RankFailed: the save failed, rank 0 gives no sign of life, or the store is gone.
        """
        text = json.loads(self._await("outcome", lambda: (0,)))
        if text is not None:
            raise RankFailed(text)

    def leave(self) -> None:
        """On other ranks: tell that this rank waits for nothing any more."""
        store = self._store
        if store is None:
            return
        try:
            if self._call(lambda: store.add("seen", 1)) == self._world_size - 1:
                self._set("all_seen", b"1")
        except RankFailed:
            return  # Nobody is there to know it.

    def forget(self) -> None:
        """Remove what the round left in the store, once all ranks are through with it."""
        store = self._store
        if store is None:
            return
        names = [f"part/{self._rank}", f"alive/{self._rank}"]
        if self._rank == 0:
            names += ["outcome", "seen", "all_seen"]
        try:
            for name in names:
                self._call(partial(store.delete_key, name))
        except RankFailed:
            return  # It is gone with the store.

    def _unreported(self, ranks: Iterable[int]) -> list[int]:
        store = self._store
        assert store is not None, "there are other ranks"
        unreported = []
        for rank in ranks:
            self.tick()
            if not self._call(partial(store.check, [f"part/{rank}"])):
                unreported.append(rank)
        return unreported

    def _set(self, key: str, value: bytes) -> None:
        store = self._store
        if store is not None:
            self._call(lambda: store.set(key, value.decode()))

    def _await(
        self,
        key: str,
        needed: Callable[[], Sequence[int]],
        limit_s: float | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> bytes:
        """Wait for a key, as long as all needed ranks give signs of life; return its value.

        If `is_over` becomes true, return nothing.
        """
        store = self._store
        assert store is not None, "there are other ranks"
        began_s = time.monotonic()
        next_check_s = began_s + self.tick_s
        look_s = _FIRST_LOOK_S
        while not self._call(partial(store.check, [key])):
            if is_over():
                return b""
            self.tick()
            now_s = time.monotonic()
            if now_s >= next_check_s:
                self._check_alive(store, needed())
                next_check_s = now_s + self.tick_s
            if limit_s is not None and now_s - began_s > limit_s:
                raise RankFailed(f"{key} was not stored within {limit_s} s")
            self._given_up.wait(look_s)
            look_s = min(look_s * 1.5, _LONGEST_LOOK_S, self.tick_s)
        return self._call(partial(store.get, key))

    def _check_alive(self, store: Store, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.tick()
            count = self._call(partial(store.add, f"alive/{rank}", 0))
            now_s = time.monotonic()
            last_count, since_s = self._signs_of_life.get(rank, (-1, now_s))
            if count != last_count:
                self._signs_of_life[rank] = (count, now_s)
            elif now_s - since_s > self._peer_timeout_s:
                unknown = "; it may have been committed: see `keepstep ckpt ls`" if not rank else ""
                raise RankFailed(
                    f"rank {rank} gave no sign of life for {self._peer_timeout_s:g} s while the "
                    f"checkpoint was stored{unknown}"
                )

    def _call(self, call: Callable[[], _Result]) -> _Result:
        try:
            return self._calls.call(call)
        except RuntimeError as error:
            raise _store_is_gone(error) from error


def as_told_by(rank: int, error: CheckpointError) -> str:
    """Return an error as other ranks are told it: with the rank that it is of."""
    return str(error) if isinstance(error, RankFailed) else f"rank {rank}: {error}"


def _store_is_gone(error: RuntimeError) -> RankFailed:
    return RankFailed(
        f"the job's store does not answer ({str(error).splitlines()[0]:.200}): the rank or the "
        "agent that serves it has ended"
    )


def _own_connection(store: Store) -> Store:
    """Return a store that does not wait until the users of this one have what they wait for."""
    innermost = store
    while isinstance(innermost, PrefixStore):
        innermost = innermost.underlying_store
    # Others wait without keeping further callers out. torch's type stubs lack `clone`.
    return cast(Any, store).clone() if isinstance(innermost, TCPStore) else store
