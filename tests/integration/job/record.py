"""A training script that records the samples and the exact loss of every step and rank."""

import functools
import json
import os
import random
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, initialize
from text import Windows, standard_library
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW

import keepstep
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient
from keepstep.elastic.trainer.training_state import TrainingState

options = json.loads(sys.argv[1])
log = Path(options["log"])
config = GPTConfig(
    width=32,
    layers=2,
    context=options.get("context", 32),
    heads=2,
    dropout=options.get("dropout", 0.0),
)

# One operation for all parameters, of which a step otherwise takes a dozen for each: with DTensors
# a quarter of the workers' processor time. A fused operation takes no parameters of several meshes.
adamw = functools.partial(AdamW, lr=1e-3, fused="tp" not in options.get("mesh", ()))


class Average:
    """A running average of the weights, with their sharding."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.values = {
            name: torch.zeros_like(parameter, device="cpu")
            for name, parameter in model.named_parameters()
        }

    @torch.no_grad()
    def update(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.values[name].lerp_(parameter, 0.1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        # Copies, as some implementations return them: restoring must use `load_state_dict`.
        return {name: value.clone() for name, value in self.values.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.values = dict(state)

    def checksum(self) -> int:
        return sum(zlib.crc32(value.to_local().numpy().tobytes()) for value in self.values.values())


def two_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    norms = [parameter for name, parameter in named if "norm" in name]
    others = [parameter for name, parameter in named if "norm" not in name]
    return [adamw(others), torch.optim.SGD(norms, lr=1e-2, momentum=0.9)]


average: Average | None = None


class Entered:
    """The step that was entered last: a value that training code changes before it computes."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


entered = Entered()
# One scale doubles so often that it matters where the scaler resumes.
scaler = torch.amp.GradScaler("cpu", enabled=bool(options.get("scaled")), growth_interval=3)


class Stream:
    """The same windows without an index, each changed at random."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._next = self._start = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        start, self._start = self._start, 0
        for number in range(start, len(self._windows)):
            self._next = number + 1
            places = random.randrange(8)
            yield tuple(part.roll(places) for part in self._windows[number])

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = self._start = state["next"]


if options.get("starts_session"):
    subprocess.Popen(["sleep", "600"], start_new_session=True)

state_written = threading.Event()
if options.get("write_between_steps"):
    begin = SnapshotClient.begin

    def begin_late(self: SnapshotClient, *arguments: Any, **options: Any) -> Any:
        """Delay the first copy until the state has been written to."""
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            state_written.wait()
        return begin(self, *arguments, **options)

    SnapshotClient.begin = begin_late  # type: ignore[method-assign]

if options.get("restores_wrongly"):
    restore_from = TrainingState.restore_from

    def restore_wrongly(self: TrainingState, *arguments: Any) -> Any:
        """Change what rank 0 restores of a layer in the second generation."""
        position = restore_from(self, *arguments)
        if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]) == ("1", "0"):
            with torch.no_grad():
                next(self.model.blocks.parameters()).to_local().add_(1)
        return position

    TrainingState.restore_from = restore_wrongly  # type: ignore[method-assign]


def build(world: keepstep.World) -> keepstep.State:
    with torch.device("meta"):
        model = GPT(config)
    for block in model.blocks:
        if "tp" in options.get("mesh", ()):
            parallelize_module(
                block, world.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        fully_shard(block, mesh=world.mesh["dp"])
    fully_shard(model, mesh=world.mesh["dp"])
    global average
    average = Average(model) if options.get("average") else None
    return keepstep.State(
        model,
        (lambda _: two_optimizers(model)) if options.get("two") else adamw,
        extra={"entered": entered, "scaler": scaler, **({"average": average} if average else {})},
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20),
        initialize=initialize,
    )


def gloo_by_another_name(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Return a back end of which keepstep does not know that its aborted collectives raise."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


dist.Backend.register_backend("other", gloo_by_another_name, devices=["cpu"])


last_step = min(options["steps"], options.get("stop_at", options["steps"]))


def await_disturbance(generation: int, steps: int) -> None:
    """Hold rank 0, and so the others inside the next step, until the generation is closed.

    A test has time to see what it waits for before it kills something. Each generation that it ends
    has three steps at least.
    """
    if steps >= last_step - 3 * (options["disturbed"] + 1 - generation):
        while not job._session.is_closing(generation):
            time.sleep(0.01)


def await_release() -> None:
    """Hold the last step of a recovered job until the test has seen what ends with the job."""
    while not (log / "release").exists():
        time.sleep(0.01)


assert not [name for name in sys.modules if name.startswith(("etcd3", "google.protobuf"))]
with keepstep.join(
    build,
    checkpoint=options.get("checkpoint"),
    checkpoint_every=options.get("every"),
    checkpoint_compression=options.get("compression"),
    keep_last=options.get("keep_last"),
    keep_every=options.get("keep_every"),
    start_from=options.get("start_from"),
    snapshot_every=options.get("snapshots", 1),
    mesh=options.get("mesh"),
    backend=options.get("backend"),
) as job:
    has_converged = torch.zeros((), dtype=torch.int64)
    windows = Windows(standard_library(), 32)
    for batch in job.batches(
        Stream(windows) if options.get("stream") else windows,
        global_batch=8,
        steps=options["steps"],
    ):
        is_last = job.steps + 1 == options["steps"]
        if options.get("held") and is_last and job.world.generation > 1:
            await_release()
        with job.step() as step:
            entered_before, entered.step = entered.step, job.steps + 1
            drawn = [random.random(), np.random.rand()]
            losses = []
            chunks = (part.chunk(options.get("micro_batches", 1)) for part in batch)
            micro_batches = list(zip(*chunks, strict=True))
            for number, micro_batch in enumerate(micro_batches, 1):
                job.model.set_requires_gradient_sync(number == len(micro_batches))
                loss = job.model(micro_batch) * step.loss_scale / len(micro_batches)
                scaler.scale(loss).backward()
                losses.append(loss.detach())
            for optimizer, scheduler in zip(job.optimizers, job.schedulers, strict=True):
                scaler.step(optimizer)
                scheduler.step()
            scaler.update()
            loss = torch.stack(losses).sum()
            if options.get("stop_at"):
                # One rank decides, as one that evaluates would.
                has_converged.fill_(job.world.rank == 0 and job.steps + 1 >= options["stop_at"])
                dist.all_reduce(has_converged)
            if average is not None:
                average.update(job.model)
            # Inside the step, so that the line is written before the step can be committed. A step
            # that fails at its end is computed and recorded again.
            world = job.world
            line = {
                "step": job.steps + 1,
                "rank": world.rank,
                "world_size": world.world_size,
                "generation": world.generation,
                "loss": loss.item().hex(),
                "average": average.checksum() if average else None,
                "entered_before": entered_before,
                "drawn": drawn,
                "scale": scaler.get_scale(),
                "samples": [zlib.crc32(sample.numpy().tobytes()) for sample in batch[0]],
            }
            with (log / f"rank-{world.rank}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        if options.get("endless"):
            # Other tests need the cores, too.
            time.sleep(0.05)
        if 1 < world.generation <= options["disturbed"]:
            # Without a commit the next snapshot is left out: the last ones before the hold may be.
            job._session.wait_for_commit(job.steps - 1, world.generation)
        if world.generation <= options["disturbed"] and world.rank == 0:
            await_disturbance(world.generation, job.steps)
        if options.get("write_between_steps"):
            with torch.no_grad():
                job.model.head.weight.mul_(0.999)
            state_written.set()
        if has_converged:
            break
