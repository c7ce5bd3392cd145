"""Encodes the summaries that a daemon of the tree sends to its parent.

A summary is `KSM4`, the length of a JSON object (4 bytes, big-endian), that object, then the
records that it counts, 64 bytes each as in the rings, and the rows of digests. Nothing in it is
executable, and every length is checked before it is used.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from keepstep.monitor.diagnosis.metrics import NodeMetrics
from keepstep.monitor.diagnosis.tables import Digest
from keepstep.monitor.errors import ProtocolViolation
from keepstep.monitor.node.node_series import metrics_to_json
from keepstep.monitor.records import RECORD, VERSION, Communicator, Ending, has_meaning
from keepstep.monitor.telemetry.record_history import RankState, RecordHistory, sample_operations
from keepstep.monitor.tree.digest_relay import Outbox, as_bytes, counts, from_bytes

_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Identity = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
# Seconds of any clock: finite, and small enough to be calculated with.
_Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]

_HEAD = struct.Struct(">4sI")
_MAGIC = b"KSM4"
MAX_NBYTES = 1 << 30
"""Limit of a summary: 80,000 ranks with 200 records each."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The state of one node, reported by its monitor.

    Args:
        node: its name.
        metrics: its measures, as JSON.
        wall_s: its wall clock when they were taken.
        monotonic_s: its monotonic clock at the same instant.
        monitor_cpu_s: processor time that the monitor itself has used since it started.
    """

    node: str
    metrics: Mapping[str, Any]
    wall_s: float
    monotonic_s: float
    monitor_cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The changes at a daemon since the requested number.

    Args:
        incarnation: of the daemon; numbers of different incarnations are unrelated.
        number: the number to request changes since, next time.
        present: all known ranks, including those without changes.
        ranks: those that were read since, with their new records; without `has_records` those
            whose process or life has changed since.
        has_records: whether the records were asked for.
        communicators: new process groups.
        nodes: the known nodes.
        digests: for diagnosis, in order.
        missing: child daemons that do not answer, with the reason.
    """

    incarnation: str
    number: int
    present: tuple[int, ...]
    ranks: tuple[tuple[RankState, np.ndarray], ...]
    communicators: tuple[Communicator, ...]
    nodes: tuple[NodeFacts, ...]
    digests: tuple[Digest, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    has_records: bool = True


class _VersionOnly(msgspec.Struct):
    version: int


class _RankEntry(msgspec.Struct):
    """A `RankState`, and how many of its records follow."""

    rank: _Rank
    node: str
    pid: _Count
    incarnation: str
    is_alive: bool
    ending: Ending
    read_at_s: _Seconds
    progress_at_s: _Seconds
    generation: _Count
    world_size: _Count
    created_at_s: _Seconds
    count: _Count

    def state(self) -> RankState:
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "count"}
        return RankState(**fields)


class _NodeEntry(msgspec.Struct):
    """`NodeFacts`; the metrics are empty, or those of a `NodeMetrics`."""

    node: str
    metrics: dict[str, Any]
    wall_s: _Seconds
    monotonic_s: _Seconds
    monitor_cpu_s: _Seconds

    def facts(self) -> NodeFacts:
        metrics: dict[str, Any] = {}
        if self.metrics:
            metrics = metrics_to_json(msgspec.convert(self.metrics, NodeMetrics))
        return NodeFacts(self.node, metrics, self.wall_s, self.monotonic_s, self.monitor_cpu_s)


class _Header(msgspec.Struct):
    """The content of the JSON that `encode` writes."""

    incarnation: str
    number: _Count
    present: tuple[_Rank, ...]
    ranks: tuple[_RankEntry, ...]
    communicators: tuple[tuple[_Identity, str, tuple[_Rank, ...]], ...]
    nodes: tuple[_NodeEntry, ...]
    digests: tuple[tuple[_Count, ...], ...]
    missing: dict[str, str]
    has_records: bool = True


