"""Tensors of fused parts: which are, and the boxes that slices of them are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch.distributed.tensor import DTensor

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.layout.boxes import Json
from keepstep.checkpoint.layout.part_table import PartTable
from keepstep.checkpoint.live.flat_fragment import empty_box
from keepstep.checkpoint.live.placement import local_boxes_of_parts
from keepstep.checkpoint.live.tensors import LiveTensor, describe, offset_nbytes


@dataclass(frozen=True, slots=True)
class FusedTensors:
    """Which tensors have fused parts that tensor parallelism slices one by one.

    Args:
        tables: the parts of the tensors whose names match a pattern, such as `*.qkv.weight`; the
            first pattern that matches counts. A parameter's name is that in the module; any other
            tensor's is its key.
        mesh_axis: name of the device mesh's axis that slices the parts. Other axes, such as FSDP's,
            split whatever rows they find.
    """

    tables: Mapping[str, PartTable] = field(default_factory=dict)
    mesh_axis: str = "tp"

    def table(self, name: str) -> PartTable | None:
        """Return the parts of the tensor of this name; None if it has none."""
        return next(
            (table for pattern, table in self.tables.items() if fnmatchcase(name, pattern)), None
        )

    def document(self, names: Iterable[str]) -> dict[str, Json]:
        """Return the parts of those of these tensors that have any, by name, as JSON."""
        tables = ((name, self.table(name)) for name in names)
        return {name: table.to_json() for name, table in tables if table is not None}

    def describe(self, name: str, key: str, tensor: torch.Tensor) -> tuple[LiveTensor, ...]:
        """Return this rank's boxes of a tensor; one, unless it has fused parts that are sliced.

        Args:
            name: the name to look for among the patterns.
            key: the tensor's key.
            tensor: the tensor.

        Raises:
            LayoutMismatch: the tensor contradicts its part table, or cannot be stored.
        """
        table = self.table(name)
        if table is None:
            return (describe(key, tensor),)
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
            return (describe(key, tensor),)
        assert isinstance(tensor, DTensor)
        return _describe_slices(key, tensor, table, mesh_axis)

    def shape(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return a tensor's shape without sharding."""
        shape = list(tensor.shape)
        table = self.table(name)
        if table is not None and table.axis < len(shape):
            # Ranks that hold copies of a part are counted several times in torch's shape.
            shape[table.axis] = table.extent
        return tuple(shape)

    def _slicing_axis(self, key: str, tensor: torch.Tensor, table: PartTable) -> int | None:
        """Return which axis of its mesh slices a tensor's parts; None if none does."""
        if not isinstance(tensor, DTensor):
            return None
        splitting = [
            axis
            for axis, placement in enumerate(tensor.placements)
            if getattr(placement, "dim", None) in (table.axis, table.axis - tensor.dim())
        ]
        names = tensor.device_mesh.mesh_dim_names
        if splitting and not names:
            raise LayoutMismatch(
                f"{key}: has fused parts, and whether its mesh slices them or cuts rows as FSDP "
                f"does is told by the name of the axis, {self.mesh_axis!r}; make the mesh with "
                "mesh_dim_names=(...)"
            )
        return next((axis for axis in splitting if names and names[axis] == self.mesh_axis), None)


def check_parts(stored: Mapping[str, Json], live: Mapping[str, Json]) -> None:
    """Check that tensors are loaded in the order of parts in which they were saved.

    Args:
        stored: the document of the checkpoint.
        live: that of the state to load into, as `FusedTensors.document` returns it.

    Raises:
        LayoutMismatch: a tensor's parts are others.
    """
    for name in sorted(stored.keys() & live.keys()):
        if _order(stored[name]) != _order(live[name]):
            raise LayoutMismatch(
                f"{name}: is stored with the parts {_order(stored[name])}, and is to be loaded "
                f"with {_order(live[name])}; pass the part table that it was saved with"
            )


def _order(table: Json) -> str:
    """Return in words what sets the order of a stored tensor's elements."""
    try:
        parts = ", ".join(f"{part['name']} {part['extent']}" for part in table["parts"])
        return f"[{parts}] of dimension {table['axis']} in {table['groups']} groups"
    except (KeyError, TypeError):
        return repr(table)


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
