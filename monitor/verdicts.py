"""What diagnosis concludes, as values that people and policies read.

A verdict names the root of a trouble, not who suffers from it; whoever only waits for one who waits is innocent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Syndrome(StrEnum):
    """What is the matter. The first four are C4D's (arXiv 2406.04594)."""

    COMMUNICATION_HANG = "communication hang"
    """All ranks began the operation, and it does not end."""
    NON_COMMUNICATION_HANG = "non-communication hang"
    """A rank never arrived at the operation in which the others wait."""
    COMMUNICATION_SLOW = "communication slow"
    NON_COMMUNICATION_SLOW = "non-communication slow"
    MISMATCH = "mismatched collectives"
    """Ranks call different operations, or the same with different sizes: a deadlock in waiting."""
    DEAD_PROCESS = "dead process"
    DATA_STALL = "data stall"
    CHECKPOINT_STALL = "checkpoint stall"
    GARBAGE_COLLECTION = "garbage collection"
    THROTTLED = "throttled processor"
    MEMORY_SHORT = "memory about to run out"
    DEVICE_ERROR = "device error"
    LOSS_NOT_FINITE = "loss not finite"
    LOSS_SPIKE = "loss spike"
    SILENT_CORRUPTION = "silent data corruption"


class Advice(StrEnum):
    """What to do about it."""

    OBSERVE = "observe"
    ALERT = "alert"
    RESTART_WORKER = "restart worker"
    REPLACE_NODE = "replace node"


@dataclass(frozen=True, slots=True)
class Subject:
    """Who it is: ranks (one for a rank, several for a node or a group that disagrees), or a link as `ranks = (from, to)`.

    Args:
        kind: "rank", "node", "link", "job", or "group" for ranks of which nothing tells which it is.
        ranks: global ranks; empty for the whole job.
        node: the node's name, where kind is "node" or all ranks are on one.
    """

    kind: str
    ranks: tuple[int, ...]
    node: str = ""

    def __str__(self) -> str:
        if self.kind == "job":
            return "the whole job"
        named = (
            " -> ".join(map(str, self.ranks))
            if self.kind == "link"
            else ", ".join(map(str, self.ranks))
        )
        place = f" on {self.node}" if self.node else ""
        return (
            f"node {self.node} (ranks {named})"
            if self.kind == "node"
            else f"{self.kind} {named}{place}"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who has what since when.

    Args:
        subject: the root.
        syndrome: what it has.
        since_s: when it began, by the job's clock.
        evidence: short sentences with numbers, for people.
        confidence: 0 to 1.
        cost_s_per_step: seconds that every step takes longer because of it; infinite for a hang.
        advice: what to do.
    """

    subject: Subject
    syndrome: Syndrome
    since_s: float
    evidence: tuple[str, ...]
    confidence: float
    cost_s_per_step: float
    advice: Advice

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON; an infinite cost as null."""
        told = asdict(self)
        told["cost_s_per_step"] = (
            None if self.cost_s_per_step == float("inf") else self.cost_s_per_step
        )
        return told

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Verdict:
        """Return what `to_json` told."""
        subject = told["subject"]
        return cls(
            Subject(subject["kind"], tuple(subject["ranks"]), subject["node"]),
            Syndrome(told["syndrome"]),
            told["since_s"],
            tuple(told["evidence"]),
            told["confidence"],
            float("inf") if told["cost_s_per_step"] is None else told["cost_s_per_step"],
            Advice(told["advice"]),
        )
