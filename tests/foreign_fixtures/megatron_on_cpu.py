"""Lets Megatron-Core run on CPUs over gloo: what it asks of CUDA is given by the CPU.

Tried with Megatron-Core 0.16.1 and torch 2.13. Import it before `megatron`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        if str(keywords.get("device", "")).startswith("cuda"):
            keywords["device"] = "cpu"
        return function(*args, **keywords)

    return call


@contextlib.contextmanager
def _nothing(*_: object, **__: object) -> Iterator[None]:
    yield


def patch() -> None:
    """Replace what needs a GPU in this process."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_stream = lambda device=None: None
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self
    type_of = torch.Tensor.type

    def type_as_if_on_cuda(self: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        if args or keywords:
            return type_of(self, *args, **keywords)
        return type_of(self).replace("torch.", "torch.cuda.")

    torch.Tensor.type = type_as_if_on_cuda
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    if not moe_utils.HAVE_TE:
        # It is looked up without being set where Transformer Engine is not installed.
        moe_utils.te_general_gemm = None
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states_but_steps(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        # Torch's Adam, unlike Apex's, has a step next to the tensors, which is loaded before: one
        # tensor of all parameters, which each would count up.
        group, place = self.model_param_group_index_map[parameter]
        own = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        if "step" in own:
            own["step"] = own["step"].clone()
        set_states(self, parameter, {**{k: own[k] for k in own if k == "step"}, **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_but_steps
    random.CudaRNGStatesTracker.fork = _nothing
    random.model_parallel_cuda_manual_seed = lambda *_, **__: None


def join_gloo(rank: int, world: int, port: int) -> None:
    """Enter a process group of this many processes on one machine."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world), LOCAL_RANK=str(rank), CUDA_DEVICE_MAX_CONNECTIONS="1")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
