"""The erasure code: parity of blocks that lie in different memories, and lost blocks from what is left.

Systematic Reed-Solomon over GF(2^8) with a Cauchy matrix (Bloemer et al., ICSI TR-95-048), its columns scaled so that the first row of
parity is all ones: with one parity block it is XOR. Scaling columns keeps every square submatrix regular, so any `data` blocks out of
`data + parity` give all. The kernels are ISA-L's (the wheel of pyeclib carries its library), called on memory where it lies and
without the interpreter's lock; one call reads each source once, so a caller that goes tile by tile stays in the processor's cache.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.errors import CheckpointError

MAX_BLOCKS = 255
_TABLE_NBYTES = 32

Bytes = npt.NDArray[np.uint8]
Row = tuple[int, ...]


class Combination:
    """A linear combination of blocks, with the tables that its kernel wants. Stateless once made: for any thread."""

    def __init__(self, coefficients: Row) -> None:
        """Prepare for `len(coefficients)` sources."""
        count = len(coefficients)
        self._count = count
        self._tables = (ctypes.c_ubyte * (_TABLE_NBYTES * count))()
        _isal().ec_init_tables(count, 1, (ctypes.c_ubyte * count)(*coefficients), self._tables)

    def into(self, target: Bytes, sources: Sequence[Bytes]) -> None:
        """Write the combination of the sources, all as long as the target and contiguous, over the target."""
        if len(sources) != self._count or any(source.nbytes != target.nbytes for source in sources):
            raise ValueError(f"{self._count} sources of {target.nbytes} bytes are combined")
        addresses = (ctypes.c_void_p * self._count)(*[source.ctypes.data for source in sources])
        targets = (ctypes.c_void_p * 1)(target.ctypes.data)
        _isal().ec_encode_data(target.nbytes, self._count, 1, self._tables, addresses, targets)


@cache
def parity_rows(data: int, parity: int) -> tuple[Row, ...]:
    """Return the coefficients of each parity block over the data blocks.

    Raises:
        ValueError: there are more than 255 blocks in all, or none.
    """
    if data < 1 or parity < 0 or data + parity > MAX_BLOCKS:
        raise ValueError(
            f"{data} data and {parity} parity blocks: 1 to {MAX_BLOCKS} in all are possible"
        )
    isal = _isal()
    matrix = (ctypes.c_ubyte * (data * (data + parity)))()
    isal.gf_gen_cauchy1_matrix(matrix, data + parity, data)
    rows = [matrix[row * data : (row + 1) * data] for row in range(data, data + parity)]
    scales = [isal.gf_inv(first) for first in rows[0]] if rows else []
    return tuple(tuple(isal.gf_mul(c, s) for c, s in zip(row, scales, strict=True)) for row in rows)


@cache
def rebuilding_row(data: int, parity: int, present: Row, lost: int) -> Row:
    """Return the coefficients that give a lost data block.

    Args:
        data: number of data blocks.
        parity: number of parity blocks.
        present: the `data` blocks to combine, by number: data blocks first, then parity blocks.
        lost: number of the data block.

    Raises:
        ValueError: too few or too many blocks are given.
    """
    if len(present) != data or len(set(present)) != data:
        raise ValueError(f"{data} blocks are needed to rebuild one, {len(set(present))} are given")
    rows = [
        *(tuple(int(i == j) for j in range(data)) for i in range(data)),
        *parity_rows(data, parity),
    ]
    matrix = (ctypes.c_ubyte * (data * data))(*[c for block in present for c in rows[block]])
    inverse = (ctypes.c_ubyte * (data * data))()
    if _isal().gf_invert_matrix(matrix, inverse, data) != 0:
        raise AssertionError("every square submatrix of a Cauchy matrix is regular")
    return tuple(inverse[lost * data : (lost + 1) * data])


@cache
def _isal() -> ctypes.CDLL:
    """Load ISA-L: the copy beside pyeclib, else the system's."""
    files = importlib.metadata.files("pyeclib") or ()
    carried = [str(file.locate()) for file in files if file.name.startswith("libisal")]
    found = carried[0] if carried else ctypes.util.find_library("isal")
    if found is None:
        raise CheckpointError(
            "ISA-L is not on this machine: install pyeclib from its wheel, or the package libisal2"
        )
    library = ctypes.CDLL(found)
    library.gf_mul.restype = library.gf_inv.restype = ctypes.c_ubyte
    return library
