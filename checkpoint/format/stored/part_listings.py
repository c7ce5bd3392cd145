"""The writers' listings of a checkpoint, read as far as the chunks that are needed are in them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.stored.cell_index import CellIndex
from keepstep.checkpoint.format.stored.chunking import chunks_over
from keepstep.checkpoint.format.stored.listings import DataObject
from keepstep.checkpoint.format.stored.metadata import PARALLEL_READS
from keepstep.checkpoint.format.stored.object_names import CHUNKS


class PartListings:
    """The writers' listings of a checkpoint, each read when a chunk that it has is needed.

    Args:
        index: where the listed objects are added.
        names: the listings' names by number.
        chunk_parts: for a tensor the number of the listing that has its chunks, or the number for
            each of them; none for a tensor without elements.
        read: reads a listing.
    """

    def __init__(
        self,
        index: CellIndex,
        names: Mapping[int, str],
        chunk_parts: Mapping[str, int | tuple[int, ...]],
        read: Callable[[str], tuple[DataObject, ...]],
    ) -> None:
        self._index = index
        self._names = names
        self._chunk_parts = chunk_parts
        self._read = read
        self._lock = threading.Lock()
        self._added: set[int] = set()

    @property
    def numbers(self) -> Collection[int]:
        """The numbers of all listings."""
        return self._names.keys()

    def index_for(self, boxes: Sequence[tuple[str, Box]]) -> CellIndex:
        """Return an index that has all chunks that overlap these boxes of tensors.

        Raises:
            CheckpointDamaged: a listing is not what was written, or none has one of the chunks.
        """
        index = self.index_of(self._numbers_for(boxes))
        for key in {key for key, _ in boxes}:
            if isinstance(self._chunk_parts.get(key), int):
                index.check_listed(key)
        return index

    def _numbers_for(self, boxes: Sequence[tuple[str, Box]]) -> Collection[int]:
        """Return the numbers of the listings that have the chunks that overlap these boxes.

        Raises:
            CheckpointDamaged: it is not known which listing has one of the chunks.
        """
        needed: set[int] = set()
        for key, box in boxes:
            tensor = self._index.tensors[key]
            numbers = self._chunk_parts.get(key, ())
            if isinstance(numbers, int):
                needed.add(numbers)
                continue
            # Checked before the chunks are gone over: a few bytes may claim any number of them.
            if len(numbers) != math.prod(tensor.grid):
                raise CheckpointDamaged(
                    f"{self._index.where}{CHUNKS} has {len(numbers)} chunks of {key}, which "
                    f"has {math.prod(tensor.grid)}; load an older step"
                )
            for chunk in chunks_over(key, tensor.shape, tensor.chunk, box):
                needed.add(numbers[tensor.position_of(chunk.place)])
        return needed

    def index_of(self, numbers: Collection[int]) -> CellIndex:
        """Return an index that has the listings of these numbers.

        Raises:
            CheckpointDamaged: a listing is missing, or is not what was written.
        """
        with self._lock:
            missing = sorted(set(numbers) - self._added)
            if not missing:
                return self._index
            if unknown := [number for number in missing if number not in self._names]:
                raise CheckpointDamaged(
                    f"{self._index.where}{CHUNKS} names part {unknown[0]}, which the manifest does "
                    "not have; load an older step"
                )
            with ThreadPoolExecutor(PARALLEL_READS) as pool:
                listings = pool.map(self._read, [self._names[number] for number in missing])
                for number, objects in zip(missing, listings, strict=True):
                    self._index.add(objects)
                    self._added.add(number)
            return self._index
