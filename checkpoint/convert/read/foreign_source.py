"""Presents another tool's checkpoint as a `Source`, and lists what it does not carry.

Readers of formats say which pieces of which files a tensor consists of (`contents.Contents`); here
boxes are read, by the planner that serves live shards and stored checkpoints too.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from keepstep.checkpoint.convert.read.arrays import Array, FileArray, Values, view_of
from keepstep.checkpoint.convert.read.pieces import ForeignTensor
from keepstep.checkpoint.convert.read.range_reads import (
    Copy,
    RangeRead,
    copies_of,
    execute,
    range_reads,
)
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box, Entry, Json, ShardIndex
from keepstep.checkpoint.format.layout.completeness import shortened
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.planner import plan_reads
from keepstep.checkpoint.format.layout.source import BoxRequest, TensorSpec, slots_in
from keepstep.checkpoint.format.layout.wrapper_names import StoredNames

# Threads wait for storage; each has at most one read's bytes in memory.
_PARALLEL_READS = 8


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something of a checkpoint that is not carried.

    Attributes:
        name: its name there.
        reason: why it is not carried.
        key: what a state would ask for to get it, such as `optim`; None if no state would.
    """

    name: str
    reason: str
    key: str | None = None


def summary(left_out: Iterable[LeftOut]) -> list[str]:
    """Return what is left out in words, one line for each part and reason: names and a count."""
    names: dict[tuple[str, str], list[str]] = {}
    for left in left_out:
        part = left.name.partition("/")[0] if "/" in left.name else ""
        names.setdefault((part, left.reason), []).append(left.name)
    return [f"{shortened(of_part)}: {reason}" for (_, reason), of_part in names.items()]


@dataclass(frozen=True, slots=True, eq=False)
class _OtherRead:
    """A box of an array that is not in plain bytes of a file."""

    array: Array
    into: Values


class _Memory(threading.local):
    """One buffer per thread, which all its reads reuse."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def of_size(self, nbytes: int) -> memoryview:
        """Return this thread's buffer, cut to this size; the thread's next call returns it too."""
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        return memoryview(self._buffer)[:nbytes]


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint:
    """One checkpoint of another tool, as a `Source`.

    Attributes:
        url: where it is.
        format_name: its format, in words.
        step: number of completed optimizer steps; 0 where the checkpoint does not say.
        foreign_tensors: the tensors with their pieces, by key.
        documents: see `Source.documents`.
        left_out: what the checkpoint has and this does not, with the reasons.
    """

    url: str
    format_name: str
    step: int
    foreign_tensors: Mapping[str, ForeignTensor]
    documents: Mapping[str, Json]
    left_out: tuple[LeftOut, ...] = ()

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor by key."""
        return {key: tensor.spec for key, tensor in self.foreign_tensors.items()}

    @property
    def may_be_renamed(self) -> bool:
        """Whether `named_for` may change anything, or depend on the parameters' names."""
        # Each rank opens it by itself: nothing tells that all have found the same names.
        return True

    def named_for(self, parameters: Collection[str]) -> ForeignCheckpoint:
        """Return the checkpoint with its tensors named as those of a model with these parameters.

        Other tools store names of wrappers, such as `DistributedDataParallel`, as well.
        """
        names = StoredNames.of(self.foreign_tensors, parameters)
        if not names.keys:
            return self
        return replace(
            self,
            foreign_tensors=names.renamed(self.foreign_tensors),
            documents=names.documents(self.documents),
        )

    def slots(self, parameters: Collection[str]) -> Mapping[str, Mapping[str, TensorSpec]]:
        """See `Source.slots`."""
        return slots_in(self.tensors, parameters)

    def known_keys(self) -> Collection[str]:
        """See `Source.known_keys`: all of them."""
        return self.foreign_tensors.keys()

    def read(self, requests: Sequence[BoxRequest]) -> None:
        """See `Source.read`. Tensors are not compared with the checksums that files may have.

        Bytes that lie close together are read once for all requests. At most a few MiB of each of
        eight threads are in memory besides the requests' buffers.
        """
        copies: list[Copy] = []
        others: list[_OtherRead] = []
        for array, into in self._planned(requests):
            if isinstance(array, FileArray):
                copies.extend(copies_of(array, into))
            else:
                others.append(_OtherRead(array, into))
        memory = _Memory()

        def execute_one(read: RangeRead | _OtherRead) -> None:
            if isinstance(read, RangeRead):
                execute(read, memory.of_size)
            else:
                read.array.read_into(Box.whole(read.array.shape), read.into)

        reads: list[RangeRead | _OtherRead] = [*range_reads(copies), *others]
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            futures = [pool.submit(execute_one, read) for read in reads]
            try:
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()

    def _planned(self, requests: Sequence[BoxRequest]) -> Iterator[tuple[Array, Values]]:
        """Yield the parts of arrays to read, and the memory that each is read to."""
        targets: list[Values] = []
        arrays: dict[tuple[str, Box], Array] = {}
        entries: list[Entry] = []
        filled = [request for request in requests if request.box.size]
        for request in filled:
            tensor = self.foreign_tensors.get(request.key)
            if tensor is None:
                raise LayoutMismatch(f"{request.key}: not in {self.url} ({self.format_name})")
            values = np.frombuffer(request.into, numpy_dtype(tensor.spec.dtype))
            targets.append(values.reshape(request.box.shape))
        for key in dict.fromkeys(request.key for request in filled):
            spec = self.foreign_tensors[key].spec
            for piece in self.foreign_tensors[key].pieces:
                arrays[key, piece.box] = piece.array
                entries.append(
                    Entry(
                        key=key,
                        dtype=spec.dtype,
                        global_shape=spec.shape,
                        box=piece.box,
                        byte_offset=0,
                        nbytes=piece.box.size * numpy_dtype(spec.dtype).itemsize,
                    )
                )
        # The pieces of all files are one index: pieces are found by their boxes, not by offsets.
        index = ShardIndex(0, tuple(entries), {})
        for read in plan_reads([(request.key, request.box) for request in filled], [index]):
            array = arrays[read.entry.key, read.entry.box].narrow(read.box.within(read.entry.box))
            into = view_of(targets[read.wanted], read.box.within(filled[read.wanted].box))
            yield array, into
