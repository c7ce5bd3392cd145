"""A training script whose ranks are replicas, of which one can be damaged."""

import json
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep
from keepstep.elastic.trainer.replicas import ReplicaCheck
from keepstep.elastic.worker.session import Session

# A rank that is alone on its node would take a thread per core, and sum in another order.
torch.set_num_threads(1)
options = json.loads(sys.argv[1])
was_damaged = Path(options["log"]) / "damaged"


def lose_rank_1(owner: type, name: str, is_time: Callable[..., bool]) -> None:
    """Lose rank 1 of the first generation when it calls a method of the job's end."""
    method = getattr(owner, name)

    def call_unless_lost(self: Any, *arguments: Any, **named: Any) -> Any:
        place = (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"])
        if place == ("0", "1") and is_time(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        return method(self, *arguments, **named)

    setattr(owner, name, call_unless_lost)


match options.get("lost_when_last_step_is"):
    case "compared":
        lose_rank_1(ReplicaCheck, "run_if_due", lambda step: step == options["steps"])
    case "committed":
        lose_rank_1(Session, "wait_for_commit", lambda *_: True)
    case "stored":
        lose_rank_1(Session, "wait_for_stored", lambda *_: True)


def build(world: keepstep.World) -> keepstep.State:
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    if options.get("compile"):
        model.compile(backend="eager", fullgraph=True)
    if options["parallel"]:
        # Without the option DDP rearranges its buckets after the first step of a generation, and
        # so sums four ranks' gradients in another order in that step.
        model = DistributedDataParallel(model, find_unused_parameters=True)
    return keepstep.State(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))


class Points:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = torch.sin(torch.arange(8.0) * (index + 1))
        return point, point.sum()


with keepstep.join(
    build,
    snapshot_every=options.get("snapshot_every", 1),
    compare_replicas_every=options.get("compare_every", 5),
    on_divergence=options.get("on_divergence", "report"),
    checkpoint=options.get("checkpoint"),
) as job:
    for points, values in job.batches(Points(), global_batch=16, steps=options["steps"]):
        with job.step():
            loss = (job.model(points).squeeze(1) - values).square().mean()
            loss.backward()
            job.optimizer.step()
            is_due = [job.world.rank, job.steps + 1] == options.get("damage")
            # It does not happen again when the step is computed again.
            if is_due and not was_damaged.exists():
                while not (Path(options["log"]) / "complete").exists():
                    time.sleep(0.01)
                was_damaged.touch()
                with torch.no_grad():
                    next(iter(job.model.parameters()))[0, 0] += 2**-20
        line = {
            "step": job.steps,
            "sum": zlib.crc32(
                b"".join(p.detach().numpy().tobytes() for p in job.model.parameters())
            ),
        }
        path = Path(options["log"]) / f"rank-{job.world.rank}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
assert os.environ["WORLD_SIZE"] == str(options.get("world_size", 4))
