"""Claims about the process that writes checkpoints in the background."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keepstep.checkpoint.saving import writer_process
from keepstep.checkpoint.saving.messages import WritePart
from keepstep.checkpoint.saving.writer_process import WriterProcess
from tests.adaptive_timeouts import patient


class GivenUp(Exception):
    pass


def test_process_whose_reply_nobody_waits_for_is_ended(tmp_path: Path) -> None:
    """Its reply would be taken for that to the next request."""

    def give_up() -> None:
        raise GivenUp

    process = WriterProcess.start()
    try:
        part = WritePart(
            url=str(tmp_path), directory=str(tmp_path), step=1, generation=0, attempt="a"
        )
        with pytest.raises(GivenUp):
            process.write(part, give_up, 0.0)
        assert not process.is_running
    finally:
        process.close()


def test_process_is_ended_though_a_forked_one_has_its_connection_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As loaders have. It was killed after five seconds, each time."""
    monkeypatch.setattr(writer_process, "_END_S", patient(20))
    process = WriterProcess.start()
    copied = os.dup(process._end.fileno())
    try:
        process.close()
        assert process._process.returncode == 0
    finally:
        os.close(copied)
