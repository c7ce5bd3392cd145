"""The shares of a checkpoint's plan that this node makes as a planner, for others to ask for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.checkpoint.errors import SnapshotUnavailable

# How long one request for a share that is not planned yet waits; the client asks again. An attempt
# that was given up notices it in between.
_PENDING_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedShare:
    """The plan of the tensors that fall to one planner.

    Attributes:
        digest: of everything that it was made of.
        plans: each rank's `WriterPlan` as JSON, of the ranks that write any chunk of these tensors.
        tensors: the `TensorPlan` as JSON.
    """

    digest: str
    plans: Mapping[int, bytes]
    tensors: bytes


class PlanShares:
    """The shares of the newest attempt, kept until the next begins. Thread-safe.

    An attempt ends before its manifest is written, for which its tensors are still needed.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._attempt = ""
        self._replaced = ""
        self._shares: Mapping[int, PlannedShare] | None = None
        self._failure: Exception | None = None
        self._is_closing = False

    def begin(self, attempt: str) -> None:
        """Forget the attempt before; the shares of this one are going to be planned."""
        with self._changed:
            if attempt != self._attempt:
                self._replaced, self._attempt = self._attempt, attempt
            self._shares = self._failure = None
            self._changed.notify_all()

    def complete(self, attempt: str, shares: Mapping[int, PlannedShare]) -> None:
        """Answer requests for an attempt's shares, by planner, unless another has begun."""
        with self._changed:
            if attempt == self._attempt:
                self._shares = shares
                self._changed.notify_all()

    def fail(self, attempt: str, failure: Exception) -> None:
        """Refuse requests for an attempt's shares, unless another has begun."""
        with self._changed:
            if attempt == self._attempt:
                self._failure = failure
                self._changed.notify_all()

    def get(self, attempt: str, planner: int) -> PlannedShare | None:
        """Return an attempt's share; None if it has not been planned after a while.

        It may also be that this node's agent has not begun the attempt yet.

        Raises:
            SnapshotUnavailable: it could not be planned, is not planned by this node, or another
                attempt has begun.
        """

        def is_settled() -> bool:
            is_planned = self._shares is not None or self._failure is not None
            return (
                self._is_closing
                or attempt == self._replaced
                or (attempt == self._attempt and is_planned)
            )

        with self._changed:
            if not self._changed.wait_for(is_settled, _PENDING_POLL_S):
                return None
            if self._is_closing or attempt == self._replaced:
                raise SnapshotUnavailable(f"attempt {attempt} to store a snapshot is over here")
            if self._failure is not None:
                raise SnapshotUnavailable(
                    f"planner {planner} could not plan its share: "
                    f"{type(self._failure).__name__}: {self._failure}"
                ) from self._failure
            share = None if self._shares is None else self._shares.get(planner)
        if share is None:
            raise SnapshotUnavailable(
                f"planner {planner} of attempt {attempt} is not on this node; the nodes do not "
                "agree on who holds the snapshot"
            )
        return share

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
