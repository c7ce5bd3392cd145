"""Recognises exceptions that the failure of a peer or of the network has caused."""

from __future__ import annotations

import sys


def is_peer_failure(error: BaseException) -> bool:
    """Whether an exception of a training step comes from the failure of a peer or the network."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.distributed.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "gloo" in text or "NCCL" in text or "TCPStore" in text
    )
