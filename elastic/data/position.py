"""Says how far a job is: in its steps, and in its data. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from keepstep.checkpoint.layout.boxes import Json
from keepstep.elastic.data.partitions import Partitioning


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
        cls, document: Json, documents: Mapping[str, Json], data_rank: int, data_size: int
    ) -> Self | None:
        """Return the position of what a rank reads; None if there is none that it could read.

        Args:
            document: what `document` returned.
            documents: what `documents` returned on all ranks, of any number.
            data_rank: data-parallel rank, now.
            data_size: number of data-parallel ranks, now.
        """
        if document is None:
            return None
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
    stream: StreamPosition | None = field(default=None, compare=False)


def _name(partition: int) -> str:
    return f"stream/{partition:05d}"
