"""Ranks that change from one layout to the next, as a job's do, but without agents.

Process groups, the state and its snapshots are the production's; the models are of the examples. A
test stands for the agents and the leader: it opens generations and commits snapshots, and tells by
a store that the ranks connect to.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInputOutput, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.data.position import Position
from keepstep.elastic.rendezvous.records import Member, SnapshotCommit
from keepstep.elastic.trainer.process_groups import ProcessGroups, World
from keepstep.elastic.trainer.restorer import Restorer
from keepstep.elastic.trainer.snapshot_interval import SnapshotInterval
from keepstep.elastic.trainer.snapshot_manager import SnapshotManager
from keepstep.elastic.trainer.state import State
from keepstep.elastic.trainer.training_state import TrainingState
from keepstep.elastic.worker.messages import Assignment
from keepstep.elastic.worker.session import Session
from tests.adaptive_timeouts import patient

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "layouts"))

import experts
import fsdp2
import pipeline
import tensor_parallel
from transformer import (
    Config,
    Sequences,
    Transformer,
    initialize,
    loss_of,
)

CONFIG = Config(vocabulary=16, length=8, width=8, heads=2, layers=4, experts=2)
GLOBAL_BATCH = 12
SEED = 0
LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "DDP 4": {"dp": 4},
    "FSDP 4": {"dp": 4},
    "FSDP 3": {"dp": 3},
    "HSDP 2 x 2": {"dp_replicate": 2, "dp_shard": 2},
    "FSDP 2 x TP 2": {"dp": 2, "tp": 2},
    "PP 2 x FSDP 2": {"pp": 2, "dp": 2},
    "PP 4": {"pp": 4},
    "EP 2 x FSDP 2": {"dp_shard": 2, "ep": 2},
}

adamw = functools.partial(torch.optim.AdamW, lr=1e-2, foreach=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One generation: which layout, and the steps in it.

    Attributes:
        layout: a name of `LAYOUTS`.
        commits: whether a step is computed and committed.
        tries: whether a step is computed last that is not committed: the next generation, too,
            begins with it.
    """

    layout: str
    commits: bool
    tries: bool

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return functools.reduce(int.__mul__, LAYOUTS[self.layout].values())


def samples(step: int, data_rank: int = 0, data_size: int = 1) -> list[torch.Tensor]:
    """Return a share of the inputs and of the targets of a step."""
    first, count = step * GLOBAL_BATCH, GLOBAL_BATCH // data_size
    numbers = range(first + data_rank * count, first + (data_rank + 1) * count)
    pairs = [Sequences(CONFIG)[number] for number in numbers]
    return [torch.stack(part) for part in zip(*pairs, strict=True)]


def undisturbed_losses(steps: int) -> list[float]:
    """Return the losses of one process with the whole model."""
    model = Transformer(CONFIG)
    initialize(model)
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(steps):
        inputs, targets = samples(step)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def model_of(layout: str, world: World) -> nn.Module:
    """Return the model in a layout, and in pipelines what runs it as its attribute `schedule`."""
    model: Any
    if "pp" in world.mesh.mesh_dim_names:
        schedule = "1F1B" if layout == "PP 4" else "Interleaved1F1B"
        micro_batches = 4 if layout == "PP 4" else 2
        model, model_schedule = pipeline.pipeline(world, CONFIG, schedule, micro_batches)
        model.schedule = model_schedule
        return model
    if layout == "DDP 4":
        model = Transformer(CONFIG)
        initialize(model)
        return DistributedDataParallel(model, process_group=world.mesh.get_group("dp"))
    with torch.device("meta"):
        model = Transformer(CONFIG)
    if "ep" in world.mesh.mesh_dim_names:
        experts.spread_and_shard(model, world.mesh)
        return model
    if "tp" in world.mesh.mesh_dim_names:
        cut_up(model, world)
    data = [name for name in world.mesh.mesh_dim_names if name.startswith("dp")]
    return fsdp2.shard(model, world.mesh[tuple(data)])


def cut_up(model: Transformer, world: World) -> None:
    """Cut up attention and sequences; each rank has all experts, which see whole sequences."""
    whole = PrepareModuleInputOutput(
        input_layouts=Shard(1),
        desired_input_layouts=Replicate(),
        use_local_input=True,
        output_layouts=Replicate(),
        desired_output_layouts=Shard(1),
    )
    plan = {name: style for name, style in tensor_parallel.LAYER.items() if "mlp." not in name}
    parallelize_module(model, world.mesh["tp"], tensor_parallel.WHOLE)
    for layer in model.layers.values():
        parallelize_module(layer, world.mesh["tp"], {**plan, "mlp": whole})


