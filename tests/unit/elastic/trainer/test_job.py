"""Claims about a job of one rank, whose groups may leave garbage, at the ends of its generations.

Its process groups are real; its agent and its snapshot server only answer as the test says.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator
from datetime import timedelta
from typing import NoReturn, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import keepstep
from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.memory.arena import Arena
from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from keepstep.elastic.errors import ProcessUnusable
from keepstep.elastic.trainer import process_groups, snapshot_manager
from keepstep.elastic.trainer.job import Job
from keepstep.elastic.trainer.mesh_rule import MeshRule
from keepstep.elastic.trainer.process_groups import ProcessGroups
from keepstep.elastic.worker.messages import Assignment, Broken, Drained
from keepstep.elastic.worker.session import Session

BACK_END = "unfenced"


def gloo_by_another_name(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Return a back end of which keepstep does not know that its aborted collectives raise."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


class Replaced(Exception):
    """The process asked to be replaced."""


class Agent:
    """A worker's session with an agent that knows the generations of this job beforehand."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.aborting_generation = 0
        self.last_generation = 2

    def report(self, message: object) -> None:
        self.said.append(message)

    def progress(self, generation: int, step: int) -> None:
        return

    def wait_for_assignment(self, newer_than: int) -> Assignment:
        assert newer_than < self.last_generation, "there is no other generation"
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store = store
        return Assignment(
            generation=newer_than + 1, node="a", rank=0, world_size=1, local_rank=0,
            local_world_size=1, node_rank=0, node_count=1, store_host="127.0.0.1",
            store_port=store.port, server="unix:/none", secret="", job="job", max_restarts=3,
        )  # fmt: skip

    def is_closing(self, generation: int) -> bool:
        return generation <= self.aborting_generation

    is_aborting = is_closing

    committed_step = -1
    stored_step = -1

    def is_committed(self, step: int) -> bool:
        return True

    def wait_for_commit(self, step: int, generation: int, **_: bool) -> bool:
        return not self.is_closing(generation)

    def wait_for_abort_order(self, generation: int) -> None:
        assert self.is_aborting(generation)
        self.said.append(f"awaits the order to abort generation {generation}")

    def on_abort(self, *_: object, **__: object) -> None:
        return

    def end_to_be_replaced(self, reason: str, *, is_fault: bool = False) -> NoReturn:
        raise Replaced(reason, is_fault)


class SnapshotServer:
    """A snapshot server's client; `refusal` is why the server begins nothing, if it does not."""

    def __init__(self) -> None:
        self.refusal = ""
        self.sealed: list[SnapshotId] = []
        self._arenas: list[Arena] = []

    def begin(self, snapshot: SnapshotId, rank: int, nbytes: int, **_: object) -> tuple[int, Arena]:
        if self.refusal:
            raise SnapshotUnavailable(self.refusal)
        self._arenas.append(Arena.create(nbytes))
        return len(self._arenas), self._arenas[-1]

    def seal(self, snapshot: SnapshotId, *_: object) -> None:
        self.sealed.append(snapshot)

    def close(self) -> None:
        return


def build(world: keepstep.World) -> keepstep.State:
    return keepstep.State(nn.Linear(2, 2), functools.partial(torch.optim.SGD, lr=0.1))


class Running:
    """A job, and what it talks to."""

    def __init__(self) -> None:
        self.agent = Agent()
        self.server = SnapshotServer()
        self.job = Job(
            session=cast(Session, self.agent),
            groups=ProcessGroups("cpu", BACK_END),
            build=build,
            mesh=MeshRule(),
            checkpoint=None,
            start_from=None,
            snapshot_every=1,
            seed=0,
            compare_replicas_every=None,
            on_divergence="report",
        )

    def step(self, *, refusal: str = "", aborts: bool = False) -> keepstep.Step:
        """Run a step, after whose computation its copy is refused, or its generation aborted."""
        with self.job.step() as step:
            self.job.model(torch.ones(1, 2)).sum().backward()
            self.job.optimizer.step()
            self.server.refusal = refusal
            if aborts:
                self.agent.aborting_generation = self.job.world.generation
        return step


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    if BACK_END not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACK_END, gloo_by_another_name, devices=["cpu"])
    # Entering a generation sets variables.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    running = Running()
    monkeypatch.setattr(snapshot_manager, "SnapshotClient", lambda *_: running.server)
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield running
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_rng_state(generators[0])
    random.setstate(generators[1])
    np.random.set_state(generators[2])


def test_copy_that_training_waits_for_and_that_is_refused_ends_the_generation(
    running: Running,
) -> None:
    """All are fenced: nobody seals what collectives have left that may have been aborted."""
    running.job._copies_synchronously = True
    with running.job as job:
        assert running.step().completed
        sealed = [SnapshotId(1, 1)]
        assert running.server.sealed == sealed
        step = running.step(refusal="generation 1 is fenced", aborts=True)
        assert not step.completed
        assert job.world.generation == 2
        assert job.steps == 0
        assert running.server.sealed == sealed
        running.server.refusal = ""
        said = [text for text in running.agent.said if isinstance(text, str | Broken | Drained)]
        # The agent knows of the end: nothing is reported as broken.
        assert said == ["awaits the order to abort generation 1", Drained(generation=1)]
        assert running.step().completed


def test_copy_that_is_complete_when_its_generation_is_aborted_is_not_sealed(
    running: Running,
) -> None:
    running.job._copies_synchronously = True
    with running.job as job:
        assert not running.step(aborts=True).completed
        assert running.server.sealed == []
        assert job.world.generation == 2
        assert running.step().completed


def test_refused_copy_of_a_generation_that_goes_on_is_an_error_of_the_job(
    running: Running,
) -> None:
    running.job._copies_synchronously = True
    with pytest.raises(SnapshotUnavailable, match="memory is short"), running.job:
        running.step(refusal="memory is short")


def test_last_copy_that_is_refused_because_the_generation_is_aborted_ends_the_generation(
    running: Running,
) -> None:
    """Nothing was sealed before, so the next one cannot resume at the end of the loop."""
    with pytest.raises(Replaced, match="the last steps must be computed again"), running.job:
        running.step(refusal="generation 1 is fenced", aborts=True)
    assert running.job.world.generation == 2


def test_last_copy_that_is_refused_otherwise_is_an_error_of_the_job(running: Running) -> None:
    with pytest.raises(SnapshotUnavailable, match="memory is short"), running.job:
        running.step(refusal="memory is short")


def refuse_to_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(_: process_groups.GroupAbort) -> None:
        raise ProcessUnusable("1 of 1 process groups did not abort")

    monkeypatch.setattr(process_groups.GroupAbort, "wait", wait)


def test_job_that_is_done_ends_well_although_its_groups_do_not_abort(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running.job:
        assert running.step().completed
        refuse_to_abort(monkeypatch)
    assert running.server.sealed == [SnapshotId(1, 1)]
    assert caplog.messages == ["1 of 1 process groups did not abort; the job is done all the same"]


def test_rank_whose_groups_do_not_abort_between_generations_asks_to_be_replaced(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_abort(monkeypatch)
    running.job._copies_synchronously = True
    with pytest.raises(Replaced) as raised, running.job:
        running.step(refusal="generation 1 is fenced", aborts=True)
    assert raised.value.args == ("1 of 1 process groups did not abort", False)
