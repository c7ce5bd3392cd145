"""Index of the cells of a stored checkpoint: the object, offset, size and checksum of each.

Pure. It is made from the writers' listings (parts) and the tensors' metadata.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import crc32c

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.layout.boxes import Box
from keepstep.checkpoint.layout.integers import ceil_div
from keepstep.checkpoint.stored.chunking import Cell, Chunk, StoredTensor, cells_over, chunks_over
from keepstep.checkpoint.stored.format import (
    ChunkObject,
    DataObject,
    Pack,
    cells_per_chunk,
    chunk_name,
    shard_index,
    shard_index_nbytes,
)

_RUN_NBYTES = 2 * 2**20


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Span:
    """Cells of a tensor that lie in an object one after the other, each followed by its crc32c.

    `offset` is in bytes. `places` are the cells' places in the grid of the tensor's cells. `tail`
    is the chunk's index, which follows the chunk's last cell; otherwise it is empty.
    """

    key: str
    object_name: str
    offset: int
    places: tuple[tuple[int, ...], ...]
    checksums: tuple[int, ...]
    payload_nbytes: int
    tail: bytes

    @property
    def nbytes(self) -> int:
        """Size of the cells with their checksums, and of the tail."""
        return len(self.checksums) * (self.payload_nbytes + 4) + len(self.tail)

    def is_intact(self, data: memoryview) -> bool:
        """Return whether these bytes match the checksums and the tail."""
        start = 0
        for crc in self.checksums:
            end = start + self.payload_nbytes
            is_payload_intact = crc32c.crc32c(data[start:end]) == crc
            if not is_payload_intact or data[end : end + 4] != crc.to_bytes(4, "little"):
                return False
            start = end + 4
        return data[start:] == self.tail


@dataclass(frozen=True, slots=True, kw_only=True)
class CellIndex:
    """Finds cells in the data objects of a checkpoint.

    `where` is the checkpoint's URL, for error messages.
    """

    tensors: Mapping[str, StoredTensor]
    objects: tuple[DataObject, ...]
    where: str
    _chunks: Mapping[str, ChunkObject]
    _listed: Mapping[str, int]
    _packed: Mapping[tuple[str, tuple[int, ...]], Span]

    @classmethod
    def of(
        cls, tensors: Mapping[str, StoredTensor], objects: Sequence[DataObject], where: str
    ) -> CellIndex:
        """Make the index of these objects.

        Raises:
            CheckpointDamaged: a pack has cells of a tensor that is not packed or does not exist, a
                chunk has more or fewer cells than its tensor's chunks, or an object has another
                size than its cells.
        """
        listed: dict[str, int] = defaultdict(int)
        chunks: dict[str, ChunkObject] = {}
        packed: dict[tuple[str, tuple[int, ...]], Span] = {}
        for item in objects:
            if isinstance(item, ChunkObject):
                chunks[item.name] = item
                key = item.name.rpartition("/")[0]
                tensor = tensors.get(key)
                # Before anything is gone over: a few bytes may claim any number of cells.
                if tensor is not None and len(item.checksums) != cells_per_chunk(tensor):
                    raise CheckpointDamaged(
                        f"{where}{item.name} is listed with {len(item.checksums)} cells, a chunk "
                        f"of {key} has {cells_per_chunk(tensor)}; load an older step"
                    )
                if tensor is not None:
                    _check_size(item, _chunk_nbytes(tensor, item), where)
                listed[key] += 1
                continue
            nbytes = 0
            for span in _spans_of_pack(tensors, item):
                packed[span.key, span.places[0]] = span
                listed[span.key] += 1
                nbytes += span.nbytes
            _check_size(item, nbytes, where)
        return cls(
            tensors=tensors,
            objects=tuple(objects),
            where=where,
            _chunks=chunks,
            _listed=listed,
            _packed=packed,
        )

    def check_listed(self, key: str) -> None:
        """Check that the listings have as many chunks as a tensor needs, before they are gone over.

        Raises:
            CheckpointDamaged: they have fewer.
        """
        tensor = self.tensors[key]
        counts = (ceil_div(n, step) for n, step in zip(tensor.shape, tensor.chunk, strict=True))
        needed, listed = math.prod(counts), self._listed.get(key, 0)
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
        tensor = self.tensors[chunk.key]
        name = chunk_name(chunk.key, chunk.place)
        try:
            if tensor.is_packed:
                for cell in cells:
                    yield self._packed[chunk.key, cell.place]
            else:
                yield from _spans_of_chunk(chunk.key, tensor, self._chunks[name], cells)
        except KeyError:
            raise CheckpointDamaged(
                f"{self.where}{name}: {chunk.key} needs this chunk and no listing has it; "
                "load an older step"
            ) from None

    def find_packed(self, key: str, place: tuple[int, ...]) -> Span | None:
        """Return the span of one cell of a packed tensor, by its place in the grid of cells."""
        return self._packed.get((key, place))

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
        """Yield the spans of an object, in order; the places of a chunk's cells are left empty.

        Raises:
            CheckpointDamaged: the object belongs to no tensor.
        """
        if not isinstance(item, ChunkObject):
            yield from _spans_of_pack(self.tensors, item)
            return
        key = item.name.rpartition("/")[0]
        if key not in self.tensors or self.tensors[key].is_packed:
            raise CheckpointDamaged(
                f"{self.where}{item.name} belongs to no tensor; load an older step"
            )
        cells = [Cell(number, ()) for number, crc in enumerate(item.checksums) if crc is not None]
        yield from _spans_of_chunk(key, self.tensors[key], item, cells)


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


def _chunk_nbytes(tensor: StoredTensor, chunk: ChunkObject) -> int:
    present = sum(crc is not None for crc in chunk.checksums)
    return present * (tensor.cell_nbytes + 4) + shard_index_nbytes(len(chunk.checksums))


def _check_size(item: DataObject, nbytes: int, where: str) -> None:
    if item.nbytes != nbytes:
        raise CheckpointDamaged(
            f"{where}{item.name} is listed with {item.nbytes} bytes, its cells have {nbytes}; "
            "load an older step"
        )


def _spans_of_pack(tensors: Mapping[str, StoredTensor], pack: Pack) -> Iterator[Span]:
    offset = 0
    for cell in pack.cells:
        tensor = tensors.get(cell.key)
        if tensor is None or not tensor.is_packed:
            raise CheckpointDamaged(
                f"{pack.name} has cells of {cell.key!r}, which is not a packed tensor; "
                "load an older step"
            )
        yield Span(
            key=cell.key,
            object_name=pack.name,
            offset=offset,
            places=(cell.place,),
            checksums=(cell.crc32c,),
            payload_nbytes=tensor.cell_nbytes,
            tail=b"",
        )
        offset += tensor.cell_nbytes + 4


def _spans_of_chunk(
    key: str, tensor: StoredTensor, chunk: ChunkObject, cells: Sequence[Cell]
) -> Iterator[Span]:
    """Yield spans of at most `_RUN_NBYTES`, or of one cell if a cell is larger.

    Raises:
        KeyError: the chunk lacks one of the cells.
    """
    # Absent cells take no space.
    present = {number: crc for number, crc in enumerate(chunk.checksums) if crc is not None}
    positions = {number: position for position, number in enumerate(present)}
    size = tensor.cell_nbytes + 4
    max_count = max(1, _RUN_NBYTES // size)
    begin = 0
    for end in range(1, len(cells) + 1):
        first, last = positions[cells[begin].number], positions[cells[end - 1].number]
        has_room = end < len(cells) and end - begin < max_count
        if has_room and positions.get(cells[end].number) == last + 1:
            continue
        yield Span(
            key=key,
            object_name=chunk.name,
            offset=first * size,
            places=tuple(cell.place for cell in cells[begin:end]),
            checksums=tuple(present[cell.number] for cell in cells[begin:end]),
            payload_nbytes=tensor.cell_nbytes,
            tail=shard_index(tensor, chunk.checksums) if last == len(present) - 1 else b"",
        )
        begin = end
