"""G14: a compiled model in two generations of one process, of two ranks and then of one.

Compiled code names groups by names that repeat after a rebuild, with the old world's sizes in it,
and CUDA graphs keep memory. Proves that `torch._dynamo.reset()` between generations is enough.
Passes if a gathering model that is compiled again gives the right result in each generation, and
after the reset no graph of the compiled model is left and the GPU's memory is what it was before,
within 64 MiB. Not run where the compiler cannot be used.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor

from ops.gpu.background import described
from ops.gpu.check import Figures, Finding, NotRun
from ops.gpu.groups import enter, leave
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, figures_of, run_ranks

_WIDTH = 1024
_LEFT_NBYTES = 64 << 20
_TOLERANCE = 1e-2


def check(machine: Machine) -> Finding:
    """Run two generations on rank 0; rank 1 takes part in the first."""
    results = run_ranks(run_generations, 2, limit_s=52, generations=2)
    found, _ = figures_of(results)
    if found.get("compiler_error"):
        raise NotRun(f"nothing can be compiled here: {found['compiler_error']}")
    generations = found["generations"]
    return Finding(
        {
            "results are right in both generations": all(
                generation["right"] for generation in generations
            ),
            "graphs were made": any(generation["graphs"] for generation in generations),
            "no graph is left after the reset": not any(
                generation["graphs_left"] for generation in generations
            ),
            "memory is back after the reset": all(
                generation["left_nbytes"] <= _LEFT_NBYTES for generation in generations
            ),
        },
        found,
    )


def run_generations(rank: Rank) -> Figures:
    """Compile, compute and reset, twice; rank 1 leaves after the first generation."""
    torch.cuda.set_device(rank.device)
    if error := _compiler_error():
        return {"compiler_error": error}
    generations = []
    for generation, world_size in enumerate((2, 1)):
        if rank.rank >= world_size:
            break
        _return_memory()
        before = torch.cuda.memory_reserved()
        began_s = time.monotonic()
        enter(rank, generation=generation, world_size=world_size)
        right, graphs = _compute(rank.rank, world_size)
        torch._dynamo.reset()
        leave(rank.device)
        _return_memory()
        generations.append(
            {
                "world_size": world_size,
                "right": right,
                "graphs": graphs,
                "graphs_left": _graphs(),
                "left_nbytes": torch.cuda.memory_reserved() - before,
                "seconds": round(time.monotonic() - began_s, 1),
            }
        )
    return {"generations": generations}


def _compiler_error() -> str:
    """Return why nothing can be compiled; empty if something can."""
    try:
        double: Callable[[torch.Tensor], torch.Tensor] = torch.compile(lambda x: x * 2)
        double(torch.ones(4, device="cuda"))
    except Exception as error:  # noqa: BLE001 - whatever the compiler lacks is the reason
        return described(error)
    return ""


def _compute(rank: int, world_size: int) -> tuple[bool, int]:
    """Return whether compiled results are those without a compiler, and the number of graphs."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _WIDTH)).cuda()
    group = dist.group.WORLD
    assert group is not None

    def gather(values: torch.Tensor) -> torch.Tensor:
        return all_gather_tensor(values * 2, gather_dim=0, group=group)

    compiled_model = torch.compile(model, mode="reduce-overhead")
    compiled_gather = torch.compile(gather)
    values = torch.full((8, _WIDTH), float(rank + 1), device="cuda")
    right = True
    with torch.no_grad():
        for _ in range(4):
            difference = (compiled_model(values) - model(values)).abs().max().item()
            gathered = compiled_gather(values)
            expected = torch.cat(
                [torch.full_like(values, 2.0 * (peer + 1)) for peer in range(world_size)]
            )
            right = right and difference < _TOLERANCE and torch.equal(gathered, expected)
    return right, _graphs()


def _graphs() -> int:
    return sum(issubclass(type(found), torch.cuda.CUDAGraph) for found in gc.get_objects())


def _return_memory() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
