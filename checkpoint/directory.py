"""Where each cell of a stored checkpoint lies: object, offset, size, checksum. Pure, from the listings and the tensors' metadata."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from checkpoint.chunking import Cell, Chunk, StoredTensor, cells_over, chunks_over
from checkpoint.errors import CheckpointDamaged
from checkpoint.format import ChunkObject, DataObject, Pack, chunk_name, shard_index
from checkpoint.layout import Box

_RUN_NBYTES = 8 * 2**20
_RUN_SPANS = 256


@dataclass(frozen=True, slots=True)
class Span:
    """A cell's bytes in an object: payload, then `trailer`: its crc32c and, after a chunk's last cell, the chunk's index."""

    key: str
    object_name: str
    offset: int
    payload_nbytes: int
    crc32c: int
    trailer: bytes

    @property
    def nbytes(self) -> int:
        """Size of all of it."""
        return self.payload_nbytes + len(self.trailer)


@dataclass(frozen=True, slots=True)
class Directory:
    """All data objects of a checkpoint, and a way to find a cell in them."""

    tensors: Mapping[str, StoredTensor]
    objects: tuple[DataObject, ...]
    _chunks: Mapping[str, ChunkObject]
    _packed: Mapping[tuple[str, tuple[int, ...]], Span]

    @classmethod
    def of(cls, tensors: Mapping[str, StoredTensor], objects: Sequence[DataObject]) -> Directory:
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
            for span, place in _spans_of_pack(tensors, item):
                packed[span.key, place] = span
        return cls(tensors, tuple(objects), chunks, packed)

    def find(self, chunk: Chunk, cell: Cell) -> Span | None:
        """Return where a cell lies, or None if no listing has it."""
        tensor = self.tensors[chunk.key]
        if tensor.is_packed:
            return self.find_packed(chunk.key, cell.place)
        found = self._chunks.get(chunk_name(chunk.key, chunk.place))
        return _span_of_chunk(chunk.key, tensor, found, cell.number) if found is not None else None

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
            for cell in cells_over(tensor, chunk, chunk.box):
                span = self.find(chunk, cell)
                if span is None:
                    name = chunk_name(key, chunk.place)
                    raise CheckpointDamaged(f"{key} needs {name} and no listing has it; load an older step")
                yield span

    def spans_of_object(self, item: DataObject) -> Iterator[Span]:
        """Yield what an object holds, in order."""
        if not isinstance(item, ChunkObject):
            yield from (span for span, _ in _spans_of_pack(self.tensors, item))
            return
        key = item.name.rpartition("/")[0]
        if key not in self.tensors or self.tensors[key].is_packed:
            raise CheckpointDamaged(f"{item.name} belongs to no tensor; load an older step")
        for number in range(len(item.checksums)):
            span = _span_of_chunk(key, self.tensors[key], item, number)
            if span is not None:
                yield span


def runs(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Yield spans in groups that one read fetches: neighbours in one object, up to some MiB."""
    run: list[Span] = []
    nbytes = 0
    for span in sorted(spans, key=lambda span: (span.object_name, span.offset)):
        follows = run and (run[-1].object_name, run[-1].offset + run[-1].nbytes) == (span.object_name, span.offset)
        if run and not (follows and nbytes + span.nbytes <= _RUN_NBYTES and len(run) < _RUN_SPANS):
            yield run
            run, nbytes = [], 0
        run.append(span)
        nbytes += span.nbytes
    if run:
        yield run


def _spans_of_pack(tensors: Mapping[str, StoredTensor], pack: Pack) -> Iterator[tuple[Span, tuple[int, ...]]]:
    offset = 0
    for cell in pack.cells:
        tensor = tensors.get(cell.key)
        if tensor is None or not tensor.is_packed:
            raise CheckpointDamaged(
                f"{pack.name} has cells of {cell.key!r}, which is no packed tensor; load an older step"
            )
        trailer = cell.crc32c.to_bytes(4, "little")
        yield Span(cell.key, pack.name, offset, tensor.cell_nbytes, cell.crc32c, trailer), cell.place
        offset += tensor.cell_nbytes + 4


def _span_of_chunk(key: str, tensor: StoredTensor, chunk: ChunkObject, number: int) -> Span | None:
    crc = chunk.checksums[number] if number < len(chunk.checksums) else None
    if crc is None:
        return None
    before = sum(other is not None for other in chunk.checksums[:number])
    trailer = crc.to_bytes(4, "little")
    if all(other is None for other in chunk.checksums[number + 1 :]):
        trailer += shard_index(tensor, chunk.checksums)
    offset = before * (tensor.cell_nbytes + 4)
    return Span(key, chunk.name, offset, tensor.cell_nbytes, crc, trailer)
