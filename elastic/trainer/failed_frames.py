"""Lets go of what the frames of a handled exception refer to."""

from __future__ import annotations

import traceback


def forget_locals(error: BaseException) -> None:
    """Clear the local variables of all frames that an exception, and its causes, have left.

    While an exception is handled its frames keep the model, gradients and activations: beside the
    next generation's state a device may have no memory for them. Frames that still run keep theirs.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        failure = pending.pop()
        if failure is None or id(failure) in seen:
            continue
        seen.add(id(failure))
        traceback.clear_frames(failure.__traceback__)
        pending += [failure.__cause__, failure.__context__]
