"""Names the environment variables of ranks: those that recovery needs, and two nodes on one GPU.

NCCL refuses two ranks of one host on one GPU. What it takes for a host is `NCCL_HOSTID`: with
different ones two ranks on one GPU are two nodes, which sockets over loopback join.
"""

from __future__ import annotations

from collections.abc import Mapping

RECOVERY: Mapping[str, str] = {
    # The default, 3, rethrows in the watchdog, which ends the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # The default, 1, lets any exception in the watchdog end the process.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # The monitor of heartbeats then only logs.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # A lost wake-up lets a group's destructor wait this long; the default is 480.
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "20",
    # A dump makes the monitor sleep for a heartbeat's timeout, and destructors wait for it.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # The watchdog sleeps four times this with a lock that the next collective needs.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
"""What every rank of a check gets, as keepstep's workers do, unless the check says otherwise."""

LOOPBACK: Mapping[str, str] = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


def on_one_gpu(rank: int) -> dict[str, str]:
    """Return the variables of a rank that shares the first GPU with the others."""
    return {
        **RECOVERY,
        **LOOPBACK,
        "NCCL_HOSTID": f"keepstep-gpu-{rank}",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
    }


def on_own_gpu(rank: int) -> dict[str, str]:
    """Return the variables of a rank that has a GPU of its own, on one host with the others."""
    return {**RECOVERY, **LOOPBACK, "NCCL_NVLS_ENABLE": "0"}
