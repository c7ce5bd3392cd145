"""Reads files of `torch.save` whose objects only the code that they name can make.

Only that code can read the parts that keepstep's reader leaves out, such as tensors in objects. It
runs in a process of its own (`trusted_load`), which writes the tensors and plain values that it
finds to a file of `torch.save`; that file is read like any other. Nothing runs unless a user says
that the file is to be trusted.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from keepstep.checkpoint.convert.read.files import open_files
from keepstep.checkpoint.convert.read.foreign_source import LeftOut
from keepstep.checkpoint.convert.read.pickled_tensors import (
    dtype_name,
    storage_kind,
    torch_constructors,
)
from keepstep.checkpoint.convert.read.pickled_values import Global
from keepstep.checkpoint.convert.read.torch_file import names_in_torch_file
from keepstep.checkpoint.convert.read.zip_checksums import check_zip
from keepstep.checkpoint.errors import CheckpointError, FormatUnsupported
from keepstep.checkpoint.format.layout.location import Format, Location
from keepstep.checkpoint.format.stored.urls import parse_url
from keepstep.processes import module_command

_MODULE = "keepstep.checkpoint.convert.write.trusted_load"
_FILES = (Format.TORCH_SAVE, Format.LIGHTNING)
TENSORS, LEFT_OUT = "tensors.pt", "left_out.json"


@dataclass(frozen=True, slots=True)
class Trusted:
    """The objects that the code of a file has made.

    Attributes:
        location: where its tensors and plain values are now.
        left_out: its other objects.
    """

    location: Location
    left_out: tuple[LeftOut, ...]


def code_in(location: Location) -> tuple[str, ...]:
    """Return the names of what loading a checkpoint with PyTorch alone would import and call.

    Nothing is imported or called to find out. Names that keepstep's reader knows as plain data and
    tensors are not among them. Empty if the checkpoint is no file of `torch.save`.

    Raises:
        CheckpointDamaged: the file contradicts itself.
        FormatUnsupported: it was written before torch 1.6.
    """
    if location.format not in _FILES:
        return ()
    files = open_files(location.url)
    name = location.file_name or files.names[0]
    names = names_in_torch_file(files.file(f"{location.directory}{name}").whole)
    return tuple(sorted(name for name in names - torch_constructors().keys() if not _is_data(name)))


@contextmanager
def run_code(location: Location) -> Iterator[Trusted]:
    """Load a file with PyTorch in another process, which runs the code that it names.

    The file is in that process's memory, and what it has made is in a temporary file meanwhile.

    Raises:
        FormatUnsupported: it is no file of `torch.save` on a disk.
        CheckpointDamaged: it does not match its checksums, which PyTorch does not compare.
        CheckpointError: the process failed.
    """
    path = parse_url(location.url).local_path
    if location.format not in _FILES or path is None or not path.is_file():
        raise FormatUnsupported(
            f"{location.url}: only a file of torch.save on a disk can be loaded by the code that "
            "it names; leave out --trust"
        )
    files = open_files(location.url)
    check_zip(files.file(files.names[0]).whole, lambda nbytes: None)
    with TemporaryDirectory(prefix="keepstep-trusted-") as directory:
        done = subprocess.run(
            module_command(_MODULE, str(path), directory),
            stdin=subprocess.DEVNULL,
            # What it prints is no part of what the command prints, which may be JSON.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            reason = done.stderr.strip().rpartition("\n")[2]
            raise CheckpointError(
                f"{location.url}: the code that it names could not load it: {reason}; run this "
                "where the modules are that wrote it"
            )
        listed = json.loads((Path(directory) / LEFT_OUT).read_text(encoding="utf-8"))
        yield Trusted(
            replace(location, url=str(Path(directory) / TENSORS), directory="", file_name=TENSORS),
            tuple(LeftOut(name, reason) for name, reason in listed),
        )


def _is_data(name: str) -> bool:
    """Return whether a name is a data type or a storage of torch."""
    named = Global(name)
    try:
        return dtype_name(named) is not None or storage_kind(named) is not None
    except ValueError:
        return False
