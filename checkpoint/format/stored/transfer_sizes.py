"""Sizes of reads and writes past the page cache. Pure."""

from __future__ import annotations

import mmap

BLOCK_NBYTES = mmap.PAGESIZE
"""Bytes that divide addresses, offsets and sizes."""

LARGE_PAGE_NBYTES = 2 * 2**20
"""Bytes that a device transfers as one piece of memory, where the system has large pages."""
