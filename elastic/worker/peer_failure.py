"""Recognizes exceptions caused by the failure of a peer or of the network."""

from __future__ import annotations

import sys

_LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "remote process exited",
    "ncclRemoteError",
)


def is_peer_failure(error: BaseException) -> bool:
    """Return whether the failure of a peer or the network caused a training step's exception."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.distributed.DistError):
        return True
    text = text_of(error)
    return isinstance(error, RuntimeError) and (
        "gloo" in text or "NCCL" in text or "TCPStore" in text
    )


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an exception says that a peer is gone, and not that this node is at fault."""
    return is_peer_failure(error) and any(text in text_of(error) for text in _LOST_CONNECTION)


def text_of(error: BaseException) -> str:
    """Return an exception's text; "" if it raises, for it may be of a class of the user's."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - what is shown of it says so
        return ""
