"""Notices writes to tensors while they are copied, by their version counters.

Most writes through PyTorch increment the counter of the tensor that is written. Writes through
`.data`, of fused optimizers, and of `torch._foreach_*` functions to DTensors do not, and are not
noticed; memory that is no longer the tensor's (`p.data = ...`) is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from keepstep.checkpoint.errors import StateChanged
from keepstep.checkpoint.live.tensors import LiveTensor
from keepstep.torch_internals import version_of


@dataclass(frozen=True, slots=True)
class WatchedTensors:
    """The tensors that have an owner to watch, and their owners, in the same order."""

    tensors: tuple[LiveTensor, ...]
    owners: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, tensors: Iterable[LiveTensor]) -> Self:
        """Return the tensors that can be watched: inference tensors count no writes."""
        watched = [
            (tensor, tensor.owner)
            for tensor in tensors
            if tensor.owner is not None and not tensor.owner.is_inference()
        ]
        return cls(tuple(t for t, _ in watched), tuple(owner for _, owner in watched))

    def versions(self) -> list[int]:
        """Return the version counters as they are now."""
        return list(map(version_of, self.owners))

    def check_unchanged(self, versions: Sequence[int], step: int) -> None:
        """Check that nothing was written since `versions` returned these counters.

        Raises:
            StateChanged: a tensor was written to, or given other memory; the message names it.
        """
        for tensor, owner, version in zip(self.tensors, self.owners, versions, strict=True):
            if version_of(owner) != version:
                raise StateChanged(
                    f"{tensor.key} was written to while step {step} was being copied"
                )
            if tensor.has_moved:
                raise StateChanged(
                    f"{tensor.key} was given other memory before step {step} was copied"
                )
