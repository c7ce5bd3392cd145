"""Writes a checkpoint as DeepSpeed's ZeRO does, for a stage and a number of ranks.

The layouts are described in `checkpoint.convert.read.deepspeed_zero`. Engines load the files of
as many ranks as they have, with the same groups of parameters in the same order.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from keepstep.checkpoint.convert.read.deepspeed_files import DEEPSPEED
from keepstep.checkpoint.convert.write.deepspeed_state import (
    MASTER_DTYPE,
    VERSION,
    DeepSpeedState,
    FlatGroup,
    Parameter,
    deepspeed_state,
    loss_scaler,
    shapes_of,
    tag_of,
)
from keepstep.checkpoint.convert.write.foreign_objects import PICKLE_MODULE, ForeignObject
from keepstep.checkpoint.convert.write.pieces_of_files import (
    Piece,
    StoredTensor,
    Transposed,
    elements_of_range,
    whole,
)
from keepstep.checkpoint.convert.write.planned_folder import PlannedFile
from keepstep.checkpoint.convert.write.selection import Selection
from keepstep.checkpoint.convert.write.torch_pieces import torch_pieces
from keepstep.checkpoint.convert.write.zero_layout import ZeroLayout
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.integers import ceil_div
from keepstep.checkpoint.format.layout.source import Source

# Partitions begin at multiples of this number of elements: DeepSpeed's nccl_start_alignment_factor.
_ALIGNMENT = 2
_SUB_GROUP_SIZE = 10**9
_ADDRESS = ("deepspeed.utils.tensor_fragment", "fragment_address")


def deepspeed_files(source: Selection, layout: ZeroLayout) -> list[PlannedFile]:
    """Return the files of ZeRO's checkpoint; `latest` comes last.

    Args:
        layout: the stage, and the ranks of the engines that are to load it.

    Raises:
        LayoutMismatch: ZeRO cannot hold the state, or the layout is not given.
    """
    if layout.stage is None or layout.ranks is None:
        raise LayoutMismatch(
            "ZeRO's files are of one stage and of as many ranks as load them: give --zero-stage "
            "and --ranks; --to deepspeed-universal is for any number of ranks"
        )
    state = deepspeed_state(source, layout.buffers)
    files = _stage_3(state, layout.ranks) if layout.stage == 3 else _flat(state, layout)
    tag = tag_of(source)
    planned = [PlannedFile(f"{tag}/{name}", torch_pieces(t, PICKLE_MODULE)) for name, t in files]
    return [*planned, PlannedFile("latest", (tag.encode(),))]


def _flat(state: DeepSpeedState, layout: ZeroLayout) -> Iterator[tuple[str, object]]:
    """Yield names and contents of the files of stages 1 and 2."""
    ranks = layout.ranks or 1
    frozen = state.frozen if layout.stage == 2 else []
    module = state.module()
    yield (
        "mp_rank_00_model_states.pt",
        state.model_file(
            ranks,
            module=module,
            param_shapes=[shapes_of(group.parameters) for group in state.groups],
            frozen_param_shapes=_shapes(state, frozen) if frozen else None,
            frozen_param_fragments={name: module[name] for name in frozen} or None,
        ),
    )
    for rank in range(ranks):
        partitions = [_Partition(group, rank, ranks) for group in state.groups]
        optimizer = {
            "state": {
                number: {**group.numbers, **partition.slots()}
                for number, (group, partition) in enumerate(
                    zip(state.groups, partitions, strict=True)
                )
            },
            "param_groups": [state.options(n, group) for n, group in enumerate(state.groups)],
        }
        yield _optimizer_file(
            state,
            rank,
            {
                **_scaler(state, is_needed=False),
                "base_optimizer_state": optimizer,
                "single_partition_of_fp32_groups": [p.masters() for p in partitions],
                "zero_stage": layout.stage,
                "group_paddings": [partition.padding for partition in partitions],
                "partition_count": [ranks] * len(partitions),
                "ds_version": VERSION,
                "param_slice_mappings": [partition.addresses() for partition in partitions],
            },
        )


class _Partition:
    """One rank's part of a group's flat tensor, as stages 1 and 2 cut it."""

    def __init__(self, group: FlatGroup, rank: int, ranks: int) -> None:
        self._group = group
        self._size = ceil_div(group.size, _ALIGNMENT * ranks) * _ALIGNMENT
        self._ranges: list[tuple[Parameter, int, int, int]] = []
        start, end = rank * self._size, (rank + 1) * self._size
        self.padding = min(self._size, max(0, end - group.size))
        position = 0
        for parameter in group.parameters:
            first = max(start, position)
            last = min(end, position + parameter.size)
            if first < last:
                self._ranges.append((parameter, first - start, first - position, last - position))
            position += parameter.size

    def masters(self) -> StoredTensor:
        """Return the parameters, without padding."""
        pieces = [
            elements_of_range(parameter.source, parameter.master, first, last)
            for parameter, _, first, last in self._ranges
        ]
        return StoredTensor(MASTER_DTYPE, (self._size - self.padding,), tuple(pieces))

    def slots(self) -> dict[str, StoredTensor]:
        """Return the slots, with padding."""
        return {slot: self._slot(slot, dtype) for slot, dtype in self._group.slots.items()}

    def _slot(self, slot: str, dtype: str) -> StoredTensor:
        pieces: list[Piece] = [
            elements_of_range(parameter.source, parameter.slots[slot], first, last)
            for parameter, _, first, last in self._ranges
        ]
        return StoredTensor(
            dtype, (self._size,), (*pieces, bytes(self.padding * numpy_dtype(dtype).itemsize))
        )

    def addresses(self) -> OrderedDict[str, ForeignObject]:
        """Return where each parameter's elements are in the partition."""
        return OrderedDict(
            (
                parameter.name,
                ForeignObject(*_ADDRESS, {"numel": last - first, "start": start}),
            )
            for parameter, start, first, last in self._ranges
        )


