"""Claims about the buffer of a save in the background when the system refuses it."""

from __future__ import annotations

import pytest
import torch

from keepstep.checkpoint.live.shared_buffer import SharedBuffer
from keepstep.checkpoint.live.state_copies import HostCopies

CPU = torch.device("cpu")


def test_buffer_that_cannot_be_locked_is_not_taken_for_one_that_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("refused")

    buffer = SharedBuffer()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(HostCopies, "lock", refuse)
            with pytest.raises(RuntimeError, match="refused"):
                buffer.reserve(1000, CPU, lambda: 2**30)
        assert buffer.reserve(1000, CPU, lambda: 2**30), "the other process has no buffer yet"
        assert not buffer.reserve(1000, CPU, lambda: 2**30)
    finally:
        buffer.close()
