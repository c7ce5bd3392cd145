"""Lets torchtitan, which is made for accelerators, run on CPUs; Python finds it by PYTHONPATH.

It changes PyTorch alone, and only in processes that import torchtitan.
"""

import sys
from types import SimpleNamespace
from typing import Any


class BeforeTorchtitan:
    """Changes PyTorch when torchtitan is about to be imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torchtitan":
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            pretend_an_accelerator()


def pretend_an_accelerator() -> None:
    import torch
    import torch._utils
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout
    from torch.distributed.fsdp import FSDPModule

    cpu: Any = torch.cpu
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device: cpu
    cpu.current_device = lambda: 0
    cpu.get_device_name = lambda device: "CPU"
    cpu.get_device_properties = lambda device: SimpleNamespace(total_memory=1 << 30)
    cpu.memory_stats = lambda device: {}
    cpu.reset_peak_memory_stats = lambda: None
    cpu.empty_cache = lambda: None
    # Gloo has no reduction that multiplies first, which torchtitan asks for with a factor of 1.
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_of_sum(module: Any, factor: float) -> None:
        set_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor_of_sum  # type: ignore[method-assign]
    if not hasattr(dist, "set_timeout"):
        # PyTorch 2.13 has it by another name.
        dist.set_timeout = _set_pg_timeout  # type: ignore[attr-defined]


sys.meta_path.insert(0, BeforeTorchtitan())  # type: ignore[arg-type]
