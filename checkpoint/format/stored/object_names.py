"""Names of a stored checkpoint's directories and objects, as FORMAT.md specifies them. Pure."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.layout.boxes import Json

MANIFEST = "manifest.json"
DOCUMENTS = "documents.json"
CHUNKS = "chunks.json"
ROOT = "zarr.json"
REMOVED = "removed.json"
NEWEST = "newest.json"
PROBE_PREFIX = "probe-"
MODEL = "model"
PACKS = "packs"
PARTS = "parts"
_MAX_NAME_NBYTES = 255
_STEP_NAME = re.compile(r"step-(\d{8})-(\d{6})")
_ATTEMPT_NAME = re.compile(r"[0-9a-z][0-9a-z-]{0,63}")
_ATTEMPT_PREFIX = "attempt-"
_PART_NAME = re.compile(r"parts/(\d{6,9})\.json")


@dataclass(frozen=True, slots=True)
class StoredStep:
    """The name of a checkpoint: completed steps, and the generation that wrote it."""

    step: int
    generation: int

    def __post_init__(self) -> None:
        # More digits would sort wrongly, and `parse` would not accept them.
        if not (0 <= self.step < 10**8 and 0 <= self.generation < 10**6):
            raise ValueError(
                f"step {self.step} or generation {self.generation} is out of the format's range"
            )

    @classmethod
    def of(cls, step: int, generation: int) -> StoredStep:
        """Return the name of a checkpoint that a caller saves.

        Raises:
            CheckpointError: a number is no integer, or out of the format's range.
        """
        try:
            return cls(whole_number("step", step), whole_number("generation", generation))
        except ValueError as error:
            raise CheckpointError(
                f"{error}; give a step from 0 to {10**8 - 1:,}, and a generation from 0 to "
                f"{10**6 - 1:,}"
            ) from None

    @property
    def directory(self) -> str:
        """Name of the directory under the job's URL; each generation has its own."""
        return f"step-{self.step:08d}-{self.generation:06d}"

    @classmethod
    def parse(cls, name: str) -> StoredStep | None:
        """Return the step that a directory is named after, or None if it is not a step's."""
        match = _STEP_NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2])) if match else None


def whole_number(name: str, value: SupportsIndex) -> int:
    """Return an argument that must be an integer, of Python, NumPy or a tensor, as Python's.

    Raises:
        CheckpointError: it is none, or a bool, which names no step.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise CheckpointError(f"{name}={value!r} is no integer; give {name} as an int")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to write a checkpoint: it writes into a directory of its own, then the manifest.

    All writers of an attempt give the same name, of digits, small letters and hyphens; no other
    attempt ever has it. So a writer that is late changes nothing of another attempt.
    """

    stored: StoredStep
    name: str

    def __post_init__(self) -> None:
        if not _ATTEMPT_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} cannot name an attempt to write a checkpoint")

    @property
    def directory(self) -> str:
        """Name of the attempt's directory under the job's URL."""
        return f"{self.stored.directory}/{_ATTEMPT_PREFIX}{self.name}"

    @staticmethod
    def is_directory(name: str) -> bool:
        """Return whether a directory below a step's is named as an attempt's is."""
        return bool(
            name.startswith(_ATTEMPT_PREFIX)
            and _ATTEMPT_NAME.fullmatch(name.removeprefix(_ATTEMPT_PREFIX))
        )


def chunk_name(key: str, place: Sequence[int]) -> str:
    """Return a chunk's object name, by Zarr's default chunk key encoding."""
    return f"{key}/{'.'.join(['c', *map(str, place)])}"


def part_name(writer: int) -> str:
    """Return the name of a writer's listing."""
    return f"{PARTS}/{writer:06d}.json"


def part_number(name: str) -> int | None:
    """Return the number of the writer whose listing has this name; None if it is no listing's."""
    match = _PART_NAME.fullmatch(name)
    return int(match[1]) if match and part_name(int(match[1])) == name else None


def pack_name(writer: int, number: int) -> str:
    """Return the name of one of a writer's packs."""
    return f"{PACKS}/{writer:06d}-{number:04d}"


def is_object_name(name: Json) -> bool:
    """Return whether an object of a checkpoint can have this name, below its directory."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and all(
            part not in ("", ".", "..") and len(part.encode()) <= _MAX_NAME_NBYTES
            for part in name.split("/")
        )
    )
