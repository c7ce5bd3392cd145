"""Writes a checkpoint as DeepSpeed's tool `ds_to_universal` does: a folder per parameter.

`zero/NAME/fp32.pt` is a parameter as the optimizer has it, the other files its slots. Engines
of stages 1 and 2 look for the module's file under one name and for mappings with the tensor, those
of stage 3 under another and for flattened tensors, which the stage given decides.
"""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.checkpoint.convert.write.deepspeed_state import (
    MASTER_DTYPE,
    VERSION,
    DeepSpeedState,
    FlatGroup,
    Parameter,
    deepspeed_state,
    shapes_of,
    tag_of,
)
from keepstep.checkpoint.convert.write.foreign_objects import PICKLE_MODULE
from keepstep.checkpoint.convert.write.pieces_of_files import StoredTensor, whole
from keepstep.checkpoint.convert.write.planned_folder import PlannedFile
from keepstep.checkpoint.convert.write.selection import Selection
from keepstep.checkpoint.convert.write.torch_pieces import torch_pieces
from keepstep.checkpoint.convert.write.zero_layout import ZeroLayout
from keepstep.checkpoint.format.layout.boxes import Json


def deepspeed_universal_files(source: Selection, layout: ZeroLayout) -> list[PlannedFile]:
    """Return the files of a universal checkpoint of DeepSpeed; `latest_universal` comes last.

    Args:
        layout: the stage of the engines that are to load it; stages 1 and 2 if it is not given.

    Raises:
        LayoutMismatch: ZeRO cannot hold the state.
    """
    state = deepspeed_state(source, layout.buffers)
    return list(_files(state, is_stage_3=layout.stage == 3))


def _files(state: DeepSpeedState, *, is_stage_3: bool) -> Iterator[PlannedFile]:
    folder = f"{tag_of(state.source)}_universal"

    def planned(name: str, tree: object) -> PlannedFile:
        return PlannedFile(f"{folder}/{name}", torch_pieces(tree, PICKLE_MODULE))

    for group in state.groups:
        for parameter in group.parameters:
            for slot, tree in _trees(group, parameter, is_stage_3=is_stage_3):
                yield planned(f"zero/{parameter.name}/{slot}.pt", tree)
    trained = state.trained
    if not is_stage_3:
        for name, tensor in _untrained(state).items():
            if name not in trained:
                yield planned(f"zero/{name}/fp32.pt", {"param": tensor})
    yield planned("zero/optimizer_state.pt", _optimizer(state, is_stage_3=is_stage_3))
    model = state.model_file(
        1,
        module=state.module(),
        param_shapes=[shapes_of(group.parameters) for group in state.groups],
        frozen_param_shapes=None,
        frozen_param_fragments=None,
        universal_checkpoint_info={"universal_checkpoint_version": 0.2},
    )
    yield planned(f"{'zero_pp_rank_0_' * is_stage_3}mp_rank_00_model_states.pt", model)
    yield PlannedFile("latest_universal", (folder.encode(),))


def _trees(
    group: FlatGroup, parameter: Parameter, *, is_stage_3: bool
) -> Iterator[tuple[str, object]]:
    """Yield what the files of a parameter have, by name."""
    tensors = {"fp32": whole(parameter.source, parameter.master)}
    for slot in group.slots:
        tensors[slot] = whole(parameter.source, parameter.slots[slot])
    for name, tensor in tensors.items():
        if is_stage_3:
            yield name, StoredTensor(tensor.dtype, (parameter.size,), tensor.pieces)
        else:
            yield name, {"cat_dim": 0, "param": tensor}
    if not is_stage_3:
        yield from group.numbers.items()


def _untrained(state: DeepSpeedState) -> dict[str, object]:
    """Return the other names of the module, which DeepSpeed's tool adds in float32."""
    tensors = {
        name: whole(state.source, key, MASTER_DTYPE) for name, key in state.parts.model.items()
    }
    return dict(state.with_ties(tensors))


def _optimizer(state: DeepSpeedState, *, is_stage_3: bool) -> dict[str, object]:
    groups = [state.options(number, group) for number, group in enumerate(state.groups)]
    stage: dict[str, object] = {"zero_stage": 3 if is_stage_3 else 2}
    if is_stage_3:
        numbers: dict[int, dict[str, StoredTensor | Json]] = {
            number: dict(group.numbers) for number, group in enumerate(state.groups)
        }
        stage["optimizer_state_dict"] = {"state": numbers, "param_groups": groups}
    scaler = state.loss_scaler()
    return {
        **stage,
        **({"loss_scaler": scaler} if scaler is not None else {}),
        **state.settings(),
        "partition_count": 1 if is_stage_3 else [1] * len(groups),
        "ds_version": VERSION,
        "param_groups": groups,
    }
