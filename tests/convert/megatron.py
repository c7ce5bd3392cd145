"""Megatron-Core itself loads what is written for it: the same logits, and the same next step.

A run trains three steps, is saved by Megatron, and goes on with a fourth. What keepstep makes of
the saved files is loaded into models and new optimizers, whose logits and fourth step must be
the run's, bit for bit, on as many ranks; and nearly on other numbers of ranks. Megatron runs on
CPUs here, over gloo.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from tests.convert.checkpoints import convert, read
from tests.convert.checks import Checks, assert_close, assert_equal
from tests.foreign_fixtures.make_megatron import (
    PADDED,
    POSITIONS,
    Case,
    build,
    save_core,
    save_per_rank,
)
from tests.foreign_fixtures.megatron_on_cpu import join_gloo, patch

REQUIREMENTS = ("megatron-core==0.16.1", "psutil")

STEPS = 3
FULL = "fully_reshardable"
RUNS = {
    # name: how it is trained and saved; how what is made of it is loaded
    "float32": (Case(dtype=torch.float32), Case(dtype=torch.float32)),
    "bfloat16, tied": (Case(gated=False, tied=True), Case(gated=False, tied=True)),
    "two ranks of tensor parallelism, distributed optimizer": (
        Case(tp=2, distributed=FULL), Case(tp=2, distributed=FULL)),
    "buffers of the distributed optimizer": (
        Case(distributed="dp_reshardable"), Case(distributed=FULL)),
    "experts": (Case(experts=4, distributed=FULL), Case(experts=4, distributed=FULL)),
    "layers apart": (Case(apart=True, distributed=FULL), Case(apart=True, distributed=FULL)),
    "a file for each rank": (Case(tp=2, per_rank=True), Case(tp=2)),
}  # fmt: skip


def batch(step: int) -> torch.Tensor:
    """Return tokens, the same for all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 27, (2, POSITIONS), generator=generator)


def forward(model: Any, tokens: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
    length = tokens.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    positions = torch.arange(length).expand_as(tokens)
    result: torch.Tensor = model(tokens, positions, mask, labels=labels)
    return result


def train_step(wrapped: Any, optimizer: Any, step: int) -> None:
    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    tokens = batch(step)
    forward(wrapped, tokens, tokens.roll(1, 1)).float().mean().backward()
    wrapped.finish_grad_sync()
    optimizer.step()


def logits(model: Any) -> torch.Tensor:
    from megatron.core import tensor_parallel

    with torch.no_grad():
        parts = forward(model, batch(100), None)
        gathered = tensor_parallel.gather_from_tensor_model_parallel_region(parts)
    return gathered[..., :PADDED].clone()


def load(case: Case, folder: str, model: Any, optimizer: Any) -> None:
    """Load a checkpoint as Megatron-LM does."""
    from megatron.core import dist_checkpointing

    if case.distributed is not None:
        # Without Transformer Engine, it asks for the steps of a state that there is already.
        optimizer.step()
    path = next(str(path) for path in Path(folder).glob("iter_*"))
    metadata = dist_checkpointing.load_content_metadata(path)
    state: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(
        state["model"], is_loading=True, metadata=metadata
    )
    loaded = dist_checkpointing.load(state, path)
    assert loaded["iteration"] == STEPS
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def work(rank: int, case: Case, source: str | None, directory: str, port: int) -> None:
    """Train and save, or load; then note logits, and the parameters after the next step."""
    patch()
    join_gloo(rank, case.world, port)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp, pipeline_model_parallel_size=case.pp,
        expert_model_parallel_size=case.ep,
    )  # fmt: skip
    torch.manual_seed(1 if source is None else 2)
    (wrapped,), optimizer, scheduler = build(case)
    model = wrapped.module
    if source is None:
        for step in range(STEPS):
            train_step(wrapped, optimizer, step)
            scheduler.step(1)
        from tests.foreign_fixtures.make_megatron import arguments

        state = {
            "args": arguments(case), "checkpoint_version": 3.0, "iteration": STEPS,
            "opt_param_scheduler": scheduler.state_dict(),
        }  # fmt: skip
        save = save_per_rank if case.per_rank else save_core
        save(case, directory, [model], optimizer, state)
        torch.distributed.barrier()
    else:
        load(case, source, model, optimizer)
    found: dict[str, Any] = {"logits": logits(model)}
    train_step(wrapped, optimizer, STEPS)
    found["after"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.save(found, Path(directory, f"found_{rank}.pt"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def ranks(case: Case, source: Path | None, directory: Path) -> list[dict[str, Any]]:
    """Run ranks, and return what each has found."""
    directory.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = None if source is None else str(source)
    arguments = (case, given, str(directory), port)
    mp.start_processes(work, args=arguments, nprocs=case.world, start_method="spawn")
    return [torch.load(directory / f"found_{rank}.pt") for rank in range(case.world)]


def check(checks: Checks, name: str, saved: Case, loaded: Case, root: Path) -> None:
    expected = ranks(saved, None, root / "run")
    convert(root / "run", root / "universal")
    convert(root / "universal", root / "megatron", "--to", "megatron-core")
    with checks(f"{name}: what is written is what was read"):
        assert_equal(read(root / "megatron"), read_without_steps(root / "run"))
    found = ranks(loaded, root / "megatron", root / "loaded")
    with checks(f"{name}: Megatron loads it, and has the same logits"):
        assert_equal([one["logits"] for one in found], [one["logits"] for one in expected])
    with checks(f"{name}: and the same parameters after the next step"):
        assert_equal([one["after"] for one in found], [one["after"] for one in expected])
    if (loaded.tp, loaded.experts) == (2, None):
        other = ranks(dataclasses.replace(loaded, tp=1), root / "megatron", root / "one")
        with checks(f"{name}: one rank has nearly the same logits"):
            torch.testing.assert_close(
                other[0]["logits"], expected[0]["logits"], atol=0.05, rtol=0.05
            )
    elif loaded.dtype == torch.float32:
        other = ranks(dataclasses.replace(loaded, tp=2), root / "megatron", root / "two")
        with checks(f"{name}: two ranks of tensor parallelism have nearly the same logits"):
            assert_close(other[0]["logits"], expected[0]["logits"])


def read_without_steps(url: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint but for steps, which Megatron-Core has once for all."""
    return {key: tensor for key, tensor in read(url).items() if not key.endswith("/step")}


def main() -> None:
    """Check all runs, or those whose names have one of the texts on the command line."""
    checks = Checks()
    for name, (saved, loaded) in RUNS.items():
        if len(sys.argv) > 1 and not any(part in name for part in sys.argv[1:]):
            continue
        with checks.all_of(name) as directory:
            check(checks, name, saved, loaded, directory)
    checks.finish()


if __name__ == "__main__":
    main()
