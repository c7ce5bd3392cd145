"""Finds tensors of fused parts, and the boxes of their slices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.described import part_table_of
from keepstep.checkpoint.format.layout.descriptions import NOT_DESCRIBED, Descriptions, matching
from keepstep.checkpoint.format.layout.part_table import PartTable
from keepstep.checkpoint.live.flat_fragment import empty_box
from keepstep.checkpoint.live.placement import local_boxes_of_parts
from keepstep.checkpoint.live.tensors import LiveTensor, describe, local_of, offset_nbytes


@dataclass(frozen=True, slots=True)
class FusedTensors:
    """The tensors with fused parts that tensor parallelism slices one by one.

    Args:
        descriptions: its members `parts` and `parts_mesh_axis`.
    """

    descriptions: Descriptions = NOT_DESCRIBED

    def table(self, key: str) -> PartTable | None:
        """Return the parts of the tensor of this key; None if it has none."""
        return matching(self.descriptions.parts, key)

    def describe(
        self, key: str, tensor: torch.Tensor, *, parameter: str | None = None
    ) -> tuple[LiveTensor, ...]:
        """Return this rank's boxes of a tensor; one, unless it has fused parts that are sliced.

        Args:
            key: the tensor's key.
            tensor: the tensor.
            parameter: the key of the parameter whose parts a slot has too; None for its own.

        Raises:
            LayoutMismatch: the tensor contradicts its part table, or cannot be stored.
        """
        table = self.table(parameter or key)
        if table is None:
            return _boxes(key, tensor)
        if table.axis >= tensor.dim():
            raise LayoutMismatch(
                f"{key}: has {tensor.dim()} dimensions, its part table is of dimension "
                f"{table.axis}; correct the pattern or the table"
            )
        mesh_axis = self._slicing_axis(key, tensor, table)
        if mesh_axis is None:
            if tensor.shape[table.axis] != table.extent:
                raise LayoutMismatch(
                    f"{key}: dimension {table.axis} of shape {tuple(tensor.shape)} is not sliced, "
                    f"and its parts have {table.extent} elements; correct the part table"
                )
            return _boxes(key, tensor)
        assert isinstance(tensor, DTensor)
        return _describe_slices(key, tensor, table, mesh_axis)

    def describe_slot(
        self, parameter_key: str, key: str, parameter: torch.Tensor, slot: torch.Tensor
    ) -> tuple[LiveTensor, ...]:
        """Return this rank's boxes of an optimizer slot of a parameter.

        A slot that is sliced along the parameter's fused dimension has the parameter's parts, such
        as statistics of rows.

        Args:
            parameter_key: the parameter's key.
            key: the slot's key.
            parameter: the parameter.
            slot: the slot, which may have another shape.

        Raises:
            LayoutMismatch: the elements of this rank's slice of the slot are not known.
        """
        table = self.table(parameter_key)
        sliced = self._sliced_dimension(slot)
        if table is None or sliced is None or self._slicing_axis(key, parameter, table) is None:
            return _boxes(key, slot)
        if sliced != table.axis or slot.shape[sliced] != parameter.shape[table.axis]:
            raise LayoutMismatch(
                f"{key}: tensor parallelism slices dimension {sliced} of this slot of shape "
                f"{tuple(slot.shape)}, and the fused parts of {parameter_key} are slices of "
                f"dimension {table.axis}, of {parameter.shape[table.axis]} elements; how the slot "
                "belongs to them is not known. Replicate the slot, or leave the optimizer out"
            )
        return self.describe(key, slot, parameter=parameter_key)

    def shape(self, key: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return a tensor's shape without sharding."""
        shape = list(tensor.shape)
        table = self.table(key)
        if table is not None and table.axis < len(shape):
            # Ranks that hold copies of a part are counted several times in torch's shape.
            shape[table.axis] = table.extent
        return tuple(shape)

    def _sliced_dimension(self, tensor: torch.Tensor) -> int | None:
        """Return the dimension of a tensor that the parts' mesh axis splits; None without one."""
        names = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None
        if (
            not isinstance(tensor, DTensor)
            or not names
            or self.descriptions.parts_mesh_axis not in names
        ):
            return None
        dimension = getattr(
            tensor.placements[names.index(self.descriptions.parts_mesh_axis)], "dim", None
        )
        return None if dimension is None else int(dimension) % tensor.dim()

    def _slicing_axis(self, key: str, tensor: torch.Tensor, table: PartTable) -> int | None:
        """Return the axis of its mesh that slices a tensor's parts; None without one."""
        if not isinstance(tensor, DTensor):
            return None
        splitting = [
            axis
            for axis, placement in enumerate(tensor.placements)
            if getattr(placement, "dim", None) in (table.axis, table.axis - tensor.dim())
        ]
        names, mesh_axis = tensor.device_mesh.mesh_dim_names, self.descriptions.parts_mesh_axis
        if splitting and not names:
            raise LayoutMismatch(
                f"{key}: has fused parts, and only an axis named {mesh_axis!r} shows whether its "
                "mesh slices them or cuts rows as FSDP does; make the mesh with "
                "mesh_dim_names=(...)"
            )
        return next((axis for axis in splitting if names and names[axis] == mesh_axis), None)


