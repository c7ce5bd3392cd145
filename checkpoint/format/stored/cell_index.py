"""Index of the cells of a stored checkpoint: the object, offset, size and checksum of each.

Pure. It is made from the tensors' metadata and the writers' listings (parts), one after the other:
a reader of a few tensors needs the listings of their writers only.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import crc32c

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.integers import ceil_div
from keepstep.checkpoint.format.stored.cell_codec import BLOSC_HEADER_NBYTES, CHECKSUM_NBYTES
from keepstep.checkpoint.format.stored.chunking import (
    Cell,
    Chunk,
    StoredTensor,
    cells_over,
    chunk_at,
    chunks_over,
)
from keepstep.checkpoint.format.stored.listings import ChunkObject, DataObject, Pack, decode_numbers
from keepstep.checkpoint.format.stored.object_names import chunk_name
from keepstep.checkpoint.format.stored.transfer_memory import BLOCK_NBYTES, LARGE_PAGE_NBYTES
from keepstep.checkpoint.format.stored.zarr_metadata import (
    cells_per_chunk,
    shard_index,
    shard_index_nbytes,
)

# With the rest of the blocks that it begins and ends in, a read fits a large page.
_RUN_NBYTES = LARGE_PAGE_NBYTES - 2 * BLOCK_NBYTES


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Span:
    """Cells of a tensor that lie in an object one after the other, each followed by its crc32c.

    `offset` is in bytes. `places` are the cells' places in the grid of the tensor's cells, `sizes`
    their sizes in bytes, with the checksum. `tail` is the chunk's index, which follows the chunk's
    last cell; otherwise it is empty.
    """

    key: str
    object_name: str
    offset: int
    places: tuple[tuple[int, ...], ...]
    checksums: tuple[int, ...]
    sizes: tuple[int, ...]
    tail: bytes

    @property
    def nbytes(self) -> int:
        """Size of the cells with their checksums, and of the tail."""
        return sum(self.sizes) + len(self.tail)

    def is_intact(self, data: memoryview) -> bool:
        """Return whether these bytes match the checksums and the tail."""
        start = 0
        for crc, size in zip(self.checksums, self.sizes, strict=True):
            end = start + size
            stored = data[end - CHECKSUM_NBYTES : end]
            is_payload_intact = crc32c.crc32c(data[start : end - CHECKSUM_NBYTES]) == crc
            if not is_payload_intact or stored != crc.to_bytes(CHECKSUM_NBYTES, "little"):
                return False
            start = end
        return data[start:] == self.tail


@dataclass(frozen=True, slots=True)
class _Located:
    """A chunk where it is stored: object, offset of its first cell in bytes, cells' checksums.

    `sizes` are those of the cells, as in `ChunkObject`.
    """

    object_name: str
    offset: int
    checksums: bytes
    sizes: bytes


class CellIndex:
    """Finds cells in the data objects of a checkpoint, as far as their listings were added.

    Args:
        tensors: all tensors of the checkpoint by key.
        where: the checkpoint's URL, for error messages.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], where: str) -> None:
        self.tensors = tensors
        self.where = where
        self._objects: list[DataObject] = []
        self._chunks: dict[tuple[str, tuple[int, ...]], _Located] = {}
        self._listed: dict[str, int] = defaultdict(int)

    @property
    def objects(self) -> Sequence[DataObject]:
        """The objects that were added."""
        return tuple(self._objects)

    def add(self, objects: Iterable[DataObject]) -> None:
        """Add the objects of a listing.

        Raises:
            CheckpointDamaged: a pack has chunks of a tensor that is not packed or does not exist, a
                chunk has more or fewer cells than its tensor's shape gives it, cells have sizes
                that they cannot have, or an object has another size than its cells.
        """
        for item in objects:
            if isinstance(item, Pack):
                offset = 0
                for chunk in item.chunks:
                    tensor = self._packed_tensor(item, chunk.key)
                    self._check_cells(item.name, chunk.key, chunk.place, chunk.checksums)
                    located = _Located(item.name, offset, chunk.checksums, b"")
                    self._locate(chunk.key, chunk.place, located)
                    offset += sum(_cell_sizes(tensor, located))
                self._check_size(item, offset)
            else:
                self._add_chunk_object(item)
            self._objects.append(item)

    def _add_chunk_object(self, item: ChunkObject) -> None:
        tensor = self.tensors.get(item.key)
        if tensor is None or tensor.is_packed:
            return  # It belongs to no tensor, so nobody reads it; `spans_of_object` refuses it.
        place = self._place(item)
        self._check_cells(item.name, item.key, place, item.checksums)
        self._check_cell_sizes(item, tensor)
        located = _Located(item.name, 0, item.checksums, item.sizes)
        tail_nbytes = shard_index_nbytes(cells_per_chunk(tensor))
        self._check_size(item, sum(_cell_sizes(tensor, located)) + tail_nbytes)
        self._locate(item.key, place, located)

    def check_listed(self, key: str) -> None:
        """Check that the listings have as many chunks as a tensor needs, before they are gone over.

        Raises:
            CheckpointDamaged: they have fewer.
        """
        needed, listed = math.prod(self.tensors[key].grid), self._listed.get(key, 0)
        if listed < needed:
            raise CheckpointDamaged(
                f"{self.where}{key} needs {needed} chunks and the listings have {listed} of them; "
                "load an older step"
            )

    def find(self, chunk: Chunk, cells: Sequence[Cell]) -> Iterator[Span]:
        """Yield as few spans as possible that hold these cells of a chunk, in the cells' order.

        Args:
            chunk: the chunk.
            cells: some of its cells, by ascending number.

        Raises:
            CheckpointDamaged: no listing has one of the cells.
        """
        tensor, located = self.tensors[chunk.key], self._chunks.get((chunk.key, chunk.place))
        if located is None:
            raise CheckpointDamaged(
                f"{self.where}{chunk_name(chunk.key, chunk.place)}: {chunk.key} needs this chunk "
                "and no listing has it; load an older step"
            )
        present = _present_cells(tensor, chunk.place)
        positions = {number: position for position, number in enumerate(present)}
        yield from _spans(chunk.key, tensor, located, present, positions, cells)

    def find_packed(self, key: str, place: tuple[int, ...]) -> Span | None:
        """Return the span of one cell of a packed tensor, by its place in the grid of cells."""
        tensor = self.tensors[key]
        per_chunk = [extent // cell for extent, cell in zip(tensor.chunk, tensor.cell, strict=True)]
        chunk_place = tuple(number // n for number, n in zip(place, per_chunk, strict=True))
        located = self._chunks.get((key, chunk_place))
        number = 0
        for position, count in zip(place, per_chunk, strict=True):
            number = number * count + position % count
        present = _present_cells(tensor, chunk_place) if located is not None else ()
        if located is None or number not in present:
            return None
        positions = {number: position for position, number in enumerate(present)}
        return next(_spans(key, tensor, located, present, positions, [Cell(number, place)]))

    def spans(self) -> Iterator[Span]:
        """Yield the spans of all cells of all tensors."""
        for key in self.tensors:
            yield from self.spans_of_tensor(key)

    def spans_of_tensor(self, key: str) -> Iterator[Span]:
        """Yield the spans of a tensor's cells, in C order of the chunks and within each chunk.

        Raises:
            CheckpointDamaged: no listing has one of the cells.
        """
        self.check_listed(key)
        tensor = self.tensors[key]
        for chunk in chunks_over(key, tensor.shape, tensor.chunk, Box.whole(tensor.shape)):
            yield from self.find(chunk, list(cells_over(tensor, chunk, chunk.box)))

    def spans_of_object(self, item: DataObject) -> Iterator[Span]:
        """Yield the spans of an object, in order.

        Raises:
            CheckpointDamaged: the object belongs to no tensor.
        """
        for key, place in self.places_of_object(item):
            chunk = chunk_at(key, self.tensors[key], place)
            yield from self.find(chunk, list(cells_over(self.tensors[key], chunk, chunk.box)))

    def places_of_object(self, item: DataObject) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensor and the place of each chunk that an object has, in order.

        Raises:
            CheckpointDamaged: the object belongs to no tensor.
        """
        is_pack = isinstance(item, Pack)
        places = (
            [(chunk.key, chunk.place) for chunk in item.chunks]
            if isinstance(item, Pack)
            else [(item.key, self._place(item))]
        )
        for key, place in places:
            tensor = self.tensors.get(key)
            if tensor is None or tensor.is_packed != is_pack:
                raise CheckpointDamaged(
                    f"{self.where}{item.name} belongs to no tensor; load an older step"
                )
            yield key, place

    def _locate(self, key: str, place: tuple[int, ...], located: _Located) -> None:
        if (key, place) in self._chunks:
            raise CheckpointDamaged(
                f"{self.where}{located.object_name}: chunk {place} of {key} is listed twice; load "
                "an older step"
            )
        self._chunks[key, place] = located
        self._listed[key] += 1

    def _packed_tensor(self, pack: Pack, key: str) -> StoredTensor:
        tensor = self.tensors.get(key)
        if tensor is None or not tensor.is_packed:
            raise CheckpointDamaged(
                f"{self.where}{pack.name} has chunks of {key!r}, which is not a packed tensor; "
                "load an older step"
            )
        return tensor

    def _place(self, item: ChunkObject) -> tuple[int, ...]:
        numbers = item.name.rpartition("/")[2].split(".")[1:]
        place = tuple(int(number) for number in numbers if number.isdecimal())
        if chunk_name(item.key, place) != item.name:
            raise CheckpointDamaged(
                f"{self.where}{item.name} is not the name of a chunk; load an older step"
            )
        return place

    def _check_cells(self, name: str, key: str, place: tuple[int, ...], checksums: bytes) -> None:
        tensor, listed = self.tensors[key], len(checksums) // 4
        is_inside = len(place) == len(tensor.grid) and all(
            number < count for number, count in zip(place, tensor.grid, strict=True)
        )
        # By arithmetic, before anything is gone over: a few bytes may claim any number of cells.
        expected = cell_count(tensor, place) if is_inside else 0
        if not is_inside or listed != expected:
            raise CheckpointDamaged(
                f"{self.where}{name} is listed with {listed} cells, chunk {place} of {key} has "
                f"{expected}; load an older step"
            )

    def _check_cell_sizes(self, item: ChunkObject, tensor: StoredTensor) -> None:
        """Check that compressed cells are listed with sizes that they can have, others with none.

        Raises:
            CheckpointDamaged: they are not.
        """
        if tensor.compression is None:
            is_possible = not item.sizes
        else:
            least = BLOSC_HEADER_NBYTES + CHECKSUM_NBYTES
            is_possible = len(item.sizes) == len(item.checksums) and all(
                least <= size <= least + tensor.cell_nbytes for size in decode_numbers(item.sizes)
            )
        if not is_possible:
            raise CheckpointDamaged(
                f"{self.where}{item.name} is listed with sizes that its cells cannot have: cells "
                f"of {tensor.cell_nbytes} bytes, compression {tensor.compression}; load an older "
                "step"
            )

    def _check_size(self, item: DataObject, nbytes: int) -> None:
        if item.nbytes != nbytes:
            raise CheckpointDamaged(
                f"{self.where}{item.name} is listed with {item.nbytes} bytes, its cells have "
                f"{nbytes}; load an older step"
            )


def runs(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Yield spans in groups for one read each: adjacent in one object, `_RUN_NBYTES` at most."""
    run: list[Span] = []
    nbytes = 0
    for span in sorted(spans, key=lambda span: (span.object_name, span.offset)):
        if run:
            last = run[-1]
            is_adjacent = (
                span.object_name == last.object_name and span.offset == last.offset + last.nbytes
            )
            if not is_adjacent or nbytes + span.nbytes > _RUN_NBYTES:
                yield run
                run, nbytes = [], 0
        run.append(span)
        nbytes += span.nbytes
    if run:
        yield run


def cell_count(tensor: StoredTensor, place: Sequence[int]) -> int:
    """Return how many cells a chunk has that are not beyond the tensor's edge."""
    return math.prod(_cells_along(tensor, place))


def _cells_along(tensor: StoredTensor, place: Sequence[int]) -> tuple[int, ...]:
    """Return how many cells a chunk has along each dimension, none of them beyond the edge."""
    return tuple(
        ceil_div(min(step, extent - number * step), cell)
        for number, extent, step, cell in zip(
            place, tensor.shape, tensor.chunk, tensor.cell, strict=True
        )
    )


def _present_cells(tensor: StoredTensor, place: Sequence[int]) -> Sequence[int]:
    """Return the numbers of a chunk's cells that are not beyond the edge, ascending."""
    per_chunk = [extent // cell for extent, cell in zip(tensor.chunk, tensor.cell, strict=True)]
    along = _cells_along(tensor, place)
    if list(along) == per_chunk:
        return range(math.prod(per_chunk))
    numbers = [0]
    for count, present in zip(per_chunk, along, strict=True):
        numbers = [number * count + position for number in numbers for position in range(present)]
    return numbers


def _cell_sizes(tensor: StoredTensor, located: _Located) -> Sequence[int]:
    """Return the size of each of a chunk's cells, with its checksum."""
    if tensor.compression is not None:
        return decode_numbers(located.sizes)
    return (tensor.cell_nbytes + CHECKSUM_NBYTES,) * (len(located.checksums) // 4)


def _spans(
    key: str,
    tensor: StoredTensor,
    located: _Located,
    present: Sequence[int],
    positions: Mapping[int, int],
    cells: Sequence[Cell],
) -> Iterator[Span]:
    """Yield spans of at most `_RUN_NBYTES`, or of one cell if a cell is larger.

    Args:
        key: the tensor's key.
        tensor: the tensor.
        located: its chunk.
        present: the numbers of the cells that the chunk has.
        positions: the position of each of them among these.
        cells: the cells that are wanted, of those.
    """
    sizes = _cell_sizes(tensor, located)
    offsets = tuple(itertools.accumulate(sizes, initial=located.offset))
    begin = 0
    for end in range(1, len(cells) + 1):
        first, last = positions[cells[begin].number], positions[cells[end - 1].number]
        if end < len(cells) and positions[cells[end].number] == last + 1:
            has_room = offsets[last + 2] - offsets[first] <= _RUN_NBYTES
            if has_room:
                continue
        is_last = last == len(present) - 1
        tail = b""
        if is_last and not tensor.is_packed:
            tail = shard_index(tensor, present, sizes)
        yield Span(
            key=key,
            object_name=located.object_name,
            offset=offsets[first],
            places=tuple(cell.place for cell in cells[begin:end]),
            checksums=decode_numbers(located.checksums[4 * first : 4 * last + 4]),
            sizes=tuple(sizes[first : last + 1]),
            tail=tail,
        )
        begin = end
