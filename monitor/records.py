"""Defines what a worker records about itself: operations, phases and measures, in one fixed form.

The telemetry ring, recorded traces and the input of diagnosis share this form: a numpy structured
array, 64 bytes a record, little-endian. Times are seconds of the writer's monotonic clock, which
all processes of one node share; 0.0 means "not yet". The reader aligns clocks of different nodes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import numpy as np

VERSION = 2

RECORD = np.dtype(
    [
        # 2 * (position + 1) once the record is complete, odd while it is written, 0 before.
        ("stamp", "<u8"),
        ("kind", "u1"),  # Kind
        ("code", "u1"),  # Operation, Phase or Measure, by kind
        ("dtype", "u1"),  # index into DTYPES; operations only
        ("flags", "u1"),  # of Flag
        ("communicator", "<u4"),  # id in the ring's table; operations only
        # Operations: sequence number in the communicator, from 1; for send and receive, the
        # sequence number of the pair. Phases and measures: the step.
        ("number", "<u8"),
        # Operations: payload of this rank. Measures: the value, as the bits of a float64.
        ("nbytes", "<u8"),
        # Global rank of the root, or of the other side of send and receive; -1: none.
        ("peer", "<i4"),
        ("step", "<u4"),  # current optimizer step, from 1; 0: before the first, or not known
        ("enqueued_s", "<f8"),  # operations: called; phases: began; measures: taken
        # Operations: began to run. With DEVICE_TIMES on the device, 0.0 until that is seen;
        # otherwise the same as enqueued_s.
        ("started_s", "<f8"),
        # Operations: complete; phases: ended. An operation that runs on a device is complete when
        # its end is seen there, whenever its call returned.
        ("ended_s", "<f8"),
    ]
)
assert RECORD.itemsize == 64

DTYPES = (
    "none", "bool", "uint8", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "complex64", "complex128", "other",
)  # fmt: skip


class Kind(IntEnum):
    """The kind of event that a record describes."""

    OPERATION = 1
    PHASE = 2
    MEASURE = 3


class Operation(IntEnum):
    """An operation of torch.distributed."""

    OTHER = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    BROADCAST = 4
    REDUCE = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9
    SEND = 10
    RECEIVE = 11


class Phase(IntEnum):
    """A part of a step; `STEP` is the entire step."""

    STEP = 0
    DATA_WAIT = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    CHECKPOINT = 5
    GARBAGE_COLLECTION = 6
    EVALUATION = 7
    """Modules run without gradients, mostly between steps; other ranks may wait for it."""


class Measure(IntEnum):
    """A number that a worker reports once a step."""

    LOSS = 0
    GRADIENT_NORM = 1
    REPLICA_CHECKSUM = 2
    """Checksum (32 bits) of state that must be equal on all ranks of `communicator`."""
    TOKENS = 3
    """Tokens that this rank takes part of the step's batch; 0 if another rank counts them, as of
    ranks of one tensor-parallel or pipeline-parallel group."""


class Flag(IntEnum):
    """Bits of `flags`."""

    ASYNCHRONOUS = 1
    DEVICE_TIMES = 2
    """`started_s` and `ended_s` are those of the device, 0.0 until it is seen there."""
    FAILED = 4
    UNOBSERVED = 8
    """The end cannot be seen. `ended_s` is the last time at which the operation was seen, or 0.0 if
    only its call was: then it is not known whether it runs, has ended, or has begun."""
    LAUNCHED = 16
    """It is in a queue of its device, which has not begun it while `started_s` is 0.0. With
    DEVICE_TIMES and without this, the host is still in the call, or launches it with later ones."""


class Ending(IntEnum):
    """How a process ended, as it recorded it itself."""

    NONE = 1
    """Nothing recorded: it runs, or a signal killed it before it could record anything."""
    FINISHED = 2
    RAISED = 3
    """An uncaught exception of its own program ended it."""
    FAILED = 4
    """Failed communication ended it; usually because another rank had ended."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """A process group.

    `identity` is its id in records. It is derived from name and ranks, so it is equal on all ranks.
    """

    identity: int
    name: str
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, name: str, ranks: Sequence[int]) -> Communicator:
        """Return a process group with its identity; never 0, which means "no communicator"."""
        encoded = f"{name}\0{','.join(map(str, ranks))}".encode()
        return cls(zlib.crc32(encoded) or 1, name, tuple(ranks))


@dataclass(frozen=True, slots=True)
class RankRecords:
    """The recent records of one rank, as its node's monitor read them.

    Args:
        rank: global rank.
        node: name of its node; clocks of different nodes are not comparable.
        records: complete records of dtype `RECORD`, oldest first, including operations that have
            not ended.
        read_at_s: when they were read, by the node's monotonic clock.
        is_alive: whether the process exists.
        ending: how the process ended, as it recorded it.
        offset_s: the job's clock minus the node's clock; 0.0 until clocks are aligned.
        offset_error_s: largest error of `offset_s`; infinite until clocks are aligned.
    """

    rank: int
    node: str
    records: np.ndarray
    read_at_s: float
    is_alive: bool = True
    ending: Ending = Ending.NONE
    offset_s: float = 0.0
    offset_error_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class JobRecords:
    """The recent records of all ranks of one generation: the input of diagnosis."""

    ranks: Mapping[int, RankRecords]
    communicators: Mapping[int, Communicator]


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate one or more arrays of the same dtype."""
    rows: np.ndarray = np.concatenate([as_bytes(part) for part in parts]).view(parts[0].dtype)
    return rows


