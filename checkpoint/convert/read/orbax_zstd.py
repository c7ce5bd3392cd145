"""Decompresses zstd, and reports damage by one kind of error."""

from __future__ import annotations


def decompress(data: bytes) -> bytes:
    """Return what frames of zstd decompress to.

    Raises:
        ValueError: they are damaged, or no frames.
    """
    # Only readers of such data need the library.
    from numcodecs import zstd

    try:
        return bytes(zstd.decompress(data))
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise ValueError(f"zstd: {error}") from None
