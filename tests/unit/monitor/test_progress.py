"""Tests the progress board in shared memory."""

import os
import subprocess
import sys

from keepstep.monitor.progress import ProgressBoard


def test_board_returns_the_last_record_of_a_killed_writer() -> None:
    board = ProgressBoard.create("test")
    assert board.read() is None
    code = (
        "import os, signal, sys\nfrom keepstep.monitor.progress import ProgressBoard\n"
        "board = ProgressBoard(int(sys.argv[1])); board.write(3, 41); board.write(3, 42)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(board.descriptor)],
        pass_fds=(board.descriptor,),
        check=False,
    )
    progress = board.read()
    assert progress is not None
    assert (progress.generation, progress.step) == (3, 42)
    board.close()


def test_record_that_is_being_written_is_not_returned() -> None:
    board = ProgressBoard.create("test")
    board.write(1, 1)
    os.pwrite(board.descriptor, (3).to_bytes(8, "little"), 0)
    assert board.read() is None
    board.close()


def test_closed_board_returns_no_record() -> None:
    board = ProgressBoard.create("test")
    board.write(1, 1)
    board.close()
    board.close()
    assert board.read() is None
