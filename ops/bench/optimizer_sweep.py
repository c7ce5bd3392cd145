"""Resumes every optimizer of torch.optim and of pytorch_optimizer, and compares with not stopping.

`python ops/bench/optimizer_sweep.py --json [--quick]`. The last line is one JSON object. It needs
an environment with pytorch_optimizer and einops (from PyPI) and keepstep.

Each optimizer does four steps on a small model, is saved by `keepstep.checkpoint`, is loaded into a
model and an optimizer that are freshly made, and does four more. That is compared, bit for bit,
with eight steps in a row: `equal`. It may also be `refused_by_name`: the save raises LayoutMismatch
and says which optimizer, or which entry of it, cannot be stored. Anything else is `wrong`. All
numbers drawn at random are the same in both runs.

`in_memory` has the same counts by way of a job's snapshots, taken after each step, and `by_torch`
by way of `torch.save` and `load_state_dict`, in the same run. `versions` says of what. `--quick`
takes every eighth optimizer of pytorch_optimizer.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import Optimizer

from keepstep import State, checkpoint
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.source import BoxRequest, TensorSpec, slots_in
from keepstep.checkpoint.live.tensors import LiveState, bytes_of, specs_of
from keepstep.elastic.data.position import Position
from keepstep.elastic.trainer.training_state import TrainingState

sys.path.insert(0, str(Path(__file__).parents[2]))

from ops.bench.optimizer_cases import CLASSES, Case, cases, model_of

STEPS, STOP = 8, 4
QUICK_STRIDE = 8
OUTCOMES = ("equal", "refused_by_name", "wrong")


class Refused(Exception):
    """The save has refused the optimizer."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of a state in memory, as a source."""

    step: int
    tensors: Mapping[str, TensorSpec]
    documents: Mapping[str, Json]
    contents: Mapping[str, bytes]

    @classmethod
    def of(cls, state: LiveState, step: int) -> Snapshot:
        contents = {tensor.key: bytes_of(tensor.data).numpy().tobytes() for tensor in state.tensors}
        documents = json.loads(json.dumps(state.documents))
        return cls(step, specs_of(state.tensors), documents, contents)

    def slots(self, parameters: Collection[str]) -> Mapping[str, Mapping[str, TensorSpec]]:
        return slots_in(self.tensors, parameters)

    def known_keys(self) -> Collection[str]:
        return self.tensors.keys()

    def read(self, requests: Sequence[BoxRequest]) -> None:
        for request in requests:
            assert request.box.shape == self.tensors[request.key].shape, "one rank reads it whole"
            request.into[:] = self.contents[request.key]


def made(case: Case) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = model_of(case.name.rpartition(".")[2])
    return model, case.make(model)


