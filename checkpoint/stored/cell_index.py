"""Where the cells of a stored checkpoint lie: object, offset, size, checksums. Pure, from the listings and the tensors' metadata."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import crc32c

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.layout.boxes import Box
from keepstep.checkpoint.stored.chunking import Cell, Chunk, StoredTensor, cells_over, chunks_over
from keepstep.checkpoint.stored.format import ChunkObject, DataObject, Pack, chunk_name, shard_index

_RUN_NBYTES = 2 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Cells of a tensor that lie in an object one after the other, each followed by its crc32c; then `tail`.

    `places` are theirs in the grid of the tensor's cells. After a chunk's last cell comes the chunk's index; else there is no tail.
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
        """Size of all of it."""
        return len(self.checksums) * (self.payload_nbytes + 4) + len(self.tail)

    def is_intact(self, data: memoryview) -> bool:
        """Return whether these bytes are the ones that were written."""
        start = 0
        for crc in self.checksums:
            end = start + self.payload_nbytes
            if crc32c.crc32c(data[start:end]) != crc or data[end : end + 4] != crc.to_bytes(
                4, "little"
            ):
                return False
            start = end + 4
        return data[start:] == self.tail


@dataclass(frozen=True, slots=True)
class CellIndex:
    """All data objects of a checkpoint, and a way to find cells in them. `where` is the checkpoint's place, for messages."""

    tensors: Mapping[str, StoredTensor]
    objects: tuple[DataObject, ...]
    where: str
    _chunks: Mapping[str, ChunkObject]
    _packed: Mapping[tuple[str, tuple[int, ...]], Span]

    @classmethod
    def of(
        cls, tensors: Mapping[str, StoredTensor], objects: Sequence[DataObject], where: str
    ) -> CellIndex:
        """Make the directory of these objects.

        Raises:
            CheckpointDamaged: a pack has cells of a tensor that is not packed, or that there is not.
        """
        chunks: dict[str, ChunkObject] = {}
        packed: dict[tuple[str, tuple[int, ...]], Span] = {}
        for item in objects:
            if isinstance(item, ChunkObject):
                chunks[item.name] = item
                continue
            for span in _spans_of_pack(tensors, item):
                packed[span.key, span.places[0]] = span
        return cls(tensors, tuple(objects), where, chunks, packed)

    def find(self, chunk: Chunk, cells: Sequence[Cell]) -> Iterator[Span]:
        """Yield where these cells of a chunk lie, as few spans in the order of the cells.

        Args:
            chunk: which.
            cells: some of its cells, by ascending number.

        Raises:
            CheckpointDamaged: one is in no listing.
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
                f"{self.where}{name}: {chunk.key} needs this chunk and no listing has it; load an older step"
            ) from None

    def find_packed(self, key: str, place: tuple[int, ...]) -> Span | None:
        """Return where a cell of a packed tensor lies, by its place in the grid of cells."""
        return self._packed.get((key, place))

    def spans(self) -> Iterator[Span]:
        """Yield every cell of every tensor."""
        for key in self.tensors:
            yield from self.spans_of_tensor(key)

    def spans_of_tensor(self, key: str) -> Iterator[Span]:
        """Yield a tensor's cells, in C order of their chunks and within them.

        Raises:
            CheckpointDamaged: one is in no listing.
        """
        tensor = self.tensors[key]
        for chunk in chunks_over(key, tensor.shape, tensor.chunk, Box.whole(tensor.shape)):
            yield from self.find(chunk, list(cells_over(tensor, chunk, chunk.box)))

    def spans_of_object(self, item: DataObject) -> Iterator[Span]:
        """Yield what an object holds, in order; places are left out."""
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
    """Yield spans in groups that one read fetches: neighbours in one object, up to some MiB."""
    run: list[Span] = []
    nbytes = 0
    for span in sorted(spans, key=lambda span: (span.object_name, span.offset)):
        follows = run and (run[-1].object_name, run[-1].offset + run[-1].nbytes) == (
            span.object_name,
            span.offset,
        )
        if run and not (follows and nbytes + span.nbytes <= _RUN_NBYTES):
            yield run
            run, nbytes = [], 0
        run.append(span)
        nbytes += span.nbytes
    if run:
        yield run


def _spans_of_pack(tensors: Mapping[str, StoredTensor], pack: Pack) -> Iterator[Span]:
    offset = 0
    for cell in pack.cells:
        tensor = tensors.get(cell.key)
        if tensor is None or not tensor.is_packed:
            raise CheckpointDamaged(
                f"{pack.name} has cells of {cell.key!r}, which is no packed tensor; load an older step"
            )
        yield Span(
            cell.key, pack.name, offset, (cell.place,), (cell.crc32c,), tensor.cell_nbytes, b""
        )
        offset += tensor.cell_nbytes + 4


def _spans_of_chunk(
    key: str, tensor: StoredTensor, chunk: ChunkObject, cells: Sequence[Cell]
) -> Iterator[Span]:
    """Yield spans of at most `_RUN_NBYTES`, if a cell is no larger.

    Raises:
        KeyError: the chunk lacks one of the cells.
    """
    # Absent cells take no room.
    present = {number: crc for number, crc in enumerate(chunk.checksums) if crc is not None}
    positions = {number: position for position, number in enumerate(present)}
    size = tensor.cell_nbytes + 4
    most = max(1, _RUN_NBYTES // size)
    begin = 0
    for end in range(1, len(cells) + 1):
        first, last = positions[cells[begin].number], positions[cells[end - 1].number]
        if end < len(cells) and end - begin < most and positions.get(cells[end].number) == last + 1:
            continue
        checksums = tuple(present[cell.number] for cell in cells[begin:end])
        tail = shard_index(tensor, chunk.checksums) if last == len(present) - 1 else b""
        places = tuple(cell.place for cell in cells[begin:end])
        yield Span(key, chunk.name, first * size, places, checksums, tensor.cell_nbytes, tail)
        begin = end
