"""Packs what ranks must agree on when they call a collective into one integer.

Integers allow comparing thousands of calls at once. Layout, from the top: 8 bits operation + 1 (so
0 means "not known"), 8 bits dtype, 16 bits root + 1, 32 bits payload. The payload is left out for
operations in which ranks may pass different sizes: gathers, scatters and exchanges of uneven parts.
"""

from __future__ import annotations

import numpy as np

from keepstep.monitor.records import DTYPES, Operation, has_code

ROOTED = (Operation.BROADCAST, Operation.REDUCE, Operation.GATHER, Operation.SCATTER)
EQUALLY_SIZED = (Operation.ALL_REDUCE, Operation.BROADCAST, Operation.REDUCE)
SYMMETRIC = (
    Operation.ALL_REDUCE,
    Operation.ALL_GATHER,
    Operation.REDUCE_SCATTER,
    Operation.ALL_TO_ALL,
    Operation.BARRIER,
)
"""No rank can leave before the last one arrives, and all leave nearly together: the rank with
the shortest duration arrived last."""


def signatures(operations: np.ndarray) -> np.ndarray:
    """Return the signatures of records of collectives.

    Args:
        operations: dtype RECORD; shape (operations,).

    Returns the signatures, uint64; shape (operations,).
    """
    code = operations["code"]
    root = np.where(
        has_code(operations, ROOTED), operations["peer"].astype(np.int64) + 1, 0
    ).astype(np.uint64)
    nbytes = np.where(has_code(operations, EQUALLY_SIZED), operations["nbytes"], 0) & np.uint64(
        0xFFFFFFFF
    )
    dtype = np.where(code == Operation.BARRIER, 0, operations["dtype"]).astype(np.uint64)
    packed: np.ndarray = (
        (code.astype(np.uint64) + np.uint64(1)) << np.uint64(56)
        | dtype << np.uint64(48)
        | (root & np.uint64(0xFFFF)) << np.uint64(32)
        | nbytes.astype(np.uint64)
    )
    return packed


def describe(signature: int) -> str:
    """Return a signature's text for people, such as `all_reduce of 4096 bytes of float32`."""
    code = (signature >> 56) - 1
    if code < 0:
        return "an unknown operation"
    operation = Operation(code)
    dtype, root, nbytes = (
        (signature >> 48) & 0xFF,
        ((signature >> 32) & 0xFFFF) - 1,
        signature & 0xFFFFFFFF,
    )
    text = operation.name.lower()
    if operation in EQUALLY_SIZED:
        text += f" of {nbytes} bytes"
    if operation is not Operation.BARRIER and dtype:
        text += f" of {DTYPES[dtype]}"
    # Flight Recorder's dumps do not record the root.
    return text + (f" with root {root}" if operation in ROOTED and root >= 0 else "")


def size_classes(nbytes: np.ndarray) -> np.ndarray:
    """Return the size class of each payload, uint8: 0 for none, else 1 + floor(log2(nbytes)).

    Transfer times depend on the order of magnitude of the payload.
    """
    classes = np.zeros(len(nbytes), np.uint8)
    is_positive = nbytes > 0
    classes[is_positive] = 1 + np.log2(nbytes[is_positive].astype(np.float64)).astype(np.uint8)
    return classes
