"""Checksum of bytes, from those of the pieces that they consist of, without the bytes.

Pure. What follows a piece changes its CRC as a linear map over bits does, which depends only on how
many bytes follow (as zlib's `crc32_combine`, for the polynomial of CRC-32C, RFC 3720 section 12.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

_POLYNOMIAL = 0x82F63B78
"""Of CRC-32C, the lowest bit for the highest power."""

_Map = tuple[int, ...]
"""A linear map of 32 bits: what it makes of each of them, from the lowest on."""


def joined_crc32c(checksums: Sequence[int], nbytes: int) -> int:
    """Return the CRC-32C of pieces that follow each other.

    Args:
        checksums: those of the pieces, in order.
        nbytes: the size of each piece.
    """
    joined = 0
    for checksum in checksums:
        joined = _image(_followed_by(nbytes), joined) ^ checksum
    return joined


def _image(linear: _Map, bits: int) -> int:
    image = 0
    for column in linear:
        if bits & 1:
            image ^= column
        bits >>= 1
    return image


def _twice(linear: _Map) -> _Map:
    return tuple(_image(linear, column) for column in linear)


@lru_cache(maxsize=256)
def _followed_by(nbytes: int) -> _Map:
    """Return what so many bytes, all zero, make of the checksum before them."""
    # Of one bit: the lowest is shifted out, and adds the polynomial; each other moves down by one.
    power: _Map = (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    for _ in range(3):
        power = _twice(power)
    result: _Map = tuple(1 << bit for bit in range(32))
    while nbytes:
        if nbytes & 1:
            result = tuple(_image(power, column) for column in result)
        power = _twice(power)
        nbytes >>= 1
    return result
