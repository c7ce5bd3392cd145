"""Verifies another tool's checkpoint, as far as its format lets one.

Every byte is read. Opening has shown that the files agree with each other and with the tensors'
shapes; here the checksums are compared that there are. Which bytes have none is said: they may have
been changed, and nothing tells.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from keepstep.checkpoint.convert.read.arrays import Array, ComputedArray, FileArray, MemoryArray
from keepstep.checkpoint.convert.read.converted_arrays import ConvertedArray
from keepstep.checkpoint.convert.read.dcp_entries import EntryArray
from keepstep.checkpoint.convert.read.dcp_metadata import read_metadata
from keepstep.checkpoint.convert.read.files import Extent, ForeignFiles
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.opening import files_of, open_located
from keepstep.checkpoint.convert.read.pieces import ForeignTensor
from keepstep.checkpoint.convert.read.torch_file import ZIP_SIGNATURE
from keepstep.checkpoint.convert.read.zip_checksums import (
    CheckedBytes,
    check_extent,
    check_zip,
    read_all,
)
from keepstep.checkpoint.convert.write.pieces_of_files import Elements
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.location import Format, Location

_BLOCK_NBYTES = 16 * 2**20
_PARALLEL_READS = 8
_OF_DCP = (Format.DCP, Format.TORCHTITAN, Format.MEGATRON_CORE)


@dataclass(frozen=True, slots=True)
class Verified:
    """The extent of the verification of a checkpoint that shows no damage.

    Attributes:
        format_name: its format, in words.
        files: how many files it has.
        nbytes: how many bytes they have; all were read.
        checked_nbytes: how many of them have checksums, which they match.
        left_out: how many things in it are not carried: their bytes were read, and not understood.
    """

    format_name: str
    files: int
    nbytes: int
    checked_nbytes: int
    left_out: int

    def line(self) -> str:
        """Return this in words."""
        return (
            f"no damage found: {self.files} files of {self.format_name}; {self.nbytes:,} bytes "
            f"were read, {self.checked_nbytes:,} match checksums, the others have none"
        )


def verify_foreign(
    location: Location, report: Callable[[int], None] = lambda nbytes: None
) -> Verified:
    """Read every byte of a checkpoint of another tool, and check what its format lets one check.

    Args:
        location: what `locate_foreign` has returned.
        report: called with bytes that were read.

    Raises:
        CheckpointDamaged: bytes do not match a checksum, or files contradict themselves or others.
        CheckpointError: it cannot be opened, or read.
    """
    opened = open_located(location)
    files = files_of(location)
    names = files.names if location.file_name is None else (location.file_name,)
    _check_tensors(opened)
    ranges = _ranges(files) if location.format in _OF_DCP else {}
    total = CheckedBytes()
    for name in names:
        whole = files.file(name).whole
        end = 0
        for part in ranges.get(whole.file.name, [whole]):
            # Nothing refers to what may lie between the entries of DCP.
            total += read_all(whole.part(end, max(0, part.offset - end)), report)
            total += _check(part, report)
            end = part.offset + part.nbytes
        total += read_all(whole.part(end, whole.nbytes - end), report)
    return Verified(opened.format_name, len(names), total.read, total.checked, len(opened.left_out))


def check_tensors(
    opened: ForeignCheckpoint, keys: Collection[str], report: Callable[[int], None]
) -> CheckedBytes:
    """Read what tensors are made from where it has checksums, and compare it with them.

    Args:
        opened: the checkpoint.
        keys: its tensors to check.
        report: called with bytes that were read, or that have no checksum, perhaps from several
            threads.

    Returns:
        the bytes in files, and how many of them match checksums.

    Raises:
        CheckpointDamaged: bytes do not match their checksum.
        CheckpointError: they cannot be read.
    """
    arrays = [piece.array for key in keys for piece in opened.foreign_tensors[key].pieces]
    with ThreadPoolExecutor(_PARALLEL_READS) as pool:
        # Tied tensors and views share their bytes. To list those of DCP's tensors takes reads.
        extents = dict.fromkeys(extent for found in pool.map(_extents, arrays) for extent in found)
        checked = pool.map(partial(check_extent, report=report), extents)
        return sum(checked, CheckedBytes(sum(map(_decoded_nbytes, arrays)), 0))


def _extents(array: Array) -> tuple[Extent, ...]:
    return array.extents


def _decoded_nbytes(array: Array) -> int:
    """Return the bytes of an array that TensorStore decodes, of whose chunks there is no checksum.

    If a codec has one, TensorStore compares it.
    """
    if not isinstance(array, ComputedArray) or array.sources:
        return 0
    return array.box.size * numpy_dtype(array.dtype).itemsize


def nbytes_of_files(location: Location) -> int:
    """Return the size of a checkpoint's files."""
    files = files_of(location)
    names = files.names if location.file_name is None else (location.file_name,)
    return sum(files.file(name).nbytes for name in names)


def _check(extent: Extent, report: Callable[[int], None]) -> CheckedBytes:
    head = extent.part(0, min(len(ZIP_SIGNATURE), extent.nbytes)).read()
    return check_zip(extent, report) if head == ZIP_SIGNATURE else read_all(extent, report)


def _ranges(files: ForeignFiles) -> dict[str, list[Extent]]:
    """Return the entries of DCP's files, each of which is a zip of its own, by the file.

    They are in the order of their bytes.
    """
    metadata = read_metadata(files)
    chunks = (chunk.stored for tensor in metadata.tensors.values() for chunk in tensor.chunks)
    ranges: dict[str, dict[int, Extent]] = {}
    for extent in (*chunks, *metadata.values.values()):
        ranges.setdefault(extent.file.name, {})[extent.offset] = extent
    return {name: [by_offset[at] for at in sorted(by_offset)] for name, by_offset in ranges.items()}


def _check_tensors(opened: ForeignCheckpoint) -> None:
    """Read the tensors that are more than bytes of a file: those that have to be decoded."""
    for key, tensor in opened.foreign_tensors.items():
        for entry in _entries(tensor):
            # It is opened, which compares its type and shape with the metadata's.
            _ = entry.entry.array
        if not all(
            isinstance(piece.array, FileArray | MemoryArray | ConvertedArray | EntryArray)
            for piece in tensor.pieces
        ):
            spec = tensor.spec
            elements = Elements(opened, key, (Box.whole(spec.shape),), spec.dtype)
            for _ in elements.blocks(_BLOCK_NBYTES):
                pass


def _entries(tensor: ForeignTensor) -> Iterator[EntryArray]:
    return (piece.array for piece in tensor.pieces if isinstance(piece.array, EntryArray))
