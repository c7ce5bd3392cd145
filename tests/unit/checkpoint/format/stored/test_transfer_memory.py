"""Claims about the memory that devices read into and write from."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from keepstep.checkpoint.format.stored.chunking import PACK_NBYTES
from keepstep.checkpoint.format.stored.transfer_memory import (
    BLOCK_NBYTES,
    LARGE_PAGE_NBYTES,
    TransferMemory,
    TransferPool,
    allocate,
)


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_NBYTES + 1, LARGE_PAGE_NBYTES, 5 * 2**20 + 3])
def test_memory_is_aligned_and_large_enough_to_write_to_all_of_it(nbytes: int) -> None:
    memory = allocate(nbytes)
    assert memory.nbytes >= max(1, nbytes)
    assert memory.nbytes % BLOCK_NBYTES == 0
    assert memory.ctypes.data % BLOCK_NBYTES == 0
    memory[...] = 7
    if nbytes > LARGE_PAGE_NBYTES // 2:
        assert memory.ctypes.data % LARGE_PAGE_NBYTES == 0


def test_a_threads_memory_is_used_again_while_it_is_large_enough() -> None:
    memory = TransferMemory()
    first = memory.of_size(3 * BLOCK_NBYTES)
    assert memory.of_size(10) is first
    larger = memory.of_size(4 * BLOCK_NBYTES)
    assert larger.nbytes >= 4 * BLOCK_NBYTES
    assert memory.of_size(4 * BLOCK_NBYTES) is larger


def test_a_pool_gives_one_piece_of_memory_to_one_at_a_time_and_uses_it_again() -> None:
    pool = TransferPool()
    with pool.taken(100) as first, pool.taken(100) as second:
        addresses = {first.ctypes.data, second.ctypes.data}
        assert len(addresses) == 2
        assert (first.nbytes, second.nbytes) == (100, 100)
    with pool.taken(50) as again:
        assert again.ctypes.data in addresses


def test_a_pool_has_no_more_pieces_than_were_in_use_at_a_time() -> None:
    pool = TransferPool()
    for nbytes in (100, 5 * BLOCK_NBYTES, 3 * BLOCK_NBYTES, 9 * BLOCK_NBYTES):
        with pool.taken(nbytes) as memory:
            assert memory.nbytes == nbytes
    assert [unused.nbytes for unused in pool._unused] == [9 * BLOCK_NBYTES]


def test_memory_of_a_whole_pack_is_used_again() -> None:
    pool = TransferPool()
    with pool.taken(PACK_NBYTES + 4) as first:
        address = first.ctypes.data
    with pool.taken(PACK_NBYTES + 4) as second:
        assert second.ctypes.data == address


def test_trimming_frees_the_largest_first() -> None:
    pool = TransferPool()
    with ExitStack() as all_taken:
        for blocks in (3, 1, 2, 50):
            all_taken.enter_context(pool.taken(blocks * BLOCK_NBYTES))
    pool.trim(5 * BLOCK_NBYTES)
    assert [unused.nbytes // BLOCK_NBYTES for unused in pool._unused] == [1, 2]
    pool.trim(0)
    assert pool._unused == []


def test_lack_of_memory_is_told_as_such() -> None:
    with pytest.raises(MemoryError):
        allocate(2**60)
