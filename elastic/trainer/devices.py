"""Chooses and binds the device that a worker computes on: a GPU of its own, or the CPU.

A job for GPUs never computes on CPUs, and two workers never share a GPU, because a driver failed or
a GPU went: that is an error of the node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from keepstep.elastic.errors import DeviceUnavailable

DeviceType = Literal["cpu", "cuda"]


def choose_device(
    asked: DeviceType | None,
    backend: str | None,
    *,
    cuda_works: bool,
    cuda_is_built: bool,
    has_gpus: bool,
) -> DeviceType:
    """Return the type of device that the job computes on.

    Args:
        asked: what the script asks for; None: GPUs where there are any.
        backend: the back ends that the script asks for, which may name CUDA.
        cuda_works: PyTorch can use a GPU here.
        cuda_is_built: this build of PyTorch could.
        has_gpus: this machine has GPUs, or the environment names some.

    Raises:
        DeviceUnavailable: GPUs are to be used, and cannot be.
    """
    if asked == "cpu":
        return "cpu"
    names_cuda = backend is not None and ("nccl" in backend or "cuda" in backend)
    if asked == "cuda" or names_cuda or (has_gpus and cuda_is_built):
        if cuda_works:
            return "cuda"
        why = "cannot use them" if cuda_is_built else "is built without CUDA"
        raise DeviceUnavailable(
            f"the job computes on GPUs, but PyTorch {torch.__version__} on this node {why}. See "
            '`nvidia-smi` and `keepstep doctor`; to compute on CPUs, join with device="cpu"'
        )
    return "cuda" if cuda_works else "cpu"


def device_type(asked: DeviceType | None, backend: str | None) -> DeviceType:
    """Return the type of device that the job computes on, by what this node has.

    Raises:
        DeviceUnavailable: GPUs are to be used, and cannot be.
    """
    return choose_device(
        asked,
        backend,
        cuda_works=torch.cuda.is_available(),
        cuda_is_built=torch.backends.cuda.is_built(),
        has_gpus=_has_gpus(os.environ, Path("/dev")),
    )


def bind(kind: DeviceType, local_rank: int) -> torch.device:
    """Make the GPU of this worker's local rank the current device; return the device.

    Raises:
        DeviceUnavailable: the node has fewer GPUs than workers.
    """
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise DeviceUnavailable(
            f"worker {local_rank} of this node has no GPU: PyTorch sees {count}. Start the job "
            f"with --nproc-per-node {count}, mend the node if a GPU has gone (`nvidia-smi`), and "
            "leave CUDA_VISIBLE_DEVICES as it is inside the script"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _has_gpus(environment: Mapping[str, str], devices: Path) -> bool:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return visible not in ("", "-1", "NoDevFiles")
    return any(entry.name[6:].isdecimal() for entry in devices.glob("nvidia*"))
