"""Lists the leaves of a state that is written to a folder of DCP, and the files for them.

DCP flattens a state to names with dots and notes the path of each. Tensors are cut into chunks,
since loaders read an entry whole, and chunks are spread over files, which ranks read side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.checkpoint.convert.read.dcp_metadata import METADATA
from keepstep.checkpoint.convert.write.boxes_in_order import boxes_in_order
from keepstep.checkpoint.convert.write.dcp_metadata_writer import (
    EntryPlace,
    Path,
    WrittenChunk,
    WrittenTensor,
    WrittenValue,
    metadata_file,
    tensor_entry,
    value_entry,
)
from keepstep.checkpoint.convert.write.pieces_of_files import (
    Piece,
    joined,
    nbytes_of_pieces,
    part,
)
from keepstep.checkpoint.convert.write.planned_folder import PlannedFile
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.source import Source, TensorSpec

CHUNK_NBYTES = 64 * 2**20
"""The most bytes of a tensor in one entry."""

FILE_NBYTES = 512 * 2**20
"""About the most bytes in one file."""


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor of a state: its path there, its key in the source, perhaps its transpose."""

    path: Path
    key: str
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class ValueLeaf:
    """A value of a state that is no tensor, and its path there."""

    path: Path
    value: object


Leaf = TensorLeaf | ValueLeaf


def files_of_leaves(source: Source, leaves: Sequence[Leaf]) -> list[PlannedFile]:
    """Return the files of a folder of DCP. A tensor at two paths is in them once.

    Args:
        source: what has the tensors.
        leaves: the leaves of the state; their names differ, and none is within another.

    Raises:
        LayoutMismatch: two paths have one flat name.
    """
    files = Files()
    chunks: dict[tuple[str, bool], tuple[WrittenChunk, ...]] = {}
    tensors: list[WrittenTensor] = []
    values: list[WrittenValue] = []
    names: dict[str, Path] = {}
    for leaf in leaves:
        name = ".".join(map(str, leaf.path))
        if name in names:
            raise LayoutMismatch(
                f"{'/'.join(map(str, names[name]))} and {'/'.join(map(str, leaf.path))} are both "
                f"{name} in DCP, which has dots between names; rename one of them with --rules"
            )
        names[name] = leaf.path
        if isinstance(leaf, ValueLeaf):
            values.append(WrittenValue(name, leaf.path, files.add((value_entry(leaf.value),))))
            continue
        spec = source.tensors[leaf.key]
        key = (leaf.key, leaf.is_transposed)
        if key not in chunks:
            chunks[key] = tuple(_chunks(source, leaf, files))
        shape = spec.shape[::-1] if leaf.is_transposed else spec.shape
        tensors.append(WrittenTensor(name, leaf.path, TensorSpec(spec.dtype, shape), chunks[key]))
    return [*files.planned(), PlannedFile(METADATA, (metadata_file(tensors, values),))]


def _chunks(source: Source, leaf: TensorLeaf, files: Files) -> list[WrittenChunk]:
    spec = source.tensors[leaf.key]
    chunks = []
    for box in list(boxes_in_order(spec, CHUNK_NBYTES)) or [Box.whole(spec.shape)]:
        written = Box(box.offset[::-1], box.shape[::-1]) if leaf.is_transposed else box
        stored = part(source, leaf.key, box)
        place = files.add(tensor_entry(stored, is_transposed=leaf.is_transposed))
        chunks.append(WrittenChunk(written, place))
    return chunks


class Files:
    """The files with entries, while these are added one after the other."""

    def __init__(self) -> None:
        self._files: list[list[Piece]] = []
        self._nbytes = FILE_NBYTES

    def add(self, entry: tuple[Piece, ...]) -> EntryPlace:
        """Add an entry, and return where it is."""
        nbytes = nbytes_of_pieces(entry)
        if not self._files or self._nbytes + nbytes > FILE_NBYTES:
            self._files.append([])
            self._nbytes = 0
        place = EntryPlace(_file_name(len(self._files) - 1), self._nbytes, nbytes)
        self._files[-1].extend(entry)
        self._nbytes += nbytes
        return place

    def planned(self) -> list[PlannedFile]:
        """Return the files."""
        return [
            PlannedFile(_file_name(number), joined(pieces))
            for number, pieces in enumerate(self._files)
        ]


def _file_name(number: int) -> str:
    # As if one rank each had written them.
    return f"__{number}_0.distcp"
