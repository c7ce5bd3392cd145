"""Defines what diagnosis concludes: verdicts, for people and for the enforcement policy.

A verdict names the root cause. A rank that only waits for another waiting rank is never its
subject.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Syndrome(StrEnum):
    """The kind of fault. The first four are C4D's (arXiv 2406.04594)."""

    COMMUNICATION_HANG = "communication hang"
    """All ranks began the operation, and it does not end."""
    NON_COMMUNICATION_HANG = "non-communication hang"
    """A rank never called the operation in which the others wait."""
    COMMUNICATION_SLOW = "communication slow"
    NON_COMMUNICATION_SLOW = "non-communication slow"
    LOAD_IMBALANCE = "load imbalance"
    """Ranks of equal role take unequal time, and nothing shows that hardware is the cause: stages
    with more layers, experts with more tokens."""
    MISMATCH = "mismatched collectives"
    """Ranks call different operations, or with different sizes: this leads to a deadlock."""
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
    """The advice that a verdict gives."""

    OBSERVE = "observe"
    ALERT = "alert"
    RESTART_WORKER = "restart worker"
    REPLACE_NODE = "replace node"


_REMEDIES: Mapping[Syndrome, str] = {
    Syndrome.COMMUNICATION_HANG: "look at the network between these ranks with `keepstep doctor`",
    Syndrome.NON_COMMUNICATION_HANG: "look at the rank's stacks",
    Syndrome.COMMUNICATION_SLOW: "look at the network with `keepstep doctor`",
    Syndrome.NON_COMMUNICATION_SLOW: "look at the node's processors and GPUs, and at what else "
    "runs there",
    Syndrome.LOAD_IMBALANCE: "look at how layers, experts and samples are distributed",
    Syndrome.MISMATCH: "mend the script: the stacks show where its ranks part",
    Syndrome.DEAD_PROCESS: "look at the last lines of the rank's output, and at the kernel's log",
    Syndrome.DATA_STALL: "look at the data loader and the storage that it reads",
    Syndrome.CHECKPOINT_STALL: "look at the storage that checkpoints go to",
    Syndrome.GARBAGE_COLLECTION: "collect garbage on all ranks in the same step",
    Syndrome.THROTTLED: "look at the node's cooling, power limits and cgroup",
    Syndrome.MEMORY_SHORT: "find what takes the node's memory, before the kernel kills a rank",
    Syndrome.DEVICE_ERROR: "look at the device with `nvidia-smi -q` and `dmesg`",
    Syndrome.LOSS_NOT_FINITE: "go back to an earlier checkpoint, or reject such steps",
    Syndrome.LOSS_SPIKE: "look at the loss curve and at this step's batch",
    Syndrome.SILENT_CORRUPTION: "take the node out, and check it with `keepstep doctor`",
}
"""Advice for each syndrome about which nothing can be done automatically."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom a verdict names.

    Args:
        kind: "rank", "node", "link", "job", or "group" for ranks among which the culprit is not
            known.
        ranks: global ranks: one for a rank, several for a node or group, (sender, receiver) for a
            link; empty for the job.
        node: the node's name, if kind is "node" or all ranks are on one node; otherwise empty.
    """

    kind: str
    ranks: tuple[int, ...]
    node: str = ""

    def __str__(self) -> str:
        if self.kind == "job":
            return "the whole job"
        rank_names = (
            " -> ".join(map(str, self.ranks))
            if self.kind == "link"
            else ", ".join(map(str, self.ranks))
        )
        location = f" on {self.node}" if self.node else ""
        return (
            f"node {self.node} (ranks {rank_names})"
            if self.kind == "node"
            else f"{self.kind} {rank_names}{location}"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Names a subject, its syndrome, and since when.

    Args:
        subject: the root cause.
        syndrome: the kind of fault.
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

    @property
    def instruction(self) -> str:
        """Advice for a person, in one sentence."""
        ranks = ", ".join(map(str, self.subject.ranks[:4]))
        match self.advice:
            case Advice.OBSERVE:
                return "nothing yet: it may end by itself"
            case Advice.RESTART_WORKER:
                return (
                    f"kill the process of rank {ranks}; `keepstep monitor --act restart` does it "
                    "by itself"
                )
            case Advice.REPLACE_NODE if self.subject.node:
                return (
                    f"take {self.subject.node} out: `keepstep evict {self.subject.node}`; "
                    "`keepstep monitor --act replace` does it by itself"
                )
        remedy = _REMEDIES[self.syndrome]
        if self.cost_s_per_step == math.inf and ranks:
            return f"{remedy}; to end the standstill, kill the process of rank {ranks}"
        return remedy

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON; an infinite cost becomes null."""
        encoded = asdict(self)
        encoded["cost_s_per_step"] = (
            None if self.cost_s_per_step == math.inf else self.cost_s_per_step
        )
        return encoded

    @classmethod
    def from_json(cls, encoded: Mapping[str, Any]) -> Verdict:
        """Return the verdict that `to_json` encoded."""
        subject = encoded["subject"]
        cost_s = encoded["cost_s_per_step"]
        return cls(
            subject=Subject(subject["kind"], tuple(subject["ranks"]), subject["node"]),
            syndrome=Syndrome(encoded["syndrome"]),
            since_s=encoded["since_s"],
            evidence=tuple(encoded["evidence"]),
            confidence=encoded["confidence"],
            cost_s_per_step=math.inf if cost_s is None else cost_s,
            advice=Advice(encoded["advice"]),
        )
