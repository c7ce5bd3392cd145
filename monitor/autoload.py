"""What `import torch` calls in every process, by the entry point "torch.backends": attaches the recorder where KEEPSTEP_MONITOR=1 asks for it.

Only workers are attached: processes that have a rank, and did not get it from a worker that started them. Whatever goes wrong is
logged and leaves the process as it was; PyTorch would not be importable if this raised.
"""

from __future__ import annotations

import logging
import os

SWITCH = "KEEPSTEP_MONITOR"


def attach_if_asked() -> None:
    """Attach the recorder if the environment asks for it and this is a worker."""
    if os.environ.get(SWITCH) != "1":
        return
    from monitor.attachment import ATTACHED_VARIABLE, attach, identify

    if os.environ.get(ATTACHED_VARIABLE, str(os.getpid())) != str(os.getpid()) or identify(os.environ).rank < 0:
        return
    try:
        attach()
    except Exception as error:  # noqa: BLE001 - a monitor that fails must leave the job running
        logging.getLogger(__name__).warning("%s=1, but this worker is not recorded: %s", SWITCH, error)
