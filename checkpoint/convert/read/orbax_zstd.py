"""Decompresses frames of zstd to no more bytes than a caller expects. Pure.

A few bytes of zstd can stand for terabytes. So the frame's header and the headers of its blocks are
gone over first: they bound what the frame decompresses to. The format is that of RFC 8878.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

MOST_RATIO = 2**15
"""Bytes that a byte of zstd can stand for: a block of four bytes has at most 128 KiB."""

_MAGIC = 0xFD2FB528
_BLOCK_NBYTES = 2**17
_LARGEST_WINDOW_NBYTES = 2**27
_RLE, _COMPRESSED = 1, 2


def decompress_exactly(data: bytes, into: Bytes) -> None:
    """Fill memory with what one frame decompresses to.

    Args:
        data: the frame.
        into: contiguous memory of the size that it must have.

    Raises:
        ValueError: it is no frame, or one of another size.
    """
    content_nbytes, most_nbytes = _sizes(data)
    expected = content_nbytes if content_nbytes is not None else into.size
    if expected != into.size or most_nbytes < into.size:
        raise ValueError(
            f"{len(data)} bytes of zstd have {expected} bytes, or at most {most_nbytes}, where "
            f"{into.size} are expected"
        )
    if into.size:
        _decompress(data, into)


def decompress_within(data: bytes, most_nbytes: int) -> bytes:
    """Return what one frame decompresses to.

    Raises:
        ValueError: it is no frame, or may have more than `most_nbytes` bytes.
    """
    content_nbytes, bound = _sizes(data)
    if min(bound, bound if content_nbytes is None else content_nbytes) > most_nbytes:
        raise ValueError(
            f"{len(data)} bytes of zstd have up to {bound} bytes, and {most_nbytes} are the most "
            "that can be there"
        )
    return bytes(_decompress(data, None)) if bound else b""


def _decompress(data: bytes, into: Bytes | None) -> bytes | Bytes:
    # Only who reads such data needs the library.
    from numcodecs import zstd

    try:
        result: bytes | Bytes = zstd.decompress(data, into)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    return result


def _sizes(data: bytes) -> tuple[int | None, int]:
    """Return the size that a frame's header tells, and a bound that its blocks' headers give.

    Raises:
        ValueError: the bytes are not one frame.
    """
    if len(data) < 6 or int.from_bytes(data[:4], "little") != _MAGIC:
        raise ValueError("it is no frame of zstd")
    descriptor = data[4]
    is_single = bool(descriptor & 0x20)
    if descriptor & 0x0B:
        raise ValueError("its frame of zstd has reserved bits or needs a dictionary")
    position = 5
    if not is_single:
        exponent, mantissa = data[5] >> 3, data[5] & 7
        if (1 << (10 + exponent)) // 8 * (8 + mantissa) > _LARGEST_WINDOW_NBYTES:
            raise ValueError("its frame of zstd needs a window of more than 128 MiB")
        position += 1
    size_nbytes = (1 if is_single else 0, 2, 4, 8)[descriptor >> 6]
    content_nbytes = None
    if size_nbytes:
        content_nbytes = int.from_bytes(data[position : position + size_nbytes], "little")
        content_nbytes += 256 if size_nbytes == 2 else 0
        position += size_nbytes
    bound = 0
    is_last = False
    while not is_last:
        if position + 3 > len(data):
            raise ValueError("its frame of zstd ends too early")
        header = int.from_bytes(data[position : position + 3], "little")
        is_last, kind, nbytes = bool(header & 1), header >> 1 & 3, header >> 3
        if kind > _COMPRESSED or nbytes > _BLOCK_NBYTES:
            raise ValueError("its frame of zstd has a block that cannot be")
        bound += _BLOCK_NBYTES if kind == _COMPRESSED else nbytes
        position += 3 + (1 if kind == _RLE else nbytes)
    position += 4 if descriptor & 4 else 0
    if position != len(data):
        raise ValueError(f"its frame of zstd ends at byte {position}, and it has {len(data)}")
    return content_nbytes, bound
