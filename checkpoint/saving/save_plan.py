"""Plans one rank's part of a non-blocking save: what is copied where, and what is written of it.

Everything but the bytes and the step; valid while no rank's layout changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from keepstep.checkpoint.format.layout.boxes import Box, Entry
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.integers import round_up
from keepstep.checkpoint.live.packing import ALIGNMENT, pack
from keepstep.checkpoint.live.tensors import LiveTensor
from keepstep.checkpoint.ranks.collective_plan import SharedPlan
from keepstep.checkpoint.saving.messages import PartPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """One rank's part of a save.

    Attributes:
        shared: the plan that all ranks have made together.
        copied: positions of the tensors that this rank writes chunks of.
        entries: the copied tensors' places in the buffer, in this order.
        pieces: byte offsets of the chunks that are collected from other ranks.
        nbytes: the size of all, with padding.
        encoded: the `PartPlan`, encoded once.
    """

    shared: SharedPlan
    copied: tuple[int, ...]
    entries: tuple[Entry, ...]
    pieces: Mapping[tuple[str, Box], int]
    nbytes: int
    encoded: bytes


def plan_save(rank: int, tensors: Sequence[LiveTensor], shared: SharedPlan) -> SavePlan:
    """Plan this rank's part.

    Args:
        rank: this rank.
        tensors: what it holds.
        shared: what all ranks have planned together.
    """
    own = shared.own
    keys = {chunk.key for chunk in own.chunks if not chunk.pieces}
    copied = tuple(i for i, tensor in enumerate(tensors) if tensor.key in keys)
    entries, offset = pack([tensors[i] for i in copied])
    pieces: dict[tuple[str, Box], int] = {}
    piece_entries: list[Entry] = []
    for chunk in own.chunks:
        if not chunk.pieces:
            continue
        stored = own.tensors[chunk.key]
        nbytes = chunk.box.size * numpy_dtype(stored.dtype).itemsize
        pieces[chunk.key, chunk.box] = offset
        piece_entries.append(
            Entry(
                key=chunk.key,
                dtype=stored.dtype,
                global_shape=stored.shape,
                box=chunk.box,
                byte_offset=offset,
                nbytes=nbytes,
            )
        )
        offset += round_up(nbytes, ALIGNMENT)
    plan = PartPlan(
        rank=rank, own=own, tensors=shared.tensors, entries=tuple(chain(entries, piece_entries))
    )
    return SavePlan(
        shared=shared,
        copied=copied,
        entries=entries,
        pieces=pieces,
        nbytes=offset,
        encoded=plan.encode(),
    )
