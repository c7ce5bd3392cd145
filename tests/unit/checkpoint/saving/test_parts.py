"""Claims about the reports of parts, which pass through training processes as bytes."""

from __future__ import annotations

import math

from keepstep.checkpoint.format.stored.manifest import PartEntry
from keepstep.checkpoint.saving.parts import decode_reports, encode_report, encode_reports


def test_documents_keep_numbers_that_are_not_finite() -> None:
    def report(documents: bytes) -> bytes:
        return encode_report(PartEntry("part", 1, 2, 2**64 - 1), documents)

    reports = [report(b"{}"), memoryview(report(b'{"values":{"loss":NaN,"best":Infinity}}'))]
    first, second = decode_reports(encode_reports(reports))
    assert (first.listing.name, first.listing.content, first.documents) == ("part", 2**64 - 1, {})
    assert math.isnan(second.documents["values"]["loss"])
    assert second.documents["values"]["best"] == math.inf
