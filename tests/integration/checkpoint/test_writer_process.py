"""Claims about the process that writes checkpoints in the background."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.saving import writer_process
from keepstep.checkpoint.saving.messages import WritePart, Written
from keepstep.checkpoint.saving.writer_process import WriterProcess
from tests.adaptive_timeouts import patient


def test_a_request_goes_on_after_a_limit_and_its_failure_is_raised(tmp_path: Path) -> None:
    process = WriterProcess.start()
    try:
        part = WritePart(
            url=str(tmp_path), directory=str(tmp_path), step=1, generation=0, attempt="a"
        )
        process.begin(part)
        assert process.is_busy
        assert process.reply(Written, 0.0) is None
        assert process.is_busy
        with pytest.raises(CheckpointError, match="a plan is sent before"):
            process.reply(Written, patient(60.0))
        assert not process.is_busy
        assert process.is_running
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
