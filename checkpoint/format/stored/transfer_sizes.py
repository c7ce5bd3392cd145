"""Sizes of reads and writes past the page cache. Pure."""

from __future__ import annotations

import mmap

BLOCK_NBYTES = mmap.PAGESIZE
"""What addresses, offsets and sizes are multiples of."""

LARGE_PAGE_NBYTES = 2 * 2**20
"""What a device transfers as one piece of memory, where the system has large pages."""