def summarize(
    history: RecordHistory,
    outbox: Outbox,
    nodes: Mapping[str, NodeFacts],
    missing: Mapping[str, str],
    incarnation: str,
    since: int,
    records_since: int | None,
    budget: int,
) -> Summary:
    """Return the changes since number `since`, and records since another number.

    Args:
        history: the records of all ranks.
        outbox: the digests.
        nodes: the known nodes, by name.
        missing: child daemons that do not answer, with the reason.
        incarnation: of this daemon.
        since: number of a reading; 0 for everything.
        records_since: the same for ranks' records; None for none.
        budget: finished operations of each rank, about and at most.
    """
    ranks = (
        ((rank.state, np.empty(0, RECORD)) for rank in history.turned_since(since))
        if records_since is None
        else (
            (rank.state, sample_operations(rank.since(records_since), budget))
            for rank in history.updated_since(records_since)
        )
    )
    return Summary(
        incarnation=incarnation,
        number=history.number,
        present=tuple(sorted(history.ranks)),
        ranks=tuple(ranks),
        communicators=history.communicators_since(since),
        nodes=tuple(nodes.values()),
        digests=outbox.since(since),
        missing=dict(missing),
        has_records=records_since is not None,
    )


def encode(summary: Summary) -> bytes:
    """Return the summary as bytes."""
    header = {
        "version": VERSION,
        "incarnation": summary.incarnation,
        "number": summary.number,
        "present": summary.present,
        "ranks": [{**asdict(state), "count": len(records)} for state, records in summary.ranks],
        "communicators": [
            [group.identity, group.name, group.ranks] for group in summary.communicators
        ],
        "nodes": [asdict(node) for node in summary.nodes],
        "digests": [counts(digest) for digest in summary.digests],
        "missing": dict(summary.missing),
        "has_records": summary.has_records,
    }
    body = json.dumps(header, separators=(",", ":")).encode()
    records = (records.tobytes() for _, records in summary.ranks)
    return b"".join(
        [_HEAD.pack(_MAGIC, len(body)), body, *records, *map(as_bytes, summary.digests)]
    )


def decode(data: bytes) -> Summary:
    """Return the summary that `encode` encoded.

    Fields that a newer monitor has added are ignored, records whose meaning is not known left out.

    Raises:
        ProtocolViolation: the bytes are not a summary, are cut short, or have another version; or
            numbers in them are out of range. Nothing else is raised, whatever the bytes are.
    """
    try:
        magic, length = _HEAD.unpack_from(data)
        if magic != _MAGIC or _HEAD.size + length > len(data):
            raise ProtocolViolation("this is no monitor's summary")
        encoded = memoryview(data)[_HEAD.size : _HEAD.size + length]
        version = msgspec.json.decode(encoded, type=_VersionOnly).version
        if version != VERSION:
            raise ProtocolViolation(
                f"the other monitor has protocol version {version}, this one {VERSION}; "
                "install the same keepstep on all nodes"
            )
        header = msgspec.json.decode(encoded, type=_Header)
        ranks, offset = [], _HEAD.size + length
        for entry in header.ranks:
            if offset + entry.count * RECORD.itemsize > len(data):
                raise ProtocolViolation("the summary announces more records than it contains")
            records = np.frombuffer(data, RECORD, entry.count, offset)
            offset += entry.count * RECORD.itemsize
            if len(records):
                records = records.compress(has_meaning(records))
            ranks.append((entry.state(), records))
        digests = []
        for rows in header.digests:
            digest, offset = from_bytes(data, offset, rows)
            digests.append(digest)
        if offset != len(data):
            raise ProtocolViolation("the summary contains more records than it announces")
        return Summary(
            incarnation=header.incarnation,
            number=header.number,
            present=header.present,
            ranks=tuple(ranks),
            communicators=tuple(
                Communicator(identity, name, ranks)
                for identity, name, ranks in header.communicators
            ),
            nodes=tuple(node.facts() for node in header.nodes),
            digests=tuple(digests),
            missing=header.missing,
            has_records=header.has_records,
        )
    # RecursionError: nesting deeper than the interpreter's stack allows.
    except (struct.error, msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise ProtocolViolation(f"this is no monitor's summary: {error}") from error