def check_parts(stored: Json, live: Mapping[str, Json]) -> None:
    """Check that tensors are loaded in the order of parts in which they were saved.

    Args:
        stored: the document of the checkpoint; None if it has none.
        live: that of the state to load into, by key.

    Raises:
        LayoutMismatch: a tensor's parts are others.
    """
    for key in sorted(live):
        table = part_table_of(stored, key)
        if table is not None and _order(table) != _order(live[key]):
            raise LayoutMismatch(
                f"{key}: is stored with the parts {_order(table)}, and is to be loaded "
                f"with {_order(live[key])}; pass the part table that it was saved with"
            )


def _order(table: Json) -> str:
    """Return in words the order of a stored tensor's elements."""
    try:
        parts = ", ".join(f"{part['name']} {part['extent']}" for part in table["parts"])
        return f"[{parts}] of dimension {table['axis']} in {table['groups']} groups"
    except (KeyError, TypeError):
        return repr(table)


def _boxes(key: str, tensor: torch.Tensor) -> tuple[LiveTensor, ...]:
    """Return this rank's box of a tensor; one without elements, or none, outside of its mesh."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return empty_box(key, tuple(tensor.shape), local_of(tensor).detach())
    return (describe(key, tensor),)


def _describe_slices(
    key: str, tensor: DTensor, table: PartTable, mesh_axis: int
) -> tuple[LiveTensor, ...]:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    local = tensor.to_local().detach()
    shape = (*tensor.shape[: table.axis], table.extent, *tensor.shape[table.axis + 1 :])
    if coordinate is None:
        return empty_box(key, shape, local)
    try:
        boxes = local_boxes_of_parts(
            tuple(tensor.shape), tuple(mesh.shape), coordinate, tensor.placements,
            table=table, mesh_axis=mesh_axis,
        )  # fmt: skip
    except LayoutMismatch as error:
        raise LayoutMismatch(f"{key}: {error}") from error
    if not any(box.size for box in boxes):
        return empty_box(key, shape, local)
    expected = [*boxes[0].shape]
    expected[table.axis] = sum(box.shape[table.axis] for box in boxes)
    if list(local.shape) != expected:
        raise LayoutMismatch(
            f"{key}: the local shard has shape {tuple(local.shape)}, but its parts placed as "
            f"{tensor.placements} over a mesh of {tuple(mesh.shape)} give {tuple(expected)}"
        )
    tensors, start = [], 0
    for box in boxes:
        data = local.narrow(table.axis, start, box.shape[table.axis])
        tensors.append(LiveTensor(key, shape, box, data, tensor, offset_nbytes(data, tensor)))
        start += box.shape[table.axis]
    return tuple(tensors)