def _stage_3(state: DeepSpeedState, ranks: int) -> Iterator[tuple[str, object]]:
    """Yield names and contents of the files of stage 3."""
    sub_groups = [
        (group, parameters)
        for group in state.groups
        for parameters in _sub_groups(group, ranks, _sub_group_size(state))
    ]
    buffers, frozen = state.buffers, state.frozen
    stubs = {
        name: StoredTensor(state.source.tensors[key].dtype, (0,), ())
        for name, key in state.parts.model.items()
        if name not in buffers
    }
    for rank in range(ranks):
        whole_ones = {name: whole(state.source, state.parts.model[name]) for name in buffers}
        module: dict[str, StoredTensor | Transposed] = {**stubs, **whole_ones}
        for name, tie in state.parts.ties.items():
            dtype = state.source.tensors[tie.key].dtype
            module[name] = StoredTensor(dtype, (0,), ())
        fragments = {
            name: _fragment(state.source, state.parts.model[name], rank, ranks) for name in frozen
        }
        yield (
            f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
            state.model_file(
                ranks,
                module=module,
                param_shapes=[shapes_of(parameters) for _, parameters in sub_groups],
                frozen_param_shapes=_shapes(state, frozen),
                frozen_param_fragments=fragments,
                # As DeepSpeed does, which looks for ties on the first rank alone.
                **({"shared_params": {}} if rank else {}),
            ),
        )
        yield _optimizer_file(state, rank, _stage_3_optimizer(state, sub_groups, rank, ranks))


