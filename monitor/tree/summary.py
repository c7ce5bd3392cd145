"""What daemons of the tree tell each other: the form on the wire, and nothing else.

A summary is `KSM3`, the length of a JSON object (4 bytes, big-endian), that object, and then the records that it counts, 64
bytes each, as they lie in the rings, and the rows of digests. Nothing in it is executable, and every length is checked
before it is believed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from keepstep.monitor.diagnosis.tables import Digest
from keepstep.monitor.errors import ProtocolViolation
from keepstep.monitor.records import RECORD, VERSION, Communicator, Ending
from keepstep.monitor.telemetry.record_history import RankState, RecordHistory, sample_operations
from keepstep.monitor.tree.digest_relay import Outbox, as_bytes, counts, from_bytes

_HEAD = struct.Struct(">4sI")
_MAGIC = b"KSM3"
MAX_NBYTES = 1 << 30
"""More than this nobody sends: 80,000 ranks with 200 records each."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node as its monitor sees it.

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


@dataclass(frozen=True, slots=True)
class Summary:
    """What a daemon has to tell that is new since the number asked for.

    Args:
        incarnation: of the daemon; numbers of different ones have nothing to do with each other.
        number: ask for what is new since this, next time.
        present: all ranks there are, also those with nothing new.
        ranks: those that were heard of, with their new records.
        communicators: process groups not told before.
        nodes: nodes that were heard of.
        digests: for diagnosis, in order.
        missing: daemons below that do not answer, with the reason.
    """

    incarnation: str
    number: int
    present: tuple[int, ...]
    ranks: tuple[tuple[RankState, np.ndarray], ...]
    communicators: tuple[Communicator, ...]
    nodes: tuple[NodeFacts, ...]
    digests: tuple[Digest, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)


def summarize(
    history: RecordHistory,
    outbox: Outbox,
    nodes: Mapping[str, NodeFacts],
    missing: Mapping[str, str],
    incarnation: str,
    since: int,
    budget: int,
) -> Summary:
    """Return what is new since `since`, with about `budget` finished operations a rank at most."""
    return Summary(
        incarnation,
        history.number,
        tuple(sorted(history.ranks)),
        tuple(
            (kept.state, sample_operations(kept.since(since), budget))
            for kept in history.updated_since(since)
        ),
        history.communicators_since(since),
        tuple(nodes.values()),
        outbox.since(since),
        dict(missing),
    )


def encode(summary: Summary) -> bytes:
    """Return the summary as bytes."""
    told = {
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
    }
    body = json.dumps(told, separators=(",", ":")).encode()
    records = (records.tobytes() for _, records in summary.ranks)
    return b"".join(
        [_HEAD.pack(_MAGIC, len(body)), body, *records, *map(as_bytes, summary.digests)]
    )


def decode(data: bytes) -> Summary:
    """Return the summary that `encode` made bytes of.

    Raises:
        ProtocolViolation: it is none, is cut short, or comes from a version that this one does not understand.
    """
    try:
        magic, length = _HEAD.unpack_from(data)
        if magic != _MAGIC or _HEAD.size + length > len(data):
            raise ProtocolViolation("this is no monitor's summary")
        told = json.loads(data[_HEAD.size : _HEAD.size + length])
        if told["version"] != VERSION:
            raise ProtocolViolation(
                f"the other monitor speaks version {told['version']}, this one {VERSION}; install the same keepstep on all nodes"
            )
        ranks, offset = [], _HEAD.size + length
        for entry in told["ranks"]:
            count = entry.pop("count")
            if (
                not isinstance(count, int)
                or count < 0
                or offset + count * RECORD.itemsize > len(data)
            ):
                raise ProtocolViolation("the summary promises more records than it carries")
            records = np.frombuffer(data, RECORD, count, offset)
            offset += count * RECORD.itemsize
            ranks.append((RankState(**{**entry, "ending": Ending(entry["ending"])}), records))
        digests = []
        for rows in told["digests"]:
            digest, offset = from_bytes(data, offset, rows)
            digests.append(digest)
        if offset != len(data):
            raise ProtocolViolation("the summary carries more records than it promises")
        return Summary(
            str(told["incarnation"]),
            int(told["number"]),
            tuple(told["present"]),
            tuple(ranks),
            tuple(
                Communicator(identity, name, tuple(members))
                for identity, name, members in told["communicators"]
            ),
            tuple(NodeFacts(**node) for node in told["nodes"]),
            tuple(digests),
            told["missing"],
        )
    except (struct.error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProtocolViolation(f"this is no monitor's summary: {error}") from error
