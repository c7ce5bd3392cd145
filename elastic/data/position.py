"""Represents a job's progress: in its steps, and in its data. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Self

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.elastic.data.partitions import Partitioning
from keepstep.elastic.errors import UsageError

NO_POSITION: Json = {}
"""Stored where no stream is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """Positions in the partitions of a stream after a number of global batches.

    Attributes:
        begin: the first global batch of the pass that reads the stream.
        batch: number of global batches consumed, of earlier passes too.
        partitioning: how the stream is divided.
        states: by partition, its reader's position; only of partitions that some rank reads.
    """

    begin: int
    batch: int
    partitioning: Partitioning
    states: Mapping[int, Json]

    def document(self) -> Json:
        """Return the document that is equal on all ranks."""
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
    ) -> Self | None:
        """Return the position of a rank's partitions; None if it has none that it could read.

        Args:
            document: what `document` returned, or `NO_POSITION`.
            documents: the results of `documents` on all ranks, of any number.
            data_rank: data-parallel rank, now.
            data_size: number of data-parallel ranks, now.
        """
        if document == NO_POSITION:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedPass:
    """A pass over a dataset with an index: the values that give a number of batches its meaning.

    Attributes:
        begin: the first global batch of the pass.
        end: the global batch after its last one.
        global_batch: samples per step.
        samples: the dataset's length.
    """

    begin: int
    end: int
    global_batch: int
    samples: int

    def document(self) -> Json:
        """Return the document that is equal on all ranks."""
        return asdict(self)

    @classmethod
    def restore(cls, document: Json) -> Self | None:
        """Parse a result of `document`; None for None."""
        return None if document is None else cls(**document)

    def check_continues(self, stored: IndexedPass, batch: int) -> None:
        """Check that a position in a stored pass means the same samples in this one.

        A pass that is over may have been another, and so may later ones.

        Args:
            stored: the pass that the job was in.
            batch: number of global batches consumed, of earlier passes too.

        Raises:
            UsageError: the job goes on within the pass, with other data.
        """
        is_same_data = (stored.global_batch, stored.samples) == (self.global_batch, self.samples)
        is_over = stored.end == self.end <= batch
        if is_same_data or is_over or not self.begin <= stored.begin < min(self.end, batch):
            return
        raise UsageError(
            f"the job is {batch - stored.begin} batches into a pass over {stored.samples} samples "
            f"with global_batch={stored.global_batch}, and the pass is now over {self.samples} "
            f"samples with global_batch={self.global_batch}, so its position means other samples; "
            "give the same dataset and global_batch, and others only to a later pass, or begin "
            "another job: with another checkpoint= (start_from= takes the model from this one), "
            "and with --keep-state 0 while the last run is still in memory"
        )


@dataclass(frozen=True, slots=True)
class Position:
    """Progress of a job: completed optimizer steps, and global batches consumed.

    Attributes:
        step: number of completed steps.
        batch: number of global batches consumed.
        stream: where a stream of samples is after these batches; None for other datasets.
        indexed_pass: the pass that the last of these batches was of, if its dataset has an index.
    """

    step: int = 0
    batch: int = 0
    stream: StreamPosition | None = field(default=None, compare=False)
    indexed_pass: IndexedPass | None = field(default=None, compare=False)


def _name(partition: int) -> str:
    return f"stream/{partition:05d}"
