"""What `import torch` calls in every process, by the entry point "torch.backends": attaches the monitor where KEEPSTEP_MONITOR=1 asks for it.

A module of its own, with a name that nobody else has: PyTorch cannot be imported where an entry point fails to load, and a user's
own `monitor.py` would hide ours. Whatever goes wrong is logged, and leaves the process as it was.
"""

from __future__ import annotations

import logging
import os

SWITCH = "KEEPSTEP_MONITOR"


def attach_if_asked() -> None:
    """Attach the recorder if the environment asks for it and this is a worker: it has a rank, not from a worker that started it."""
    if os.environ.get(SWITCH) != "1":
        return
    try:
        from monitor.telemetry.attachment import ATTACHED_VARIABLE, attach, identify

        own = str(os.getpid())
        if os.environ.get(ATTACHED_VARIABLE, own) == own and identify(os.environ).rank >= 0:
            attach()
    except Exception as error:  # noqa: BLE001 - a monitor that fails must leave the job running
        logging.getLogger(__name__).warning("%s=1, but this worker is not recorded: %r", SWITCH, error)
