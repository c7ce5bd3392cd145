"""One case: files are changed and read, and only errors of keepstep come of it."""

from __future__ import annotations

import json
import random as random_module
import shutil
from collections.abc import Mapping
from pathlib import Path

from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.errors import CheckpointError, FormatUnsupported
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.location import Format
from keepstep.checkpoint.format.layout.source import BoxRequest, Source
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.fuzz.mutations import mutated
from tests.opened_checkpoints import open_foreign

# Whoever reads gives the memory for what is read, so absurd tensors are read in part.
_WHOLE_NBYTES = 2**22
_MOST_NBYTES = 2**25


class Seed:
    """A checkpoint in a directory of a worker's own, which cases change and restore."""

    def __init__(self, name: str, origin: Path, place: Path) -> None:
        shutil.copytree(origin, place)
        self._place = place
        self._form = name.partition(",")[0]
        self.files: Mapping[str, bytes] = {
            path.relative_to(place).as_posix(): path.read_bytes()
            for path in sorted(place.rglob("*"))
            if path.is_file()
        }

    @property
    def place(self) -> Path:
        """The directory."""
        return self._place

    def change(self, seed: str) -> dict[str, bytes | None]:
        """Change files as the seed says; return the changes."""
        changes = mutated(self.files, random_module.Random(seed))
        for name, content in changes.items():
            self._write(name, content)
        return changes

    def restore(self, changes: Mapping[str, bytes | None]) -> None:
        """Undo changes."""
        for name in changes:
            self._write(name, self.files.get(name))

    def _write(self, name: str, content: bytes | None) -> None:
        path = self._place / name
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(content)

    def read(self) -> str:
        """Read whatever can be read; return `read` or `refused`."""
        try:
            if self._form == Format.UNIVERSAL:
                self._read_own()
            else:
                read_all(self._opened())
        except CheckpointError:
            return "refused"
        return "read"

    def _opened(self) -> ForeignCheckpoint:
        # A file is opened by its name, a folder by its own.
        alone = [path for path in self._place.iterdir() if path.is_file()]
        is_file = len(self.files) == 1 and len(alone) == 1
        url = str(alone[0] if is_file else self._place)
        try:
            return open_foreign(url)
        except FormatUnsupported:
            # What is not recognized any more is opened as what it was.
            return open_foreign(url, Format(self._form))

    def _read_own(self) -> None:
        source = StoredCheckpoint.open(open_storage(str(self._place)))
        json.dumps(source.documents)
        source.verify()
        read_all(source)


def read_all(source: Source) -> None:
    """Read every tensor of a checkpoint, of large ones a part, and its documents."""
    json.dumps(source.documents)
    left = _MOST_NBYTES
    for key, spec in source.tensors.items():
        itemsize = numpy_dtype(spec.dtype).itemsize
        box = Box.whole(spec.shape)
        if box.size * itemsize > _WHOLE_NBYTES:
            shape = tuple(min(extent, 3) for extent in spec.shape)
            if len(shape) > 12:
                continue
            box = Box((0,) * len(shape), shape)
        left -= box.size * itemsize
        if left < 0:
            return
        source.read([BoxRequest(key, box, memoryview(bytearray(box.size * itemsize)))])
