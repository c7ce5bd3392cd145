"""What `import torch` calls in every process, by the entry point "torch.backends": has workers recorded where KEEPSTEP_MONITOR asks for it.

A module of its own, with a name that nobody else has: PyTorch cannot be imported where an entry point fails to load, and a user's
own `monitor.py` would hide ours. Whatever goes wrong is logged, and leaves the process as it was.
"""

from __future__ import annotations

import logging
import os

SWITCH = "KEEPSTEP_MONITOR"


def attach_if_asked() -> None:
    """Have this process recorded, if the environment asks for it, once it enters a process group and so turns out to be a worker."""
    if os.environ.get(SWITCH) != "1":
        return
    try:
        from monitor.telemetry.attachment import attach_at_initialization

        attach_at_initialization()
    except Exception as error:  # noqa: BLE001 - a monitor that fails must leave the job running
        logging.getLogger(__name__).warning("%s=1, but this worker is not recorded: %r", SWITCH, error)
