"""Claims about the buffer of a save in the background: refusals, failures, modes of the caller."""

from __future__ import annotations

import os
import threading
import weakref

import numpy as np
import pytest
import torch

from keepstep.checkpoint.live import state_copies
from keepstep.checkpoint.live.packing import pack
from keepstep.checkpoint.live.shared_buffer import SharedBuffer
from keepstep.checkpoint.live.state_copies import HostCopies
from keepstep.checkpoint.live.tensors import describe
from tests.adaptive_timeouts import patient

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


@pytest.mark.parametrize("is_first_in_inference_mode", [True, False])
def test_tensors_are_copied_whether_or_not_the_caller_is_in_inference_mode(
    is_first_in_inference_mode: bool,
) -> None:
    tensor = torch.ones(5)
    tensors = [describe("a", tensor)]
    entries, nbytes = pack(tensors)
    buffer = SharedBuffer()
    try:
        for number in (0, 1):
            tensor.fill_(float(number))
            with torch.inference_mode(is_first_in_inference_mode == (number == 0)):
                buffer.reserve(nbytes, CPU, lambda: 2**30)
                buffer.begin_copy(tensors, entries).result(patient(60.0))
            copied = np.frombuffer(os.pread(buffer.descriptor, 20, 0), np.float32)
            assert copied.tolist() == [float(number)] * 5
    finally:
        buffer.close()


def test_failure_of_a_copy_is_its_result_and_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no device")

    tensors = [describe("a", torch.ones(5))]
    entries, nbytes = pack(tensors)
    buffer = SharedBuffer()
    try:
        buffer.reserve(nbytes, CPU, lambda: 2**30)
        with monkeypatch.context() as patch:
            patch.setattr(state_copies, "copy_tensors", refuse)
            with pytest.raises(RuntimeError, match="no device"):
                buffer.begin_copy(tensors, entries).result(patient(60.0))
        buffer.begin_copy(tensors, entries).result(patient(60.0))
    finally:
        buffer.close()


def test_between_copies_the_thread_keeps_no_tensor_and_closing_ends_it() -> None:
    tensors = [describe("a", torch.ones(5))]
    entries, nbytes = pack(tensors)
    before = set(threading.enumerate())
    buffer = SharedBuffer()
    try:
        buffer.reserve(nbytes, CPU, lambda: 2**30)
        is_gone = threading.Event()
        reference = weakref.ref(tensors[0].data, lambda _: is_gone.set())
        buffer.begin_copy(tensors, entries).result(patient(60.0))
        tensors.clear()
        assert is_gone.wait(patient(60.0))
        assert reference() is None
        (thread,) = set(threading.enumerate()) - before
    finally:
        buffer.close()
    thread.join(patient(60.0))
    assert not thread.is_alive()
