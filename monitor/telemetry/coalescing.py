"""Tells the native recorder which operations a process group launches together.

`ProcessGroup._start_coalescing` and `_end_coalescing`, which `batch_isend_irecv` and the like call,
are no operators that the dispatcher sees. Operations that are called in between are launched at the
end, on a stream of the backend; an event recorded around such a call would say nothing about it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

from keepstep.monitor.telemetry.native import NativeRecorder


class CoalescingHooks:
    """Hooks of this process's process groups, until `remove`."""

    def __init__(self, native: NativeRecorder) -> None:
        self._originals = {
            name: getattr(dist.ProcessGroup, name)
            for name in ("_start_coalescing", "_end_coalescing")
        }
        start, end = self._originals.values()

        @functools.wraps(start)
        def start_coalescing(*args: Any, **kwargs: Any) -> Any:
            result = start(*args, **kwargs)
            native.set_coalescing(True)
            return result

        @functools.wraps(end)
        def end_coalescing(*args: Any, **kwargs: Any) -> Any:
            try:
                return end(*args, **kwargs)
            finally:
                native.set_coalescing(False)

        self._hooks = dict(zip(self._originals, (start_coalescing, end_coalescing), strict=True))
        for name, hook in self._hooks.items():
            setattr(dist.ProcessGroup, name, hook)

    def remove(self) -> None:
        """Remove the hooks; those that others installed over them stay."""
        for name, hook in self._hooks.items():
            if getattr(dist.ProcessGroup, name) is hook:
                setattr(dist.ProcessGroup, name, self._originals[name])
