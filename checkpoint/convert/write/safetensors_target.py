"""Writes the model of a checkpoint as files of safetensors, alone or in a Hugging Face folder.

The format is described at https://github.com/huggingface/safetensors; the folder's index is what
`transformers` writes. Written by ourselves because the library takes all of a file's tensors in
memory at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from keepstep.checkpoint.convert.read.safetensors_file import SAFETENSORS_NAMES
from keepstep.checkpoint.convert.write.pieces_of_files import Piece, whole
from keepstep.checkpoint.convert.write.planned_folder import PlannedFile
from keepstep.checkpoint.convert.write.selection import MODEL
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.described import tie_of
from keepstep.checkpoint.format.layout.documents import CONFIG, TIED
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.source import Source, TensorSpec

SHARD_NBYTES = 5 * 10**9
"""The most bytes of tensors in one file of a folder, unless one tensor alone has more."""

_INDEX = "model.safetensors.index.json"
_ALIGNMENT = 8


def safetensors_file(source: Source) -> tuple[Piece, ...]:
    """Return the pieces of one file with a model.

    Args:
        source: a checkpoint with nothing but a model.

    Raises:
        LayoutMismatch: a data type is none of the format's.
    """
    return _pieces(source, _model_names(source))


def hugging_face_files(source: Source, copied: Mapping[str, bytes]) -> list[PlannedFile]:
    """Return the files of a folder: weights, an index, and config.json if it is known.

    Args:
        source: a checkpoint with nothing but a model.
        copied: further files of the folder, such as a tokenizer's, by name.

    Raises:
        LayoutMismatch: a data type is none of the format's.
    """
    names = _model_names(source)
    shards = list(_shards(source.tensors, names))
    file_names = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    if len(shards) == 1:
        file_names = ["model.safetensors"]
    contents = dict(copied)
    if CONFIG in source.documents:
        contents["config.json"] = _json(source.documents[CONFIG])
    if len(shards) > 1:
        # The index comes last: with it the folder is complete.
        total = sum(_nbytes(source.tensors[f"{MODEL}/{name}"]) for name in names)
        contents[_INDEX] = _json(
            {
                "metadata": {"total_size": total},
                "weight_map": {
                    name: file_name
                    for file_name, shard in zip(file_names, shards, strict=True)
                    for name in shard
                },
            }
        )
    files = zip(file_names, shards, strict=True)
    return [
        *(PlannedFile(file_name, _pieces(source, shard)) for file_name, shard in files),
        *(PlannedFile(file_name, (content,)) for file_name, content in contents.items()),
    ]


def are_weights(name: str) -> bool:
    """Return whether a folder with a file of this name has a model."""
    return "/" not in name and name.endswith((".safetensors", ".bin", ".pt", ".pth", ".index.json"))


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


def _shards(tensors: Mapping[str, TensorSpec], names: Sequence[str]) -> Iterator[list[str]]:
    shard: list[str] = []
    nbytes = 0
    for name in names:
        size = _nbytes(tensors[f"{MODEL}/{name}"])
        if shard and nbytes + size > SHARD_NBYTES:
            yield shard
            shard, nbytes = [], 0
        shard.append(name)
        nbytes += size
    yield shard


def _pieces(source: Source, names: Sequence[str]) -> tuple[Piece, ...]:
    """Return a file's pieces: what is before the tensors, and these."""
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
    tensors = (whole(source, f"{MODEL}/{name}").pieces for name in ordered)
    return (struct.pack("<Q", len(text)) + text, *chain.from_iterable(tensors))


def _json(content: object) -> bytes:
    return json.dumps(content, indent=2).encode()


def _nbytes(spec: TensorSpec) -> int:
    nbytes = numpy_dtype(spec.dtype).itemsize
    for extent in spec.shape:
        nbytes *= extent
    return nbytes
