"""Writes the model of a checkpoint as files of safetensors, alone or in a Hugging Face folder.

The format is described at https://github.com/huggingface/safetensors; the folder's index is what
`transformers` writes. Written by ourselves because the library takes all of a file's tensors in
memory at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import crc32c

from keepstep.checkpoint.convert.read.files import open_files
from keepstep.checkpoint.convert.read.safetensors_file import SAFETENSORS_NAMES, read_safetensors
from keepstep.checkpoint.convert.write.boxes_in_order import (
    block_nbytes,
    checksum_of,
    read_in_order,
)
from keepstep.checkpoint.convert.write.file_target import new_file
from keepstep.checkpoint.convert.write.selection import MODEL
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointExists, LayoutMismatch
from keepstep.checkpoint.format.layout.described import tie_of
from keepstep.checkpoint.format.layout.documents import CONFIG, TIED
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.source import Source, TensorSpec
from keepstep.checkpoint.format.stored.storage import open_storage

SHARD_NBYTES = 5 * 10**9
"""The most bytes of tensors in one file of a folder, unless one tensor alone has more."""

_NOTHING: Mapping[str, bytes] = MappingProxyType({})
_INDEX = "model.safetensors.index.json"
_ALIGNMENT = 8

Report = Callable[[int], None]


def write_safetensors(source: Source, url: str, *, memory_nbytes: int, report: Report) -> None:
    """Write a model as one file, and compare it with what was read.

    Args:
        source: a checkpoint with nothing but a model.
        url: the file.
        memory_nbytes: how much memory tensors may take.
        report: called with bytes of tensors that were written.

    Raises:
        CheckpointExists: there is such a file.
        LayoutMismatch: a data type is none of the format's.
        CheckpointDamaged: what was written is not what was read.
    """
    names = _model_names(source)
    _write_file(source, url, names, memory_nbytes, report)


def write_hugging_face(
    source: Source,
    url: str,
    *,
    memory_nbytes: int,
    report: Report,
    shard_nbytes: int = SHARD_NBYTES,
    beside: Mapping[str, bytes] = _NOTHING,
) -> None:
    """Write a model as a folder of files of safetensors, an index, and config.json if it is known.

    Args:
        source: a checkpoint with nothing but a model.
        url: the folder.
        memory_nbytes: how much memory tensors may take.
        report: called with bytes of tensors that were written.
        shard_nbytes: the most bytes of tensors in one file, unless one tensor alone has more.
        beside: further files of the folder, such as a tokenizer's, by name.

    Raises:
        CheckpointExists: the folder has one of the files, and not from the same conversion that
            was interrupted, or it has weights of another model.
        LayoutMismatch: a data type is none of the format's.
        CheckpointDamaged: what was written is not what was read.
    """
    names = _model_names(source)
    shards = list(_shards(source.tensors, names, shard_nbytes))
    file_names = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    if len(shards) == 1:
        file_names = ["model.safetensors"]
    documents: dict[str, object] = {}
    if len(shards) > 1:
        total = sum(_nbytes(source.tensors[f"{MODEL}/{name}"]) for name in names)
        documents[_INDEX] = {
            "metadata": {"total_size": total},
            "weight_map": {
                name: file_name
                for file_name, shard in zip(file_names, shards, strict=True)
                for name in shard
            },
        }
    config = source.documents.get(CONFIG)
    if config is not None:
        documents["config.json"] = config
    # The index comes last: with it the folder is complete.
    contents = dict(beside) | {
        file_name: json.dumps(content, indent=2).encode()
        for file_name, content in reversed(documents.items())
    }
    files = dict(zip(file_names, shards, strict=True))
    done = _written_before(source, url, files, contents, memory_nbytes, report)
    for file_name, shard in files.items():
        if file_name not in done:
            _write_file(source, f"{url}/{file_name}", shard, memory_nbytes, report)
    for file_name, content in contents.items():
        if file_name not in done:
            with new_file(f"{url}/{file_name}", nbytes=len(content)) as file:
                file.write(content)


def _model_names(source: Source) -> list[str]:
    names = [key.removeprefix(f"{MODEL}/") for key in source.tensors]
    if not names:
        raise LayoutMismatch("the checkpoint has no model, and safetensors holds nothing else")
    for name in names:
        dtype = source.tensors[f"{MODEL}/{name}"].dtype
        if dtype not in SAFETENSORS_NAMES:
            raise LayoutMismatch(f"{name}: safetensors has no {dtype}; convert with --dtype")
    return sorted(names)


def model_left_out(source: Source, *, has_config: bool) -> list[str]:
    """Return what of a model the files do not have, each with the reason.

    Args:
        source: a checkpoint with nothing but a model.
        has_config: they have the configuration.
    """
    document = source.documents.get(TIED, {})
    ties = {f"{MODEL}/{alias}": tie_of(document, f"{MODEL}/{alias}") for alias in document}
    lines = [
        f"{key}: it is {tie.key}{', transposed' if tie.is_transposed else ''}, under which alone "
        "safetensors stores it"
        for key, tie in ties.items()
        if tie is not None
    ]
    if CONFIG in source.documents and not has_config:
        lines.append(f"{CONFIG}: a file has tensors alone; a folder, --to huggingface, has it")
    return lines


def _shards(
    tensors: Mapping[str, TensorSpec], names: Sequence[str], shard_nbytes: int
) -> Iterator[list[str]]:
    shard: list[str] = []
    nbytes = 0
    for name in names:
        size = _nbytes(tensors[f"{MODEL}/{name}"])
        if shard and nbytes + size > shard_nbytes:
            yield shard
            shard, nbytes = [], 0
        shard.append(name)
        nbytes += size
    yield shard


def _written_before(
    source: Source,
    url: str,
    files: Mapping[str, Sequence[str]],
    contents: Mapping[str, bytes],
    memory_nbytes: int,
    report: Report,
) -> set[str]:
    """Return the files of a folder that an interrupted conversion has written.

    Args:
        source: the model.
        url: the folder.
        files: the names of the tensors in each of its files.
        contents: its documents, in the order in which they are written.
        memory_nbytes: how much memory tensors may take.
        report: called with bytes of tensors that were compared.

    Raises:
        CheckpointExists: the folder is complete, or has files of another model.
    """
    present = {name for name in open_storage(url).names() if "/" not in name}
    last = [*files, *contents][-1]
    others = {
        name
        for name in present - files.keys() - contents.keys()
        if name.endswith((".safetensors", ".bin", ".pt", ".pth", ".index.json"))
    }
    if last in present or others:
        first = last if last in present else min(others)
        raise _exists(f"{url}/{first}")
    storage = open_storage(url)
    for name, content in contents.items():
        if name in present and storage.read(name) != content:
            raise _exists(f"{url}/{name}")
    done = present & (files.keys() | contents.keys())
    for name in sorted(done & files.keys()):
        if not _is_written(source, f"{url}/{name}", files[name], memory_nbytes, report):
            raise _exists(f"{url}/{name}")
    return done


def _exists(url: str) -> CheckpointExists:
    return CheckpointExists(
        f"{url} exists, and is never overwritten; give a folder without a model, or remove this one"
    )


def _is_written(
    source: Source, url: str, names: Sequence[str], memory_nbytes: int, report: Report
) -> bool:
    """Return whether a file is what `_write_file` would write."""
    ordered, header, nbytes = _header(source, names)
    files = open_files(url)
    file = files.file(files.names[0])
    if file.nbytes != len(header) + nbytes or file.whole.part(0, len(header)).read() != header:
        return False
    checksums = {}
    for name in ordered:
        checksum = 0
        for data in read_in_order(source, f"{MODEL}/{name}", block_nbytes(memory_nbytes)):
            checksum = crc32c.crc32c(data, checksum)
            report(data.nbytes)
        checksums[name] = checksum
    return _different(url, checksums, memory_nbytes) is None


def _header(source: Source, names: Sequence[str]) -> tuple[list[str], bytes, int]:
    """Return the order of a file's tensors, what is before them, and their bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # The format's writers order tensors by alignment, so that each is aligned in the file.
    ordered = sorted(
        names, key=lambda n: (-numpy_dtype(source.tensors[f"{MODEL}/{n}"].dtype).itemsize, n)
    )
    for name in ordered:
        spec = source.tensors[f"{MODEL}/{name}"]
        stop = offset + _nbytes(spec)
        header[name] = {
            "dtype": SAFETENSORS_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return ordered, struct.pack("<Q", len(text)) + text, offset


def _write_file(
    source: Source, url: str, names: Sequence[str], memory_nbytes: int, report: Report
) -> None:
    ordered, header, tensors_nbytes = _header(source, names)
    checksums: dict[str, int] = {}

    def compare(written: str) -> None:
        """Read what was written, and compare it with the checksums of what was read."""
        tensor = _different(written, checksums, memory_nbytes)
        if tensor is not None:
            raise CheckpointDamaged(
                f"{url}: {tensor} is not what was written; look at the disk, and convert again"
            )

    with new_file(url, compare, nbytes=len(header) + tensors_nbytes) as file:
        file.write(header)
        for name in ordered:
            checksum = 0
            for data in read_in_order(source, f"{MODEL}/{name}", block_nbytes(memory_nbytes)):
                file.write(data)
                checksum = crc32c.crc32c(data, checksum)
                report(data.nbytes)
            checksums[name] = checksum


def _different(url: str, checksums: Mapping[str, int], memory_nbytes: int) -> str | None:
    """Return the first tensor of a file that has another checksum; None if there is none."""
    files = open_files(url)
    (name,) = files.names
    arrays = read_safetensors(files.file(name)).arrays
    for tensor, expected in checksums.items():
        if checksum_of(arrays[tensor].extent, block_nbytes(memory_nbytes)) != expected:
            return tensor
    return None


def _nbytes(spec: TensorSpec) -> int:
    nbytes = numpy_dtype(spec.dtype).itemsize
    for extent in spec.shape:
        nbytes *= extent
    return nbytes
