"""Manifest of a stored checkpoint: its objects, its format, and what readers must know. Pure.

Whatever was read from storage is checked here before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import crc32c

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointTooNew
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.stored.object_names import (
    Attempt,
    StoredStep,
    is_object_name,
    part_number,
)
from keepstep.checkpoint.format.stored.stored_json import decode, encode, is_count

VERSION = 1
"""The number of the format that this release reads and writes."""

COMPRESSED_CELLS = "compressed-cells"
"""The feature of a checkpoint that has compressed cells."""

FEATURES = frozenset({COMPRESSED_CELLS})
"""The features that this release knows, of those that a manifest may require (FORMAT.md)."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object's entry: name under the attempt's directory, size in bytes, crc32c."""

    name: str
    nbytes: int
    crc32c: int

    @property
    def part_number(self) -> int | None:
        """The number of the writer whose listing this is; None if it is no listing."""
        return part_number(self.name)

    @property
    def is_part(self) -> bool:
        """Whether the object is a writer's listing."""
        return self.part_number is not None

    def to_json(self) -> Json:
        """Return the object as a JSON list."""
        return [self.name, self.nbytes, self.crc32c]

    @classmethod
    def from_json(cls, data: Json) -> StoredObject:
        """Parse what `to_json` returned.

        Raises:
            CheckpointDamaged: the data has another form.
        """
        if not (isinstance(data, list) and len(data) == 3 and isinstance(data[0], str)):
            raise CheckpointDamaged(f"not an object's entry: {data!r:.200}")
        name, nbytes, crc = data
        if not (is_count(nbytes) and is_count(crc) and crc < 2**32 and is_object_name(name)):
            raise CheckpointDamaged(f"not an object's entry: {data!r:.200}")
        return cls(name, nbytes, crc)


@dataclass(frozen=True, slots=True)
class PartEntry(StoredObject):
    """A writer's listing. `content` is the sum of the hashes of its chunks, for the digest."""

    content: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """The object that makes a directory a checkpoint.

    `attempt` is the name of the attempt that wrote the checkpoint. `objects` are the parts, the
    root metadata and the documents. `required` are the features that a reader must know.
    """

    step: int
    generation: int
    attempt: str
    objects: tuple[StoredObject, ...]
    required: tuple[str, ...] = ()

    @property
    def directory(self) -> str:
        """Name of the directory, under the job's URL, that has the checkpoint's objects."""
        return Attempt(StoredStep(self.step, self.generation), self.attempt).directory

    def encode(self) -> bytes:
        """Return the manifest as JSON, with its own checksum."""
        content = {
            "format": VERSION,
            "required": list(self.required),
            "step": self.step,
            "generation": self.generation,
            "attempt": self.attempt,
            "objects": [item.to_json() for item in self.objects],
        }
        return encode({**content, "crc32c": crc32c.crc32c(encode(content))})

    @classmethod
    def decode(cls, data: bytes, where: str) -> Manifest:
        """Parse what `encode` returned.

        Raises:
            CheckpointDamaged: the data has another form.
            CheckpointTooNew: the format is newer than this release, or requires a feature that
                this release does not know.
        """
        content = decode(data, where)
        try:
            checksum = content.pop("crc32c", None)
            if checksum not in (None, crc32c.crc32c(encode(content))):
                raise ValueError("it does not match its checksum")
            # Nothing else is known of a newer format, not even where it has its features.
            check_version(content["format"], where)
            if checksum is None:
                raise ValueError("it has no checksum")
            required = content["required"]
            check_required(required, where)
            objects = tuple(StoredObject.from_json(item) for item in content["objects"])
            step, generation = content["step"], content["generation"]
            if not (is_count(step) and is_count(generation)):
                raise ValueError(f"step {step!r}, generation {generation!r}")
            attempt = Attempt(StoredStep(step, generation), content["attempt"]).name
            if len({item.name for item in objects}) != len(objects):
                raise ValueError("it lists an object twice")
            return cls(step, generation, attempt, objects, tuple(required))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise CheckpointDamaged(f"{where} is not a manifest: {error!r}") from error

    def part_names(self) -> dict[int, str]:
        """Return the names of the parts by their numbers."""
        return {
            number: item.name for item in self.objects if (number := item.part_number) is not None
        }

    def find(self, name: str) -> StoredObject | None:
        """Return the entry of an object, if the manifest has one."""
        return next((item for item in self.objects if item.name == name), None)


def check_version(version: Any, where: str) -> None:
    """Check that this release reads the format of this number.

    Raises:
        CheckpointTooNew: it does not.
        ValueError: it is no number of a format.
    """
    if not is_count(version) or version < 1:
        raise ValueError(f"format {version!r}")
    if version > VERSION:
        raise CheckpointTooNew(
            f"{where} has format {version}, this keepstep reads up to {VERSION}; use the release "
            "that wrote it, or a later one"
        )


def check_required(required: Any, where: str) -> None:
    """Check that this release knows the features that a checkpoint requires.

    Raises:
        CheckpointTooNew: it does not.
        ValueError: they are no list of names.
    """
    if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        raise ValueError(f"required features {required!r:.200}")
    if unknown := [name for name in required if name not in FEATURES]:
        raise CheckpointTooNew(
            f"{where} requires {', '.join(map(repr, unknown))}, which this keepstep does not know; "
            "use the release that wrote it, or a later one"
        )