def trained(
    case: Case,
    model: nn.Module,
    optimizer: Optimizer,
    steps: range,
    after_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Do steps; each draws the same numbers whenever it is done."""
    torch.manual_seed(1)
    images, labels = torch.randn(16, 1, 4, 4), torch.randint(CLASSES, (16,))
    for step in steps:
        torch.manual_seed(step)
        np.random.seed(step)
        random.seed(step)
        case.step(model, optimizer, images, labels)
        after_step(step)


def by_checkpoint(case: Case) -> nn.Module:
    model, optimizer = made(case)
    trained(case, model, optimizer, range(STOP))
    with tempfile.TemporaryDirectory() as url:
        try:
            checkpoint.save(url, {"model": model, "optimizer": optimizer}, step=STOP)
        except LayoutMismatch as error:
            raise Refused(str(error)) from error
        resumed, other = made(case)
        checkpoint.load(url, {"model": resumed, "optimizer": other})
    trained(case, resumed, other, range(STOP, STEPS))
    return resumed


def job_state(case: Case) -> TrainingState:
    torch.manual_seed(0)
    model = model_of(case.name.rpartition(".")[2])
    state = State(model=model, optimizer=lambda parameters: case.make(model))
    return TrainingState(state, torch.device("cpu"), 0)


def in_memory(case: Case) -> nn.Module:
    try:
        stopped = job_state(case)
    except LayoutMismatch as error:
        raise Refused(str(error)) from error
    snapshots: list[Snapshot] = []

    def take(step: int) -> None:
        snapshots.append(Snapshot.of(stopped.capture(Position(step + 1)), step + 1))

    try:
        trained(case, stopped.model, stopped.optimizers[0], range(STOP), take)
    except LayoutMismatch as error:
        raise Refused(str(error)) from error
    resumed = job_state(case)
    resumed.restore_from(snapshots[-1], seed=0)
    trained(case, resumed.model, resumed.optimizers[0], range(STOP, STEPS))
    return resumed.model


def by_torch(case: Case) -> nn.Module:
    model, optimizer = made(case)
    trained(case, model, optimizer, range(STOP))
    with tempfile.NamedTemporaryFile() as file:
        torch.save([model.state_dict(), optimizer.state_dict()], file.name)
        of_model, of_optimizer = torch.load(file.name, weights_only=False)
    resumed, other = made(case)
    resumed.load_state_dict(of_model)
    other.load_state_dict(of_optimizer)
    trained(case, resumed, other, range(STOP, STEPS))
    return resumed


RESUMES: Mapping[str, Callable[[Case], nn.Module]] = {
    "checkpoint": by_checkpoint,
    "in_memory": in_memory,
    "by_torch": by_torch,
}


def outcome(resume: Callable[[Case], nn.Module], case: Case, expected: nn.Module) -> list[str]:
    """Return what came of stopping and resuming, and why."""
    try:
        resumed = resume(case)
    except Refused as error:
        return ["refused_by_name", str(error)]
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the finding
        return ["wrong", f"{type(error).__name__}: {error}"]
    for name, tensor in resumed.state_dict().items():
        other = expected.state_dict()[name]
        if not torch.equal(tensor, other):
            return ["wrong", f"{name} differs by {(tensor - other).abs().max().item():.3g}"]
    return ["equal", ""]


def swept(case: Case) -> dict[str, list[str]]:
    """Return the outcome of each way to resume.

    Raises:
        RuntimeError: eight steps in a row change nothing, so that nothing would be compared.
    """
    expected, optimizer = made(case)
    trained(case, expected, optimizer, range(STEPS))
    if all(map(torch.equal, expected.parameters(), made(case)[0].parameters())):
        raise RuntimeError(f"{case.name} has not changed any parameter in {STEPS} steps")
    return {name: outcome(resume, case, expected) for name, resume in RESUMES.items()}


def counts(results: Mapping[str, Mapping[str, list[str]]], way: str) -> dict[str, int]:
    found = Counter(outcomes[way][0] for outcomes in results.values())
    return {name: found[name] for name in OUTCOMES}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="Every eighth optimizer of pytorch_optimizer.")
def main(as_json: bool, quick: bool) -> None:
    console = Console(stderr=as_json)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    library: Any = importlib.import_module("pytorch_optimizer")
    chosen = cases(torch.optim, "torch.optim")
    chosen += cases(library, "pytorch_optimizer")[:: QUICK_STRIDE if quick else 1]
    with tempfile.TemporaryDirectory() as directory:
        # One of them runs in a process group only.
        store = dist.FileStore(f"{directory}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        results = {case.name: swept(case) for case in chosen}
        dist.destroy_process_group()
    table = Table(title="Not equal", show_lines=True)
    for column in ("optimizer", "by way of", "outcome", "why"):
        table.add_column(column)
    for name, outcomes in results.items():
        for way, (found, why) in outcomes.items():
            if found != "equal":
                table.add_row(name, way, found, why)
    console.print(table)
    libraries = ("torch", "pytorch_optimizer")
    print(
        json.dumps({
            "optimizers": len(results),
            **counts(results, "checkpoint"),
            "in_memory": counts(results, "in_memory"),
            "by_torch": counts(results, "by_torch"),
            "versions": {name: importlib.metadata.version(name) for name in libraries},
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
