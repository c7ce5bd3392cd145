"""Defines the messages between a conversion and its worker processes: a line of JSON each.

The conversion sends a `Start`, then numbers of parts; it closes the worker's input when all is
done. The worker answers each number with any number of counts of bytes, and an end; or with an
error, after which it is gone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

from keepstep.checkpoint import errors
from keepstep.checkpoint.convert.write.request import ConversionRequest
from keepstep.checkpoint.convert.write.universal import Task
from keepstep.checkpoint.errors import CheckpointError

_KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        errors.CheckpointDamaged,
        errors.CheckpointExists,
        errors.CheckpointMissing,
        errors.CheckpointTooNew,
        errors.FormatUnsupported,
        errors.LayoutMismatch,
        errors.RulesInvalid,
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The input of a worker process.

    Attributes:
        parent: the process that started it; the worker ends with it.
        request: the checkpoint to read, and the conversion to apply.
        seen: the conversion's findings there; see `seen_in`.
        url: where to write.
        attempt_name: as for `UniversalParts`.
        memory_nbytes: how much memory tensors may take in this process.
        part_nbytes: as for `UniversalParts`.
    """

    parent: int
    request: ConversionRequest
    seen: str
    url: str
    attempt_name: str
    memory_nbytes: int
    part_nbytes: int

    def encode(self) -> str:
        """Return the line that says this."""
        return json.dumps(
            {
                "parent": self.parent,
                "request": self.request.encode(),
                "seen": self.seen,
                "url": self.url,
                "attempt_name": self.attempt_name,
                "memory_nbytes": self.memory_nbytes,
                "part_nbytes": self.part_nbytes,
            }
        )

    @classmethod
    def decode(cls, line: str) -> Self:
        """Return what `encode` made this line of."""
        encoded = json.loads(line)
        return cls(**{**encoded, "request": ConversionRequest.decode(encoded["request"])})


@dataclass(frozen=True, slots=True)
class PartTask:
    """One part, and what is to be done to it."""

    task: Task
    number: int

    def encode(self) -> str:
        """Return the line that says this."""
        return json.dumps([self.task, self.number])

    @classmethod
    def decode(cls, line: str) -> Self:
        """Return what `encode` made this line of."""
        task, number = json.loads(line)
        return cls(Task(task), number)


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer: bytes that it has done, that a part is done, or an error."""

    nbytes: int = 0
    is_done: bool = False
    error: CheckpointError | None = None

    def encode(self) -> str:
        """Return the line that says this."""
        if self.error is not None:
            return json.dumps({"error": [type(self.error).__name__, str(self.error)]})
        return json.dumps({"nbytes": self.nbytes, "done": self.is_done})

    @classmethod
    def decode(cls, line: str) -> Self:
        """Return what `encode` made this line of."""
        encoded = json.loads(line)
        if "error" in encoded:
            kind, text = encoded["error"]
            return cls(error=_KINDS.get(kind, CheckpointError)(text))
        return cls(encoded["nbytes"], encoded["done"])
