"""Seeds, stores and restores NumPy's global generator.

It is an MT19937 unless a script has replaced it (`numpy.random.set_bit_generator`). One of another
kind is the script's own: it is neither seeded nor stored.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import torch

log = logging.getLogger("keepstep")

# Little-endian.
_STATE = np.dtype(
    [("key", "<u4", 624), ("position", "<i8"), ("has_gauss", "<i8"), ("gauss", "<f8")]
)


def seed(value: int, *more: int) -> None:
    """Seed it with the lower 32 bits of a number, or of each of several."""
    if _is_ours():
        values = [number & 0xFFFFFFFF for number in (value, *more)]
        np.random.seed(values if more else values[0])


def kept_state() -> Any:
    """Return its state, for `restore_kept` in the same process."""
    if _is_ours():
        return np.random.get_state(legacy=False)
    return _generator().state


def restore_kept(state: Any) -> None:
    """Restore a result of `kept_state`, unless another kind of generator is there now."""
    if state["bit_generator"] != type(_generator()).__name__:
        return
    if _is_ours():
        np.random.set_state(state)
    else:
        _generator().state = state


def stored_state() -> torch.Tensor | None:
    """Return its state as 2,520 bytes; None if it is of another kind."""
    if not _is_ours():
        _warn_once()
        return None
    _, key, position, has_gauss, gauss = np.random.get_state()
    state = np.array([(key, position, has_gauss, gauss)], _STATE)
    return torch.from_numpy(state.view(np.uint8))


def restore_stored(state: torch.Tensor) -> None:
    """Restore a result of `stored_state`."""
    key, position, has_gauss, gauss = state.numpy().view(_STATE)[0].tolist()
    np.random.set_state(("MT19937", key, position, has_gauss, gauss))


def _generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]


def _is_ours() -> bool:
    return isinstance(_generator(), np.random.MT19937)


@functools.cache
def _warn_once() -> None:
    kind = type(_generator()).__name__
    log.warning(
        "NumPy's global generator is a %s of the script's own: it is neither seeded nor stored",
        kind,
    )
