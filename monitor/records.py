"""What a worker tells of itself, as values: operations, phases and measures, in records of one fixed form.

The form is that of the telemetry ring, of recorded traces, and of what diagnosis reads: a numpy structured array, 64 bytes a record,
little-endian. Times are seconds of the writer's monotonic clock, which all processes of one node share; 0.0 stands for "not yet".
Everything else about clocks is the reader's business.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

VERSION = 1

RECORD = np.dtype(
    [
        (
            "stamp",
            "<u8",
        ),  # 2 * (position + 1) once the record is whole, odd while it is written, 0 if it never was
        ("kind", "u1"),  # Kind
        ("code", "u1"),  # Operation, Phase or Measure, by kind
        ("dtype", "u1"),  # index into DTYPES; operations only
        ("flags", "u1"),  # of Flag
        ("communicator", "<u4"),  # id in the ring's table; operations only
        (
            "number",
            "<u8",
        ),  # operations: the communicator's sequence number, from 1; of a pair for send and receive; else the step
        (
            "nbytes",
            "<u8",
        ),  # operations: payload of this rank; measures: the value, as the bits of a float64
        (
            "peer",
            "<i4",
        ),  # global rank of the root, or of the other side of send and receive; -1: none
        ("step", "<u4"),  # optimizer step under way, from 1; 0: before the first or not known
        ("enqueued_s", "<f8"),  # operations: called; phases: began; measures: taken
        ("started_s", "<f8"),  # operations: began to run, where the backend tells, else as enqueued
        ("ended_s", "<f8"),  # operations: complete; phases: ended
    ]
)
assert RECORD.itemsize == 64

DTYPES = (
    "none", "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "complex64", "complex128", "other",
)  # fmt: skip


class Kind(IntEnum):
    """What a record is about."""

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
    """A part of a step; `STEP` is the whole."""

    STEP = 0
    DATA_WAIT = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    CHECKPOINT = 5
    GARBAGE_COLLECTION = 6
    EVALUATION = 7
    """Modules run without gradients: mostly between steps, and the other ranks may be waiting for it."""


class Measure(IntEnum):
    """A number that a worker reports once a step."""

    LOSS = 0
    GRADIENT_NORM = 1
    REPLICA_CHECKSUM = 2
    """Checksum (32 bits) of state that all replicas of a group, named by `communicator`, must agree on."""


class Flag(IntEnum):
    """Bits of `flags`."""

    ASYNCHRONOUS = 1
    DEVICE_TIMES = 2
    """`started_s` and `ended_s` were taken on the device."""
    FAILED = 4
    UNOBSERVED = 8
    """Nobody could tell when it ended: `ended_s` is only when it was last heard of."""


class Ending(IntEnum):
    """What a worker said of its end."""

    NONE = 1
    """Nothing: it runs, or a signal left it no time."""
    FINISHED = 2
    RAISED = 3
    """An exception of its own, that nobody caught, ended it."""
    FAILED = 4
    """Communication that failed ended it: mostly, because another rank had ended."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """A process group: `identity` is what records call it; the same on all its ranks, for it follows from name and ranks."""

    identity: int
    name: str
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, name: str, ranks: Sequence[int]) -> Communicator:
        """Return a process group with the identity that all its ranks give it; never 0, which stands for none."""
        told = f"{name}\0{','.join(map(str, ranks))}".encode()
        return cls(zlib.crc32(told) or 1, name, tuple(ranks))


@dataclass(frozen=True, slots=True)
class RankRecords:
    """What one rank told lately, as its node's monitor reads it.

    Args:
        rank: global rank.
        node: name of its node; clocks of different nodes are not comparable.
        records: whole records of dtype `RECORD`, oldest first, among them operations that have not ended.
        read_at_s: when they were read, by the node's monotonic clock.
        is_alive: whether the process exists.
        ending: what it said of its end.
        offset_s: what to add to the node's clock to have the job's; 0.0 until clocks are aligned.
        offset_error_s: how far that may be off; infinite until clocks are aligned.
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
    """What all ranks of one generation told lately: the input of diagnosis."""

    ranks: Mapping[int, RankRecords]
    communicators: Mapping[int, Communicator]


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return rows of one dtype, one part after the other; of at least one part."""
    whole: np.ndarray = np.concatenate([as_bytes(part) for part in parts]).view(parts[0].dtype)
    return whole


def as_bytes(rows: np.ndarray) -> np.ndarray:
    """Return the same rows, in place, as opaque ones of the same size: to copy, and to assign to."""
    raw: np.ndarray = rows.view(np.dtype((np.void, rows.dtype.itemsize)))
    return raw