def loss_of_step(model: Any, world: World, step: int) -> torch.Tensor | None:
    """Compute gradients; return the loss of this rank's share, None where it is not known."""
    inputs, targets = samples(step, world.data_rank, world.data_size)
    if not hasattr(model, "schedule"):
        loss = loss_of(model(inputs), targets)
        loss.backward()
        return loss.detach()
    losses: list[torch.Tensor] = []
    inputs_of_first = (inputs,) if hasattr(model, "tokens") else ()
    model.schedule.step(*inputs_of_first, target=targets, losses=losses)
    return torch.stack(losses).mean().detach() if hasattr(model, "head") else None


def mean_loss(loss: torch.Tensor | None, world: World) -> float:
    """Return the mean over the shares of the batch, the same on all ranks."""
    # Each share counts as often as ranks know its loss.
    sums = torch.zeros(2, dtype=torch.float64)
    if loss is not None:
        sums += torch.tensor([loss.item(), 1.0])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


class AllCommitted:
    """A session in which every snapshot is committed at once."""

    def is_committed(self, step: int) -> bool:
        return True

    def is_closing(self, generation: int) -> bool:
        return False

    def may_seal(self, generation: int) -> bool:
        return True


class Rank:
    """One process: takes its place in each generation that has one for it."""

    def __init__(self, rank: int, port: int) -> None:
        self._rank = rank
        self._port = port
        self._store = TCPStore(
            "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=patient(60))
        )
        self._groups = ProcessGroups("cpu")

    def visit(self, generation: int, visit: Visit) -> None:
        """Enter a generation, restore the state, and compute its steps."""
        opened = json.loads(self._store.get(f"opened/{generation}"))
        assignment = self._assignment(generation, visit, opened)
        world = self._groups.enter(assignment, LAYOUTS[visit.layout])
        # A replica is initialized by `model_of`, under the names that others have.
        fill = None if visit.layout == "DDP 4" else initialize
        state = State(model_of(visit.layout, world), adamw, initialize=fill)
        share = (world.data_rank, world.data_size)
        training = TrainingState(
            state, world.device, assignment.rank, share, is_stage=world.has_stages
        )
        restorer = Restorer(
            training=training, assignment=assignment, checkpoint=None, start_from=None, seed=SEED
        )
        position = restorer.resume().position
        manager = SnapshotManager(
            training=training,
            device=world.device,
            assignment=assignment,
            session=cast(Session, AllCommitted()),
            interval=SnapshotInterval(1, 0.0),
            step=position.step,
        )
        self._commit(manager, generation, position)
        if visit.commits:
            position = self._step(manager, generation, world, position)
            self._commit(manager, generation, position)
        if visit.tries:
            self._step(manager, generation, world, position)
        dist.barrier()
        self._groups.abort()
        manager.close()
        del manager, restorer, training, state
        gc.collect()
        self._groups.leave()

    def _assignment(self, generation: int, visit: Visit, opened: Mapping[str, Any]) -> Assignment:
        on_a = self._rank < opened["ranks_of_a"]
        resume = None
        if opened["resume"] is not None:
            snapshot = SnapshotId(*opened["resume"])
            members = tuple(Member(**member) for member in opened["holders"])
            resume = SnapshotCommit(snapshot, members, 0)
        return Assignment(
            generation=generation,
            node="a" if on_a else "b",
            rank=self._rank,
            world_size=visit.ranks,
            local_rank=0,
            local_world_size=1,
            node_rank=0 if on_a else 1,
            node_count=2,
            store_host="127.0.0.1",
            store_port=self._port,
            server=opened["servers"][0 if on_a else 1],
            secret=opened["secret"],
            job="job",
            max_restarts=0,
            resume=resume,
        )

    def _step(
        self, manager: SnapshotManager, generation: int, world: World, position: Position
    ) -> Position:
        training = manager._training
        manager.begin_step()
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        loss = loss_of_step(training.model, world, position.step)
        for optimizer in training.optimizers:
            optimizer.step()
        position = Position(position.step + 1, position.batch + 1)
        manager.complete_step(position)
        mean = mean_loss(loss, world)
        if world.rank == 0:
            self._store.set(f"loss/{generation}/{position.step}", mean.hex())
        return position

    def _commit(self, manager: SnapshotManager, generation: int, position: Position) -> None:
        """Seal the state, and wait until the test has committed it."""
        if position.step == 0:
            return
        manager.seal_before_closing(position, lambda step: True)
        self._store.set(f"sealed/{generation}/{position.step}/{self._rank}", "")
        self._store.wait([f"committed/{generation}/{position.step}"])


def run_rank(rank: int, port: int, visits: Sequence[Visit]) -> None:
    """Take part in all generations that have this rank, then end this process."""
    torch.set_num_threads(1)
    # Collecting garbage in each generation need not look at all of PyTorch.
    gc.freeze()
    process = Rank(rank, port)
    for generation, visit in enumerate(visits, 1):
        if rank < visit.ranks:
            process.visit(generation, visit)
    # Models may still refer to gloo's groups, whose threads may abort an interpreter's exit.
    os._exit(0)
