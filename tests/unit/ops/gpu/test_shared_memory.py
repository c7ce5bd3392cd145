"""Claims about the memory that checks copy to."""

import mmap
import os

from ops.gpu.shared_memory import SharedMemory, pieces


def test_pieces_cover_the_memory_once() -> None:
    assert pieces(10, 4) == [(0, 4), (4, 4), (8, 2)]


def test_another_process_sees_what_was_written() -> None:
    nbytes = 9 * mmap.PAGESIZE
    with SharedMemory(nbytes) as memory:
        memory.touch()
        memory.tensor.fill_(7)
        with SharedMemory(nbytes, memory.path) as other:
            assert other.address != memory.address
            assert bool((other.tensor == 7).all())


def test_touching_allocates_every_page() -> None:
    with SharedMemory(99 * mmap.PAGESIZE) as memory:
        assert os.fstat(memory.descriptor).st_blocks == 0
        memory.touch()
        assert os.fstat(memory.descriptor).st_blocks * 512 >= memory.nbytes
