"""Names the environment variables of ranks: those that recovery needs, and two nodes on one GPU.

NCCL refuses two ranks of one host on one GPU. It recognizes a host by `NCCL_HOSTID`: with different
ones two ranks on one GPU are two nodes, which sockets over loopback join.
"""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.elastic.worker.device_environment import DEVICE_VARIABLES

RECOVERY: Mapping[str, str] = {variable.name: variable.value for variable in DEVICE_VARIABLES}
"""Variables of every rank of a check, as of keepstep's workers, unless the check says otherwise."""

LOOPBACK: Mapping[str, str] = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}

DETERMINISTIC: Mapping[str, str] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Further variables that `torch.use_deterministic_algorithms` needs."""


def two_nodes_on_one_gpu(node: int) -> dict[str, str]:
    """Return the variables with which NCCL takes processes on one GPU for those of two nodes."""
    return {**LOOPBACK, "NCCL_HOSTID": f"keepstep-gpu-{node}", "NCCL_IB_DISABLE": "1"}


def on_one_gpu(rank: int) -> dict[str, str]:
    """Return the variables of a rank that shares the first GPU with the others."""
    return {**RECOVERY, **two_nodes_on_one_gpu(rank)}


def on_own_gpu(rank: int) -> dict[str, str]:
    """Return the variables of a rank that has a GPU of its own, on one host with the others."""
    return {**RECOVERY, **LOOPBACK}
