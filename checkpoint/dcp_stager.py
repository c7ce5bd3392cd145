"""Copies state for `torch.distributed.checkpoint.async_save` into memory that is kept.

```python
stager = Stager()
dcp.async_save(state, storage_writer=Writer(url, step=1000), async_stager=stager)
```

DCP's own stager gets new memory for every save, and pays for its pages while training waits. This
one keeps its memory, page-locked for a GPU, and copies without the GIL. It works with the writers
of DCP too.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from keepstep.available_memory import available_nbytes
from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.layout.integers import round_up
from keepstep.checkpoint.live.packing import ALIGNMENT
from keepstep.checkpoint.live.state_copies import copies_from
from keepstep.checkpoint.live.tensors import copyable, local_of, placed_like
from keepstep.checkpoint.snapshot.arena import Arena
from keepstep.torch_internals import flatten_tree, unflatten_tree

_NUMBER = 0


class Stager(AsyncStager):
    """A stager for `dcp.async_save`, which returns when the state is copied.

    Use one for all saves, from one thread. A save that begins while the last one is still written
    gets memory of its own, which is kept as well.
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []
        weakref.finalize(self, _close, self._buffers)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: `stage` returns when all is copied."""
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state, whose tensors are in the CPU's memory.

        Tensors that are the same memory are copied once. Values other than tensors, and tensors
        without memory of their own, such as sparse ones, are copied deeply.

        Raises:
            CheckpointError: the system has too little memory left.
            RuntimeError: the device has failed.
        """
        leaves, structure = flatten_tree(state_dict)
        memories = [_memory_of(leaf) for leaf in leaves]
        sources = {_place(memory): memory for memory in memories if memory is not None}
        with torch.no_grad():
            copies = dict(zip(sources, self._copied(list(sources.values())), strict=True))
            staged = [
                copy.deepcopy(leaf) if memory is None else _like(leaf, copies[_place(memory)])
                for leaf, memory in zip(leaves, memories, strict=True)
            ]
        result: dict[str, Any] = unflatten_tree(staged, structure)
        return result

    def synchronize_staging(self) -> None:
        """Return at once: all is copied."""

    def close(self) -> None:
        """Free the memory; that of a save in progress goes with its end."""
        _close(self._buffers)

    def _copied(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of tensors."""
        device = next((t.device for t in sources if t.device.type == "cuda"), torch.device("cpu"))
        nbytes = sum(round_up(tensor.nbytes, ALIGNMENT) for tensor in sources)
        return self._buffer(nbytes, device).copied(sources)

    def _buffer(self, nbytes: int, device: torch.device) -> _Buffer:
        """Return a buffer that is not in use; those of other sizes or devices are freed."""
        unused = [buffer for buffer in self._buffers if not buffer.is_in_use]
        for buffer in unused:
            if buffer.nbytes >= nbytes and buffer.device == device:
                return buffer
        for buffer in unused:
            self._buffers.remove(buffer)
            buffer.close()
        left_nbytes = available_nbytes()
        if nbytes > left_nbytes:
            raise CheckpointError(
                f"{nbytes} bytes of memory are needed to copy this rank's tensors, and the system "
                f"has {left_nbytes} left; save with dcp.save, or use more ranks"
            )
        self._buffers.append(_Buffer(nbytes, device))
        return self._buffers[-1]


class _Buffer:
    """Memory for the copies of one state, in use while a tensor of it exists."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.device = device
        self._arena = Arena.create(nbytes)
        self._copies = copies_from(device)
        self._array: Callable[[], object] = lambda: None
        try:
            self._arena.populate()
            self._copies.lock(_NUMBER, self._arena)
        except BaseException:
            self.close()
            raise

    @property
    def is_in_use(self) -> bool:
        """Whether tensors over this memory exist."""
        return self._array() is not None

    def copied(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of tensors, one after the other in this memory."""
        # Each tensor keeps this array. None begins inside its storage: PyTorch does not pickle
        # such DTensors, which it sends to the process that writes.
        array = np.frombuffer(self._arena.buffer, np.uint8)
        self._array = weakref.ref(array)
        targets, offset = [], 0
        for source in sources:
            memory = torch.from_numpy(array[offset : offset + source.nbytes])
            targets.append(memory.view(source.dtype).reshape(source.shape))
            offset += round_up(source.nbytes, ALIGNMENT)
        mark = self._copies.mark()
        self._copies.begin(list(map(copyable, targets)), list(map(copyable, sources)), mark)()
        return targets

    def close(self) -> None:
        """Free the memory, once no tensor over it is left."""
        self._copies.close()
        self._arena.close()


def _close(buffers: list[_Buffer]) -> None:
    while buffers:
        buffers.pop().close()


def _memory_of(value: object) -> torch.Tensor | None:
    """Return the plain tensor that a tensor's elements on this rank are in; None if none is."""
    local = local_of(value) if isinstance(value, DTensor) else value
    if type(local) not in (torch.Tensor, nn.Parameter):
        return None
    assert isinstance(local, torch.Tensor)
    return None if local.layout != torch.strided or local.is_meta else local.detach()


def _place(memory: torch.Tensor) -> object:
    """Return what tensors of the same elements in the same memory have in common."""
    place = (memory.device, memory.data_ptr(), memory.is_conj(), memory.is_neg())
    return (*place, memory.dtype, memory.shape, memory.stride())


def _like(tensor: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """Return a tensor of copied elements, sharded as another one."""
    return placed_like(tensor, copied) if isinstance(tensor, DTensor) else copied
