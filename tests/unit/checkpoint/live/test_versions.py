"""Tests of how writes to tensors are noticed while they are copied."""

from __future__ import annotations

import pytest
import torch

from keepstep.checkpoint.errors import StateChanged
from keepstep.checkpoint.live.tensors import describe
from keepstep.checkpoint.live.versions import WatchedTensors


def test_a_write_between_two_looks_is_found_by_name() -> None:
    still, written = torch.ones(3), torch.ones(3)
    watched = WatchedTensors.of([describe("still", still), describe("written", written)])
    versions = watched.versions()
    watched.check_unchanged(versions, 7)
    written.add_(1)
    with pytest.raises(StateChanged, match="written was written to while step 7"):
        watched.check_unchanged(versions, 7)


def test_a_tensor_that_was_given_other_memory_is_found_by_name() -> None:
    moved = torch.ones(3)
    watched = WatchedTensors.of([describe("moved", moved)])
    versions = watched.versions()
    # Memory of another tensor, so that the allocator cannot return the same.
    moved.data = torch.zeros(3)
    with pytest.raises(StateChanged, match="moved was given other memory before step 7"):
        watched.check_unchanged(versions, 7)


def test_inference_tensors_count_no_writes_and_are_not_watched() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
    assert WatchedTensors.of([describe("inference", tensor)]).versions() == []
