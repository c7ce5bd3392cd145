"""What `import torch` calls in every process, by the entry point "torch.backends": has workers recorded where KEEPSTEP_MONITOR asks for it.

A module of its own, with a name that nobody else has: PyTorch cannot be imported where an entry point fails to load, and a user's
own `monitor.py` would hide ours. Whatever goes wrong is logged, and leaves the process as it was.
"""

from __future__ import annotations

import logging
import os

SWITCH = "KEEPSTEP_MONITOR"
_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")


def attach_if_asked() -> None:
    """Have this process recorded, if the environment asks for it, once it enters a process group and so turns out to be a worker."""
    told = os.environ.get(SWITCH, "").strip().lower()
    if told not in _ON:
        if told not in _OFF:
            logging.getLogger(__name__).warning(
                "%s=%s is neither yes nor no, so nothing is recorded; set it to 1", SWITCH, told
            )
        return
    try:
        from keepstep.monitor.telemetry.attachment import attach_at_initialization

        attach_at_initialization()
    except Exception as error:  # noqa: BLE001 - a monitor that fails must leave the job running
        logging.getLogger(__name__).warning(
            "%s=%s, but this worker is not recorded: %r", SWITCH, told, error
        )
