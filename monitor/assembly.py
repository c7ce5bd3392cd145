"""Which parts a daemon of the command is made of. The only place that knows them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from monitor.contracts import StoryTeller, VerdictPublisher
from monitor.daemon import Parts
from monitor.probes import NodeProbe
from monitor.ring_files import job_directory
from monitor.ring_source import RingSource


def assemble(
    job: str,
    node: str,
    *,
    diagnoses: bool,
    children: Callable[[], Sequence[str]] = tuple,
    publisher: VerdictPublisher | None = None,
    teller: StoryTeller | None = None,
) -> Parts:
    """Return the parts for a job's daemon on this node; whoever gets them closes them."""
    return Parts(
        probe=NodeProbe(node),
        reader=RingSource(job_directory(job)),
        publisher=publisher,
        teller=teller,
        children=children,
    )
