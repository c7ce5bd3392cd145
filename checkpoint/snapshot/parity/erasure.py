"""The erasure code: computes parity blocks of data blocks, and lost blocks from the others.

Systematic Reed-Solomon over GF(2^8) with a Cauchy matrix (Bloemer et al., ICSI TR-95-048), its
columns scaled so that the first row of parity is all ones: with one parity block it is XOR. Scaling
columns keeps every square submatrix regular, so any `data` blocks out of `data + parity` determine
all blocks. The kernels are ISA-L's; they read and write the callers' memory in place and do not
hold the GIL. One call reads each source once, so a caller that works in tiles stays in the
processor's cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.snapshot.isal import isal

MAX_BLOCKS = 255
_TABLE_NBYTES = 32

Bytes = npt.NDArray[np.uint8]
Row = tuple[int, ...]


class Combination:
    """A linear combination of blocks, with the kernel's tables. Immutable, thus thread-safe."""

    def __init__(self, coefficients: Row) -> None:
        """Prepare for `len(coefficients)` sources."""
        count = len(coefficients)
        self._count = count
        self._tables = (ctypes.c_ubyte * (_TABLE_NBYTES * count))()
        isal().ec_init_tables(count, 1, (ctypes.c_ubyte * count)(*coefficients), self._tables)

    def into(self, target: Bytes, sources: Sequence[Bytes]) -> None:
        """Write the combination of the sources into the target.

        Args:
            target: contiguous bytes, which are overwritten.
            sources: contiguous bytes, each as long as the target, one for each coefficient.
        """
        if len(sources) != self._count or any(source.nbytes != target.nbytes for source in sources):
            raise ValueError(f"expected {self._count} sources of {target.nbytes} bytes each")
        addresses = (ctypes.c_void_p * self._count)(*[source.ctypes.data for source in sources])
        targets = (ctypes.c_void_p * 1)(target.ctypes.data)
        isal().ec_encode_data(target.nbytes, self._count, 1, self._tables, addresses, targets)


@cache
def parity_rows(data: int, parity: int) -> tuple[Row, ...]:
    """Return the coefficients of each parity block over the data blocks.

    Raises:
        ValueError: there are more than 255 blocks in total, or no data block.
    """
    if data < 1 or parity < 0 or data + parity > MAX_BLOCKS:
        raise ValueError(
            f"{data} data and {parity} parity blocks: 1 to {MAX_BLOCKS} in total are possible"
        )
    library = isal()
    matrix = (ctypes.c_ubyte * (data * (data + parity)))()
    library.gf_gen_cauchy1_matrix(matrix, data + parity, data)
    rows = [matrix[row * data : (row + 1) * data] for row in range(data, data + parity)]
    scales = [library.gf_inv(first) for first in rows[0]] if rows else []
    return tuple(
        tuple(library.gf_mul(c, s) for c, s in zip(row, scales, strict=True)) for row in rows
    )


@cache
def rebuilding_row(data: int, parity: int, present: Row, lost: int) -> Row:
    """Return the coefficients of a lost data block over the blocks that are present.

    Args:
        data: number of data blocks.
        parity: number of parity blocks.
        present: the numbers of the `data` blocks to combine; data blocks are numbered first, then
            parity blocks.
        lost: number of the lost data block.

    Raises:
        ValueError: `present` has too few or too many blocks.
    """
    if len(present) != data or len(set(present)) != data:
        raise ValueError(f"{data} blocks are needed to rebuild one, {len(set(present))} are given")
    rows = [
        *(tuple(int(i == j) for j in range(data)) for i in range(data)),
        *parity_rows(data, parity),
    ]
    matrix = (ctypes.c_ubyte * (data * data))(*[c for block in present for c in rows[block]])
    inverse = (ctypes.c_ubyte * (data * data))()
    if isal().gf_invert_matrix(matrix, inverse, data) != 0:
        raise AssertionError("every square submatrix of a Cauchy matrix is regular")
    return tuple(inverse[lost * data : (lost + 1) * data])
