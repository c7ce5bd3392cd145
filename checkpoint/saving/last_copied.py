"""Finds the tensors that the last save copied: the next one copies them before it captures a state.

To capture some thousand tensors takes tens of milliseconds, and training waits for the copy. So it
begins with what was copied the last time, and counts if the captured state turns out to be the same
tensors, in the same memory, unwritten since. Between saves tensors are referred to weakly: what the
user drops is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from keepstep.checkpoint.live.tensors import LiveTensor, local_of

_OWNERS = (torch.Tensor, nn.Parameter, nn.Buffer, DTensor)
"""Others may have memory that comes and goes while a state is captured, as FSDP1's parameters."""


_LEAST_NBYTES = 2**17
"""On average: to find a tensor again takes 2 us, in which so much is copied."""


@dataclass(frozen=True, slots=True)
class EarlySources:
    """What is copied before the state is captured.

    Attributes:
        data: the tensors' memory.
        versions: their owners' version counters before the copy.
    """

    data: list[torch.Tensor]
    versions: list[int]

    def are(self, tensors: Sequence[LiveTensor]) -> bool:
        """Whether these tensors are the same memory, and have not been written since."""
        return len(tensors) == len(self.data) and all(
            tensor.owner is not None
            and tensor.owner._version == version
            and _are_same(tensor.data, data)
            for tensor, data, version in zip(tensors, self.data, self.versions, strict=True)
        )


@dataclass(frozen=True, slots=True)
class LastCopied:
    """The tensors that a save has copied.

    Attributes:
        owners: the state's own tensors.
        pointers: where their elements were.
        sizes: how many bytes of memory these take.
        device: the device of the copy.
    """

    owners: tuple[weakref.ref[torch.Tensor], ...]
    pointers: tuple[int, ...]
    sizes: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensors: Sequence[LiveTensor], device: torch.device) -> LastCopied | None:
        """Return these tensors; None if to find them again takes longer than to copy them.

        Also None if one of them is not all of a tensor whose writes are counted.
        """
        if sum(tensor.data.nbytes for tensor in tensors) < _LEAST_NBYTES * len(tensors):
            return None
        owners = []
        for tensor in tensors:
            owner = tensor.owner
            if owner is None or type(owner) not in _OWNERS or owner.is_inference():
                return None
            if not _are_same(tensor.data, local_of(owner)):
                return None
            owners.append(weakref.ref(owner))
        return cls(
            tuple(owners),
            tuple(tensor.data.data_ptr() for tensor in tensors),
            tuple(tensor.data.nbytes for tensor in tensors),
            device,
        )

    def sources(self) -> EarlySources | None:
        """Return the tensors' memory; None if one of them is gone, or has other memory."""
        data, versions = [], []
        # The copy waits for this, of which only what is not safe to copy must be found out.
        for reference, pointer, nbytes in zip(self.owners, self.pointers, self.sizes, strict=True):
            owner = reference()
            if owner is None:
                return None
            local = local_of(owner)
            if local.data_ptr() != pointer or local.nbytes != nbytes:
                return None
            data.append(local.detach())
            versions.append(owner._version)
        return EarlySources(data, versions)


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same elements of the same memory."""
    return one.is_set_to(other) and one.dtype == other.dtype
