"""Claims about the memory that devices read into and write from."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from keepstep.checkpoint.stored import transfer_memory
from keepstep.checkpoint.stored.transfer_memory import (
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


def test_a_pool_keeps_no_more_unused_memory_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_memory, "_MAX_UNUSED_NBYTES", 3 * BLOCK_NBYTES)
    pool = TransferPool()
    with ExitStack() as all_taken:
        for _ in range(5):
            all_taken.enter_context(pool.taken(BLOCK_NBYTES))
    assert len(pool._unused) == 3
    with pool.taken(4 * BLOCK_NBYTES):
        pass
    assert pool._unused == []
