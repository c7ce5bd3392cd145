"""Sets environment variables of NCCL for keepstep's workers, each with its reason.

PyTorch and NCCL read them when a process group is created, in threads of their own: changing the
environment later could crash a thread that reads it. So `keepstep.join` sets them once, before the
first group. A script that does not join keeps PyTorch's own watchdog, for nobody else would end its
hung collectives. A variable that the user has set keeps the user's value.

Sources: `ProcessGroupNCCL.cpp` and `ProcessGroupNCCL.hpp` of PyTorch 2.10 to 2.13, and the
    in-process restart of NVIDIA's resiliency extension, which sets most of them to the same values.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceVariable:
    """An environment variable, its value, and why it has that value."""

    name: str
    value: str
    reason: str


DEVICE_VARIABLES = (
    DeviceVariable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
        "by default the watchdog ends the process on a failed collective; keepstep recovers in it",
    ),
    DeviceVariable(
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "0",
        "by default a device's error in the watchdog ends the process before it can be reported",
    ),
    DeviceVariable(
        "TORCH_NCCL_ENABLE_MONITORING",
        "0",
        "by default a watchdog that an abort blocks for long ends the process",
    ),
    DeviceVariable(
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        "20",
        "the end of a process group may wait for one interval, by default 480 s",
    ),
    DeviceVariable(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "0",
        "after a dump the end of a process group waits for one interval of the heartbeat",
    ),
    DeviceVariable(
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
        "1",
        "on a failed collective the watchdog sleeps four times as long, by default 60 s, and the "
        "next collective waits for it",
    ),
    DeviceVariable(
        "NCCL_NVLS_ENABLE",
        "0",
        "multicast slots of processes that were killed are released late: new communicators fail "
        "once they run out. Set 1 to have the faster all-reduce within an NVSwitch domain",
    ),
)


def set_device_variables(environment: MutableMapping[str, str]) -> None:
    """Set these variables in an environment; the user's own values stay."""
    for variable in DEVICE_VARIABLES:
        environment.setdefault(variable.name, variable.value)