def _stage_3_optimizer(
    state: DeepSpeedState,
    sub_groups: Sequence[tuple[FlatGroup, tuple[Parameter, ...]]],
    rank: int,
    ranks: int,
) -> dict[str, object]:
    """Return what a rank's file has of the optimizer in stage 3."""
    counts = [sum(other is group for other, _ in sub_groups) for group in state.groups]
    firsts = [sum(counts[:number]) for number in range(len(counts))]

    def joined(dtype: str, keys: Iterable[tuple[Parameter, str]]) -> StoredTensor:
        return _joined(dtype, [_fragment(p.source, key, rank, ranks) for p, key in keys])

    return {
        "zero_stage": 3,
        **_scaler(state, is_needed=True),
        "partition_count": ranks,
        "optimizer_state_dict": {
            "state": {
                number: {
                    **_own(group.numbers),
                    **{
                        slot: joined(dtype, [(p, p.slots[slot]) for p in parameters])
                        for slot, dtype in group.slots.items()
                    },
                }
                for number, (group, parameters) in enumerate(sub_groups)
            },
            "param_groups": [
                state.options(first, group, count)
                for first, group, count in zip(firsts, state.groups, counts, strict=True)
            ],
        },
        "fp32_flat_groups": [
            joined(MASTER_DTYPE, [(p, p.master) for p in parameters])
            for _, parameters in sub_groups
        ],
    }


def _own(numbers: Mapping[str, StoredTensor | Json]) -> dict[str, StoredTensor | Json]:
    """Return numbers with tensors of their own: one that several groups had would count for all."""
    return {
        slot: replace(number) if isinstance(number, StoredTensor) else number
        for slot, number in numbers.items()
    }


def _sub_groups(group: FlatGroup, ranks: int, most: int) -> Iterator[tuple[Parameter, ...]]:
    """Yield the parameters of a group that stage 3 has in one flat tensor each."""
    if sum(ceil_div(p.size, ranks) for p in group.parameters) <= most:
        yield group.parameters
        return
    members: list[Parameter] = []
    for parameter in group.parameters:
        members.append(parameter)
        is_full = sum(ceil_div(p.size, ranks) for p in members) >= most
        if is_full or parameter is group.parameters[-1]:
            yield tuple(members)
            members = []


def _sub_group_size(state: DeepSpeedState) -> int:
    """Return the elements after which stage 3 begins another flat tensor, as it was configured."""
    noted = state.parts.documents.get(DEEPSPEED) or {}
    config = noted.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    size = zero.get("sub_group_size") if isinstance(zero, dict) else None
    return int(size) if isinstance(size, int | float) and size >= 1 else _SUB_GROUP_SIZE


def _fragment(source: Source, key: str, rank: int, ranks: int) -> StoredTensor:
    """Return a rank's part of a tensor as stage 3 cuts it: as long as all others', padded."""
    spec = source.tensors[key]
    total = math.prod(spec.shape)
    size = ceil_div(total, ranks)
    start, stop = min(rank * size, total), min((rank + 1) * size, total)
    padding = bytes((size - stop + start) * numpy_dtype(spec.dtype).itemsize)
    elements = elements_of_range(source, key, start, stop)
    return StoredTensor(spec.dtype, (size,), (elements, padding))


def _joined(dtype: str, parts: Sequence[StoredTensor]) -> StoredTensor:
    return StoredTensor(
        dtype,
        (sum(part.shape[0] for part in parts),),
        tuple(piece for part in parts for piece in part.pieces),
    )


def _shapes(state: DeepSpeedState, names: Sequence[str]) -> OrderedDict[str, torch.Size]:
    return OrderedDict(
        (name, torch.Size(state.source.tensors[state.parts.model[name]].shape)) for name in names
    )


def _scaler(state: DeepSpeedState, *, is_needed: bool) -> dict[str, object]:
    """Return the scaling of losses: what the source had, or none, or if needed that by 1."""
    scaler = state.loss_scaler()
    known = {} if scaler is None else {"loss_scaler": scaler}
    default = {
        "loss_scaler": loss_scaler({"cur_scale": 1.0, "dynamic": False}),
        "dynamic_loss_scale": False,
        "overflow": False,
    }
    return {**(default if is_needed else {}), **known, **state.settings()}


def _optimizer_file(state: DeepSpeedState, rank: int, content: object) -> tuple[str, object]:
    prefix = "bf16_" if state.is_bfloat16 else ""
    return (
        f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        {
            "optimizer_state_dict": content,
            "ds_config": (state.parts.documents.get(DEEPSPEED) or {}).get("ds_config", {}),
            "ds_version": VERSION,
        },
    )
