"""Starts recording of workers when PyTorch is imported, if KEEPSTEP_MONITOR is set.

`import torch` calls `attach_if_asked` in every process, through the entry point "torch.backends".
If an entry point fails to load, PyTorch cannot be imported; so this module imports nothing at its
top that could fail. Errors are logged, and leave the process unchanged.
"""

from __future__ import annotations

import logging
import os

SWITCH = "KEEPSTEP_MONITOR"
_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")


def attach_if_asked() -> None:
    """Record this process, if the environment asks for it, once it enters a process group.

    Only workers enter a process group.
    """
    setting = os.environ.get(SWITCH, "").strip().lower()
    if setting not in _ON:
        if setting not in _OFF:
            logging.getLogger(__name__).warning(
                "%s=%s is neither yes nor no, so nothing is recorded; set it to 1", SWITCH, setting
            )
        return
    try:
        from keepstep.monitor.telemetry.attachment import attach_at_initialization

        attach_at_initialization()
    except Exception as error:  # noqa: BLE001 - a monitor that fails must leave the job running
        logging.getLogger(__name__).warning(
            "%s=%s, but this worker is not recorded: %r", SWITCH, setting, error
        )
