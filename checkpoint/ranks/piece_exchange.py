"""Exchanges pieces of chunks between the ranks that hold them and the ranks that write the chunks.

A writer holds some of its chunks only in part. It gets what it lacks in rounds of bounded size,
of which all ranks have as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.stored.piece_rounds import Round
from keepstep.checkpoint.live.fills import Bytes
from keepstep.checkpoint.live.tensors import LiveTensor, bytes_of
from keepstep.checkpoint.ranks.control_group import ControlGroup, preparing


def exchange_pieces(
    rounds: Sequence[Round], tensors: Sequence[LiveTensor], group: ControlGroup
) -> dict[tuple[str, Box], Bytes]:
    """Get the chunks that this rank writes but holds only in part, from the ranks that hold them.

    Args:
        rounds: the rounds that the ranks have planned; all have as many.
        tensors: what this rank holds.
        group: the ranks.

    Returns:
        The chunks, by tensor key and box.

    Raises:
        CheckpointError: this rank has no memory for it, or another rank has none.
    """
    collected: dict[tuple[str, Box], Bytes] = {}

    def prepare(current: Round) -> tuple[torch.Tensor, torch.Tensor]:
        """Take all memory that a round needs, and fill in what this rank sends."""
        with preparing("pieces that ranks exchange"):
            for chunk, shape in current.chunks:
                collected[chunk] = np.empty(shape, np.uint8)
            pieces = [bytes_of(tensors[position].data[part]) for position, part in current.sent]
            sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
            return sent, torch.empty(sum(current.received_nbytes), dtype=torch.uint8)

    for current in rounds:
        sent, received = group.run_on_all_ranks(partial(prepare, current))
        group.exchange_bytes(sent, current.sent_nbytes, received, current.received_nbytes)
        # From here to the next round nothing takes memory that may be lacking.
        data = received.numpy()
        start = 0
        for place in current.places:
            end = start + place.nbytes
            collected[place.chunk][place.slices] = data[start:end].reshape(place.shape)
            start = end
    return collected
