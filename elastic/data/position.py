"""Says how far a job is: in its steps, and in its data. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from keepstep.checkpoint.layout.boxes import Json
from keepstep.elastic.data.partitions import Partitioning

NO_POSITION: Json = {}
"""What is stored where no stream is read; earlier versions stored None then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """Where the partitions of a stream are after a number of global batches.

    Attributes:
        begin: the first global batch of the pass that reads the stream.
        batch: number of global batches consumed, of earlier passes too.
        partitioning: how the stream is divided.
        states: by partition, where its reader is; those that some rank reads.
    """

    begin: int
    batch: int
    partitioning: Partitioning
    states: Mapping[int, Json]

    def document(self) -> Json:
        """Return what all ranks store alike."""
        return {
            "begin": self.begin,
            "batch": self.batch,
            "global_batch": self.partitioning.global_batch,
            "partitions": self.partitioning.count,
        }

    def documents(self) -> dict[str, Json]:
        """Return what is stored of each partition, by the document's name."""
        return {_name(number): state for number, state in self.states.items()}

    @classmethod
    def restore(
        cls,
        document: Json,
        documents: Mapping[str, Json],
        data_rank: int,
        data_size: int,
        batch: int,
    ) -> Self | WholePosition | None:
        """Return the position of what a rank reads; None if there is none that it could read.

        Args:
            document: what `document` returned, or `NO_POSITION`.
            documents: what `documents` returned on all ranks, of any number.
            data_rank: data-parallel rank, now.
            data_size: number of data-parallel ranks, now.
            batch: number of global batches consumed.
        """
        if document == NO_POSITION:
            return None
        if document is None or "read" in document:
            return WholePosition(batch=batch, stored=document) if batch else None
        partitioning = Partitioning(document["global_batch"], document["partitions"])
        if data_size > partitioning.global_batch:
            # `from_position` refuses to read it; other data may come next.
            return None
        return cls(
            begin=document["begin"],
            batch=document["batch"],
            partitioning=partitioning,
            states={
                number: documents[_name(number)]
                for number in partitioning.of_rank(data_rank, data_size)
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePosition:
    """Where a version was that did not divide streams, or had none: it stored None for both.

    Attributes:
        batch: number of global batches consumed, of earlier passes too.
        stored: the number of batches read in the pass, the epoch and the stream's own state; None
            for datasets without a state.
    """

    batch: int
    stored: Json

    def document(self) -> Json:
        """Return the same form: what it means is known only to who reads the stream."""
        return self.stored

    def documents(self) -> dict[str, Json]:
        """Return nothing: it was not divided."""
        return {}

    def state(self, begin: int, global_batch: int) -> Json:
        """Return the position as the state of a `SplitStream`'s only part.

        Args:
            begin: the first global batch of the pass.
            global_batch: samples per step.
        """
        stored = self.stored
        if stored is None or self.batch - stored["read"] != begin:
            stored = {"epoch": 0, "state": None}
        read = (self.batch - begin) * global_batch
        return {
            "epoch": stored["epoch"],
            "read": read,
            # Not all of them, perhaps; what matters is whether there were any.
            "of_epoch": read,
            "state": stored["state"],
            "whole_batches": global_batch,
        }


@dataclass(frozen=True, slots=True)
class Position:
    """Progress of a job: completed optimizer steps, and global batches consumed.

    Attributes:
        step: number of completed steps.
        batch: number of global batches consumed.
        stream: where a stream of samples is after these batches; None for other datasets.
    """

    step: int = 0
    batch: int = 0
    stream: StreamPosition | WholePosition | None = field(default=None, compare=False)


def _name(partition: int) -> str:
    return f"stream/{partition:05d}"
