"""The Saver of this process that `save(..., block=False)` uses, closed when the interpreter exits.

A process that is killed, or that ends by `os._exit`, loses the save in progress.
"""

from __future__ import annotations

import atexit
import os

from torch.distributed import ProcessGroup

from keepstep.checkpoint.format.stored.last_part import LastPart
from keepstep.checkpoint.ranks.collective_plan import PlanCache
from keepstep.checkpoint.saving.saver import Saver

_EXIT_TIMEOUT_S = 600.0


class ProcessSaver:
    """Makes the process's Saver when it is first asked for. A forked process has one of its own."""

    def __init__(self) -> None:
        self._saver: Saver | None = None
        self._pid = 0
        self.plans = PlanCache()
        """Has the plan of the last blocking save."""
        self.last_part = LastPart()
        """Has the objects of the last blocking save."""

    @property
    def current(self) -> Saver | None:
        """The Saver, if this process has one."""
        return self._saver if self._pid == os.getpid() else None

    def get(self, process_group: ProcessGroup | None) -> Saver:
        """Return the Saver of a process group; it takes the place of that of another group."""
        saver = self.current
        if saver is not None and saver.process_group is not process_group:
            self.close()
            saver = None
        if saver is None:
            saver = self._saver = Saver(
                process_group=process_group, close_timeout_s=_EXIT_TIMEOUT_S
            )
            self._pid = os.getpid()
            atexit.register(self.close)
        return saver

    def close(self) -> None:
        """Finish the save in progress and free everything. The parent's Saver stays as it is."""
        saver = self.current
        if saver is not None:
            self._saver = None
            saver.close()


PROCESS_SAVER = ProcessSaver()
