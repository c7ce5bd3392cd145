"""Holds what this node's server has for the servers that plan a checkpoint with it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.snapshot.memory.messages import PlanStage, ReadPlan

# How long one request for what is not there yet waits; the client asks again. An attempt that was
# given up notices it in between.
_PENDING_POLL_S = 1.0


class PlanOutbox:
    """The messages of the newest attempt, kept until the next begins. Thread-safe.

    An attempt ends before its manifest is written, for which its last messages are still needed.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._attempt = ""
        self._replaced = ""
        self._posted: dict[PlanStage, Mapping[int | None, bytes]] = {}
        self._failure: Exception | None = None
        self._is_closing = False

    def begin(self, attempt: str) -> None:
        """Forget the attempt before; this one's messages are going to be posted."""
        with self._changed:
            if attempt != self._attempt:
                self._replaced, self._attempt = self._attempt, attempt
            self._posted, self._failure = {}, None
            self._changed.notify_all()

    def post(self, attempt: str, stage: PlanStage, messages: Mapping[int | None, bytes]) -> None:
        """Answer requests at a stage of an attempt, by holder, unless another has begun."""
        with self._changed:
            if attempt == self._attempt:
                self._posted[stage] = messages
                self._changed.notify_all()

    def fail(self, attempt: str, failure: Exception) -> None:
        """Refuse requests for what an attempt has not posted, unless another has begun."""
        with self._changed:
            if attempt == self._attempt:
                self._failure = failure
                self._changed.notify_all()

    def read_plan(self, request: ReadPlan) -> bytes | None:
        """Return the message that is asked for; None if it has not been posted after a while.

        It may also be that this node's agent has not begun the attempt yet.

        Raises:
            SnapshotUnavailable: this node could not plan, has nothing for the holder, or has begun
                another attempt.
        """
        attempt, stage = request.attempt, request.stage

        def is_settled() -> bool:
            return (
                self._is_closing
                or attempt == self._replaced
                or (attempt == self._attempt and (stage in self._posted or bool(self._failure)))
            )

        with self._changed:
            if not self._changed.wait_for(is_settled, _PENDING_POLL_S):
                return None
            if self._is_closing or attempt == self._replaced:
                raise SnapshotUnavailable(f"attempt {attempt} to store a snapshot is over here")
            messages, failure = self._posted.get(stage), self._failure
        if messages is None:
            # What another server has refused is named already.
            is_named = isinstance(failure, SnapshotUnavailable)
            kind = "" if is_named else f"its share was not planned: {type(failure).__name__}: "
            raise SnapshotUnavailable(f"{kind}{failure}") from failure
        if request.holder not in messages:
            raise SnapshotUnavailable(
                f"attempt {attempt} has no {stage} for holder {request.holder}; the nodes do not "
                "agree on who holds the snapshot"
            )
        return messages[request.holder]

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
