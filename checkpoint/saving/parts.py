"""Encodes the reports of parts, and publishes the checkpoint of them. Loads no PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.content_digest import DIGEST, digest_document, sum_of
from keepstep.checkpoint.format.layout.documents import merged_documents
from keepstep.checkpoint.format.stored.last_part import LastPart
from keepstep.checkpoint.format.stored.manifest import PartEntry
from keepstep.checkpoint.format.stored.object_names import Attempt
from keepstep.checkpoint.format.stored.shared_plan import TensorPlan, WriterPlan
from keepstep.checkpoint.format.stored.storage import Storage
from keepstep.checkpoint.format.stored.writer import ReadBox, publish, write_part


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """A rank's report to rank 0 about its part, once that is written.

    Attributes:
        listing: the part's listing.
        documents: the rank's documents, without those that another rank sends.
    """

    listing: PartEntry
    documents: Mapping[str, Json]


def encode_report(listing: PartEntry, documents: bytes) -> bytes:
    """Return a `PartReport` as JSON, with documents that are JSON already."""
    return b'{"listing":%b,"documents":%b}' % (json.dumps(asdict(listing)).encode(), documents)


def encode_reports(reports: Sequence[bytes | memoryview]) -> bytes:
    """Return all ranks' reports as JSON; nothing is decoded, for a training process calls this."""
    return b"[" + b",".join(reports) + b"]"


def decode_reports(data: bytes | bytearray) -> list[PartReport]:
    """Return what `encode_reports` encoded."""
    return [
        PartReport(listing=PartEntry(**report["listing"]), documents=report["documents"])
        for report in json.loads(data)
    ]


def publish_parts(
    storage: Storage, attempt: Attempt, tensors: TensorPlan, reports: Sequence[PartReport]
) -> None:
    """Publish a checkpoint of the parts of all ranks, in order of ranks.

    Raises as `keepstep.checkpoint.format.stored.writer.publish` does.
    """
    documents = merged_documents(report.documents for report in reports)
    listings = [report.listing for report in reports]
    digest = digest_document(sum_of(listing.content for listing in listings))
    contents = {**documents, DIGEST: digest}
    publish(storage, attempt, listings, tensors.tensors, tensors.writers, contents)


class DirectPart:
    """Writes a part in this process, directly from the tensors; a `PartWriter`.

    Args:
        storage: the job's storage.
        attempt: the attempt to write the checkpoint.
        rank: this rank.
        own: the chunks that it writes.
        tensors: all tensors, on rank 0.
        read_box: returns the bytes of a box.
        documents: the rank's documents.
        last: the objects of the last part that this process wrote.
    """

    def __init__(
        self,
        storage: Storage,
        attempt: Attempt,
        rank: int,
        own: WriterPlan,
        tensors: TensorPlan,
        read_box: ReadBox,
        documents: Mapping[str, Json],
        last: LastPart,
    ) -> None:
        self._storage = storage
        self._attempt = attempt
        self._rank = rank
        self._own = own
        self._tensors = tensors
        self._read_box = read_box
        self._documents = documents
        self._last = last
        self._report = b""

    def write(self, _: float | None) -> bool:
        """Write the part."""
        listing = write_part(
            self._storage,
            self._attempt,
            self._own.plan,
            [0],
            self._read_box,
            name=self._rank,
            with_content=True,
            last=self._last,
        )
        self._report = encode_report(listing, json.dumps(dict(self._documents)).encode())
        return True

    def report(self) -> bytes:
        """Return the report of the part."""
        return self._report

    def publish(self, reports: Sequence[memoryview], _: float | None) -> bool:
        """Publish the checkpoint."""
        decoded = decode_reports(encode_reports(reports))
        publish_parts(self._storage, self._attempt, self._tensors, decoded)
        return True