def as_bytes(rows: np.ndarray) -> np.ndarray:
    """Return a view of the rows as opaque items of the same size, which copy faster than fields."""
    raw: np.ndarray = rows.view(np.dtype((np.void, rows.dtype.itemsize)))
    return raw


def is_open(records: np.ndarray) -> np.ndarray:
    """Return which records have not ended; those whose end cannot be seen are not among them."""
    open_records: np.ndarray = (records["ended_s"] <= 0) & (
        (records["flags"] & Flag.UNOBSERVED) == 0
    )
    return open_records


def arrival_times(operations: np.ndarray | np.void) -> np.ndarray:
    """Return when operations began on the device, where that is known, or else were called."""
    is_known = ((operations["flags"] & Flag.DEVICE_TIMES) != 0) & (operations["started_s"] > 0)
    return np.where(is_known, operations["started_s"], operations["enqueued_s"])


def is_queued(operations: np.ndarray) -> np.ndarray:
    """Return which operations are in a queue of their device, which has not begun them."""
    queued: np.ndarray = (
        ((operations["flags"] & (Flag.LAUNCHED | Flag.UNOBSERVED)) == Flag.LAUNCHED)
        & (operations["started_s"] <= 0)
        & (operations["ended_s"] <= 0)
    )
    return queued


def is_unlaunched(operations: np.ndarray) -> np.ndarray:
    """Return which operations are called and in no queue of their device yet."""
    unlaunched: np.ndarray = (
        (operations["flags"] & (Flag.DEVICE_TIMES | Flag.LAUNCHED | Flag.UNOBSERVED))
        == Flag.DEVICE_TIMES
    ) & (operations["ended_s"] <= 0)
    return unlaunched


def has_code(records: np.ndarray, codes: tuple[int, ...]) -> np.ndarray:
    """Return which records, or rows of another table, have one of these codes.

    For as few records as a reading has, `numpy.isin` takes many times as long.
    """
    found: np.ndarray = _table_of(codes)[records["code"]]
    return found


@cache
def _table_of(codes: tuple[int, ...]) -> np.ndarray:
    """Return whether each code is one of these."""
    table = np.zeros(256, bool)
    table[list(codes)] = True
    table.flags.writeable = False
    return table


_KNOWN = np.zeros((256, 256), bool)
for _kind, _codes in (
    (Kind.OPERATION, Operation),
    (Kind.PHASE, Phase),
    (Kind.MEASURE, Measure),
):
    _KNOWN[_kind, [code.value for code in _codes]] = True


def has_meaning(records: np.ndarray) -> np.ndarray:
    """Return which records this version can interpret.

    The others come from a newer version, or from something that is not a worker: their kind, code
    or data type is unknown, or a time is no number.
    """
    known: np.ndarray = _KNOWN[records["kind"], records["code"]]
    known &= records["dtype"] < len(DTYPES)
    for name in ("enqueued_s", "started_s", "ended_s"):
        known &= np.isfinite(records[name])
    return known
