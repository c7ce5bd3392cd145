"""Computes the box of a rank's shard from placements, mesh shape and coordinate.

Pure (torch's placement types are values): it uses no device mesh and does no communication.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.layout.boxes import Box
from keepstep.checkpoint.layout.integers import ceil_div


def local_box(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> Box:
    """Return the box of a sharded tensor that one rank holds.

    Each sharded dimension is split as `torch.chunk` does: pieces of ceil(n / parts), the last ones
    smaller or empty. Mesh axes split from left to right, except that a strided shard (FSDP over
    tensor parallelism) splits the pieces that the later axes made.

    Args:
        shape: global shape of the tensor.
        mesh_shape: sizes of the mesh's axes.
        coordinate: this rank's place in the mesh.
        placements: one per mesh axis.

    Raises:
        LayoutMismatch: a placement is not a box, such as a pending sum (`Partial`).
    """
    offset, extent = [0] * len(shape), list(shape)
    # Strided shards were applied after the plain ones on their right, although they are listed to
    # the left of them.
    strided = [i for i, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    plain = [i for i in range(len(placements)) if i not in strided]
    for position in (*plain, *strided):
        placement = placements[position]
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, Partial) or not isinstance(placement, Shard | _StridedShard):
            raise LayoutMismatch(
                f"a tensor placed as {placement} cannot be stored; redistribute it first"
            )
        dim = placement.dim % len(shape)
        piece = ceil_div(extent[dim], mesh_shape[position])
        start = min(piece * coordinate[position], extent[dim])
        offset[dim] += start
        extent[dim] = min(piece, extent[dim] - start)
    return Box(tuple(offset), tuple(extent))
