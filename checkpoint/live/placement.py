"""Where a sharded tensor's local part belongs: a box from placements, mesh shape and coordinate.

Pure (torch's placement types are values): no mesh is asked and nobody is talked to.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.layout.boxes import Box


def local_box(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> Box:
    """Return the box of a sharded tensor that one rank holds.

    Each sharded dimension is split as `torch.chunk` does: pieces of ceil(n / parts), the last ones smaller or
    empty. Mesh dimensions split left to right, except that a strided shard (FSDP over tensor parallelism)
    splits what the later dimensions left.

    Args:
        shape: global shape of the tensor.
        mesh_shape: sizes of the mesh's dimensions.
        coordinate: this rank's place in the mesh.
        placements: one per mesh dimension.

    Raises:
        LayoutMismatch: a placement that is no box, such as a pending sum (`Partial`).
    """
    offset, extent = [0] * len(shape), list(shape)
    # Strided shards were applied after the plain ones on their right, although they stand to the left of
    # them.
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
        axis = placement.dim % len(shape)
        piece = -(-extent[axis] // mesh_shape[position])
        start = min(piece * coordinate[position], extent[axis])
        offset[axis] += start
        extent[axis] = min(piece, extent[axis] - start)
    return Box(tuple(offset), tuple(extent))
