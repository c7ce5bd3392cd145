"""Describes the machine: PyTorch, CUDA, NCCL and the GPUs.

`python -m ops.gpu.machine` prints it as JSON. It is a process of its own, so that the checks'
runner loads neither PyTorch nor CUDA.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The facts about the machine that checks need.

    Args:
        gpus: names of the GPUs.
        missing: why no check can be run; empty if some can.
        torch, cuda, nccl: versions, as PyTorch reports them; empty if there is none.
        python, kernel: versions.
        cores: number of processors that this process may use.
        gpu_nbytes: memory of the first GPU.
    """

    gpus: tuple[str, ...] = ()
    missing: str = ""
    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    python: str = platform.python_version()
    kernel: str = platform.release()
    cores: int = 0
    gpu_nbytes: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Machine:
        fields = json.loads(text)
        return cls(**{**fields, "gpus": tuple(fields["gpus"])})


def examine() -> Machine:
    """Return this machine as a process of its own sees it."""
    command = [sys.executable, "-m", "ops.gpu.machine"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Machine(missing=f"PyTorch does not answer within {_TIMEOUT_S:.0f} s")
    if done.returncode:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        return Machine(missing=f"PyTorch cannot be used: {last}")
    return Machine.from_json(done.stdout.splitlines()[-1])


def _examine_here() -> Machine:
    cores = len(os.sched_getaffinity(0))
    try:
        import torch
    except ImportError as error:
        return Machine(missing=f"no PyTorch: {error}", cores=cores)
    if not torch.cuda.is_available():
        return Machine(missing="no GPU", torch=torch.__version__, cores=cores)
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    return Machine(
        gpus=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        nccl=nccl,
        cores=cores,
        gpu_nbytes=torch.cuda.get_device_properties(0).total_memory,
    )


if __name__ == "__main__":
    print(_examine_here().to_json())
