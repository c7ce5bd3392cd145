"""Makes documents about a state as a whole: its provenance, and its model's configuration.

No load depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

import torch
from torch.distributed.tensor import DTensor

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.documents import release_of
from keepstep.checkpoint.live.optimizer_options import obstacle_to_json


def provenance(tensors: Iterable[torch.Tensor], *, world_size: int, now: datetime) -> Json:
    """Return the document about the provenance of a state.

    Args:
        tensors: the state's own, which may be DTensors; the axes of their meshes are named.
        world_size: the number of ranks that hold the state.
        now: when it is captured.
    """
    content: dict[str, Json] = {
        "keepstep": release_of("keepstep"),
        "torch": torch.__version__,
        "world_size": world_size,
        "saved_at": now.astimezone(UTC).isoformat(timespec="seconds"),
    }
    mesh = _mesh_sizes(tensors)
    return {**content, "mesh": mesh} if mesh else content


def checked_config(config: Json) -> Json:
    """Return a model's configuration.

    Raises:
        LayoutMismatch: it is not JSON.
    """
    obstacle = obstacle_to_json(config)
    if obstacle is not None:
        raise LayoutMismatch(
            f"config: {obstacle} cannot be stored; pass mappings with texts as keys, lists, texts, "
            "numbers, booleans and None"
        )
    return config


def _mesh_sizes(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Return the sizes of the axes of all meshes that have names, by name."""
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    sizes: dict[str, int] = {}
    for mesh in meshes:
        sizes.update(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    return dict(sorted(sizes.items()))
