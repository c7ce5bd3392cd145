"""Claims about a job of one rank, whose groups may leave garbage, at the ends of its generations.

Its process groups are real; its agent and its snapshot server only answer as the test says.
"""

from __future__ import annotations

import functools
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import keepstep
from keepstep.checkpoint.errors import CheckpointError, RankFailed, SnapshotUnavailable
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.format.stored.object_names import StoredStep
from keepstep.checkpoint.snapshot.arena import Arena
from keepstep.elastic.data.data_pass import DataPass
from keepstep.elastic.data.position import Position, StreamPosition
from keepstep.elastic.errors import ProcessUnusable, StepRejected, UsageError
from keepstep.elastic.rendezvous.records import SnapshotCommit
from keepstep.elastic.trainer import process_groups, restorer, snapshot_manager
from keepstep.elastic.trainer.bad_steps import BadSteps
from keepstep.elastic.trainer.job import Job
from keepstep.elastic.trainer.mesh_rule import MeshRule
from keepstep.elastic.trainer.passes import Passes
from keepstep.elastic.trainer.process_groups import ProcessGroups, World
from keepstep.elastic.trainer.replicas import ReplicaCheck
from keepstep.elastic.trainer.restorer import Restorer, Resumed
from keepstep.elastic.trainer.snapshot_agreement import Outcome
from keepstep.elastic.trainer.training_state import TrainingState
from keepstep.elastic.worker.messages import Assignment, Broken, Drained
from keepstep.elastic.worker.session import Session
from tests.unit.elastic.worker.places import assignment

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
        self.last_generation = 3
        self.tells_late = False
        self.resume: SnapshotCommit | None = None

    def report(self, message: object) -> None:
        self.said.append(message)
        if isinstance(message, Broken):
            self.aborting_generation = message.generation

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
            resume=self.resume if newer_than > 0 else None,
        )  # fmt: skip

    def is_closing(self, generation: int) -> bool:
        return generation <= self.aborting_generation

    is_aborting = is_closing

    def wait_for_closing(self, generation: int, timeout_s: float | None = None) -> bool:
        if self.tells_late:
            self.aborting_generation = generation
        return self.is_closing(generation)

    is_managed = True
    committed_step = -1
    stored_step = -1

    def roll_back(self, generation: int, step: int) -> None:
        return

    def is_committed(self, step: int) -> bool:
        return True

    def may_seal(self, generation: int) -> bool:
        return not self.is_aborting(generation)

    def wait_for_commit(self, step: int, generation: int, **_: bool) -> bool:
        return not self.is_closing(generation)

    def wait_for_abort_order(self, generation: int) -> None:
        assert self.is_aborting(generation)
        self.said.append(f"awaits the order to abort generation {generation}")

    def on_abort(self, *_: object, **__: object) -> None:
        return

    def exit_for_replacement(self, reason: str, *, is_fault: bool = False) -> NoReturn:
        raise Replaced(reason, is_fault)

    def restart_script(self, reason: str) -> NoReturn:
        raise Replaced(reason)


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

    def seal(self, snapshot: SnapshotId, *_: object, **__: object) -> None:
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
            on_bad_step=BadSteps(at_most=2),
        )
        self._batches = batches(self.job)

    def step(self, *, refusal: str = "", aborts: bool = False) -> keepstep.Step:
        """Run a step, after whose computation its copy is refused, or its generation aborted."""
        with self.job.step() as step:
            self.job.model(torch.ones(1, 2)).sum().backward()
            self.job.optimizer.step()
            self.server.refusal = refusal
            if aborts:
                self.agent.aborting_generation = self.job.world.generation
        return step

    def next_step(self, *, refusal: str = "", aborts: bool = False) -> keepstep.Step:
        """Run a step, as `step` does, with the next batch of a loop that stays open."""
        next(self._batches)
        return self.step(refusal=refusal, aborts=aborts)

    def reject(self, reason: str) -> None:
        """Run a step that is rejected."""
        with self.job.step() as step:
            step.reject(reason)


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


def test_ranks_learn_what_each_holds_before_a_step_where_the_state_is_restored(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that begins has no optimizer slots yet, of which ranks may have different ones."""
    running.job._state._copies_synchronously = True
    learned_at: list[int] = []
    monkeypatch.setattr(
        ReplicaCheck, "learn_layouts", lambda _: learned_at.append(running.job.steps)
    )
    with running.job as job:
        assert learned_at == []
        assert running.next_step().completed
        monkeypatch.setattr(Restorer, "resume", lambda *_: Resumed(Position(1, 1), "memory"))
        assert not running.next_step(aborts=True).completed
        assert (job.world.generation, learned_at) == (2, [1])
        assert running.next_step().completed
        assert learned_at == [1]


def test_monitor_receives_the_steps_of_the_job_also_after_a_recovery(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shown step is compared with the steps of snapshots and checkpoints."""
    marked: list[int] = []
    monkeypatch.setattr(keepstep.monitor, "begin_step", marked.append)
    running.job._state._copies_synchronously = True
    with running.job:
        assert running.next_step().completed
        monkeypatch.setattr(Restorer, "resume", lambda *_: Resumed(Position(1, 1), "memory"))
        assert not running.next_step(aborts=True).completed
        assert running.next_step().completed
        assert running.next_step().completed
    assert marked == [1, 2, 2, 3]


def test_copy_that_training_waits_for_and_that_is_refused_ends_the_generation(
    running: Running,
) -> None:
    """All are fenced: nobody seals what collectives have left that may have been aborted."""
    running.job._state._copies_synchronously = True
    with running.job as job:
        assert running.next_step().completed
        sealed = [SnapshotId(1, 1)]
        assert running.server.sealed == sealed
        step = running.next_step(refusal="generation 1 is fenced", aborts=True)
        assert not step.completed
        assert job.world.generation == 2
        assert job.steps == 0
        assert running.server.sealed == sealed
        running.server.refusal = ""
        said = [text for text in running.agent.said if isinstance(text, str | Broken | Drained)]
        # The agent knows of the end: nothing is reported as broken.
        assert said == ["awaits the order to abort generation 1", Drained(generation=1)]
        assert running.next_step().completed


def test_copy_that_is_complete_when_its_generation_is_aborted_is_not_sealed(
    running: Running,
) -> None:
    running.job._state._copies_synchronously = True
    with running.job as job:
        assert not running.next_step(aborts=True).completed
        assert running.server.sealed == []
        assert job.world.generation == 2
        assert running.next_step().completed


def test_what_was_compiled_is_compiled_again_in_the_next_generation(running: Running) -> None:
    """It would find the new process groups by the names of the old ones."""
    compiled_in: list[int] = []

    def back_end(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        compiled_in.append(running.job.world.generation)
        return graph.forward

    doubled = torch.compile(lambda value: 2 * value, backend=back_end)
    running.job._state._copies_synchronously = True
    with running.job as job:
        for _ in range(2):
            doubled(torch.ones(1))
        assert not running.next_step(aborts=True).completed
        assert job.world.generation == 2
        doubled(torch.ones(1))
        assert running.next_step().completed
    assert compiled_in == [1, 2]


def test_refused_copy_of_a_generation_that_goes_on_is_an_error_of_the_job(
    running: Running,
) -> None:
    running.job._state._copies_synchronously = True
    with pytest.raises(SnapshotUnavailable, match="memory is short"), running.job:
        running.next_step(refusal="memory is short")


def test_copy_that_is_refused_before_the_rank_learns_of_the_abort_ends_the_generation(
    running: Running,
) -> None:
    """The node's server is fenced first. The script failed, and that counted as its own error."""
    running.job._state._copies_synchronously = True
    with running.job as job:
        assert running.next_step().completed
        running.agent.tells_late = True
        assert not running.next_step(refusal="generation 1 is fenced").completed
        assert job.world.generation == 2
        running.agent.tells_late = False
        assert running.next_step().completed


def test_script_whose_loop_is_over_restarts_before_it_enters_another_generation(
    running: Running,
) -> None:
    """A rank that is new runs the script's end again: one that went on would wait beyond it."""
    with pytest.raises(Replaced, match="ranks that are new run its end again"), running.job:
        running.next_step(refusal="generation 1 is fenced", aborts=True)
    assert running.job.world.generation == 1


def test_last_copy_that_is_refused_otherwise_is_an_error_of_the_job(running: Running) -> None:
    with pytest.raises(SnapshotUnavailable, match="memory is short"), running.job:
        running.next_step(refusal="memory is short")


def refuse_to_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(_: process_groups.GroupAbort) -> None:
        raise ProcessUnusable("1 of 1 process groups did not abort")

    monkeypatch.setattr(process_groups.GroupAbort, "wait", wait)


def test_job_that_is_done_ends_well_although_its_groups_do_not_abort(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running.job:
        assert running.next_step().completed
        refuse_to_abort(monkeypatch)
    assert running.server.sealed == [SnapshotId(1, 1)]
    before, abort = caplog.messages
    assert abort == "1 of 1 process groups did not abort; the job is done all the same"
    # The loop was not run to its end.
    assert before.startswith("rank 0 leaves the loop over job.batches after step 1, before its")


def test_rank_whose_groups_do_not_abort_between_generations_asks_to_be_replaced(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_abort(monkeypatch)
    running.job._state._copies_synchronously = True
    with pytest.raises(Replaced) as raised, running.job:
        running.next_step(refusal="generation 1 is fenced", aborts=True)
    assert raised.value.args == ("1 of 1 process groups did not abort", False)


SAMPLES = [torch.full((2,), float(number)) for number in range(8)]
PEER_LOST = RuntimeError("[gloo/transport] Connection closed by peer")


def batches(job: Job) -> Iterator[torch.Tensor]:
    return job.batches(SAMPLES, 1, shuffle=False)


def test_guard_recovers_from_a_lost_peer_and_lets_other_errors_pass(running: Running) -> None:
    with running.job as job:
        guard = job.guard()
        assert not guard.completed
        with pytest.raises(ZeroDivisionError), guard:
            _ = 1 / 0
        assert (guard.completed, job.world.generation) == (False, 1)
        with guard:
            raise PEER_LOST
        assert (guard.completed, job.world.generation) == (False, 2)
        with guard:
            pass
        assert guard.completed


def test_guard_outside_of_a_loop_that_is_entered_without_a_question_is_named_once(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot be left out in a process that is new, so all restart after a recovery."""
    with running.job as job:
        for _ in range(2):
            with job.guard():
                pass
        for _ in batches(job):
            with pytest.raises(Replaced, match=r"while not guard\.completed"), job.step():
                raise PEER_LOST
            break
    assert sum("without the question" in record.message for record in caplog.records) == 1


def test_process_that_is_new_leaves_guards_out_and_says_so_with_a_name_that_is_missing(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Restorer, "resume", lambda *_: Resumed(Position(3, 3), "memory"))

    def evaluate_and_print() -> None:
        guard = running.job.guard()
        while not guard.completed:
            with guard:
                loss = 1.0
        print(loss)

    with pytest.raises(NameError, match="loss") as raised, running.job:
        evaluate_and_print()
    assert "left out 1 guards" in raised.value.__notes__[0]
    assert "State.extra" in raised.value.__notes__[0]


def test_guard_that_is_over_is_not_entered_by_a_script_that_has_asked(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Restorer, "resume", lambda *_: Resumed(Position(3, 3), "memory"))
    with running.job as job:
        guard = job.guard()
        assert guard.completed
        with pytest.raises(UsageError, match=r"while not guard\.completed"), guard:
            pass


def test_guard_with_a_batch_from_before_a_recovery_restarts_the_script(
    running: Running,
) -> None:
    """Ranks that are new begin the next step meanwhile."""
    with running.job as job:
        next(running._batches)
        with job.step():
            raise PEER_LOST
        with pytest.raises(Replaced, match="was entered with the batch"), job.guard():
            pass


def test_step_with_a_batch_from_before_a_recovery_is_refused(running: Running) -> None:
    with running.job as job:
        for _ in batches(job):
            with job.guard():
                raise PEER_LOST
            with pytest.raises(UsageError, match="go to the next batch"):
                running.step()
            break
        assert job.world.generation == 2


def test_guard_after_the_loop_restarts_the_script_if_steps_must_be_computed_again(
    running: Running,
) -> None:
    with running.job as job:
        for _ in batches(job):
            assert running.step().completed
        guard = job.guard()
        assert not guard.completed
        with pytest.raises(Replaced, match="the last steps"), guard:
            raise PEER_LOST


def test_guard_after_a_loop_that_was_left_early_restarts_the_script(running: Running) -> None:
    """The steps since the restored state would be lost, and what is guarded be of an older one."""
    with running.job as job:
        for _ in batches(job):
            assert running.step().completed
            if job.steps == 2:
                break
        guard = job.guard()
        assert not guard.completed
        with pytest.raises(Replaced, match="the last steps"), guard:
            raise PEER_LOST


class Counter:
    def __init__(self, count: float) -> None:
        self.state: dict[str, float | torch.Tensor] = {"count": count}

    def state_dict(self) -> dict[str, float | torch.Tensor]:
        return self.state

    def load_state_dict(self, state: dict[str, float | torch.Tensor]) -> None:
        self.state = state


def test_job_that_begins_once_more_has_its_extra_objects_as_they_were(running: Running) -> None:
    """A process that is new has them so; else ranks would go on with different ones."""
    kept, best = Counter(1.0), Counter(math.inf)
    sums = Counter(0.0)
    sums.state = {"sum": torch.ones(2)}
    made = []

    def build_with_extra(world: keepstep.World) -> keepstep.State:
        made.append(Counter(0.0))
        extra = {"kept": kept, "best": best, "sums": sums, "made": made[-1]}
        return replace(build(world), extra=extra)

    running.job._state._build = build_with_extra
    with running.job as job:
        guard = job.guard()
        assert not guard.completed
        with guard:
            kept.state["count"], best.state["count"], made[0].state["count"] = 5.0, 0.5, 7.0
            cast(torch.Tensor, sums.state["sum"]).add_(1.0)
            raise PEER_LOST
        assert job.world.generation == 2
        assert (kept.state, best.state) == ({"count": 1.0}, {"count": math.inf})
        assert torch.equal(cast(torch.Tensor, sums.state["sum"]), torch.ones(2))
        assert made[1].state == {"count": 0.0}


def test_extra_object_that_outlives_a_generation_is_restored_into_what_a_new_process_has(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept tensors of an undone step that no snapshot had."""
    kept = Counter(1.0)
    states_restored_into = []

    def resume(*_: object) -> Resumed:
        states_restored_into.append(dict(kept.state))
        return Resumed(Position(3, 3), "memory")

    running.job._state._build = lambda world: replace(build(world), extra={"kept": kept})
    monkeypatch.setattr(Restorer, "resume", resume)
    with running.job as job:
        next(running._batches)
        with job.guard():
            kept.state["count"] = 5.0
            kept.state["mean"] = torch.ones(2)
            raise PEER_LOST
        assert states_restored_into == [{"count": 1.0}] * 2


def restorer_of(job: Job, url: str) -> Restorer:
    return Restorer(
        training=job._state.training,
        assignment=assignment(1),
        checkpoint=url,
        start_from=None,
        seed=0,
    )


@pytest.mark.parametrize("failure", [RankFailed, CheckpointError])
def test_roll_back_that_cannot_reach_storage_goes_on_from_memory(
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: type[CheckpointError],
) -> None:
    def fail(*_: object) -> NoReturn:
        raise failure("the storage is away")

    monkeypatch.setattr(restorer, "agreed_steps", fail)
    with running.job as job:
        assert restorer_of(job, "/away")._roll_back(3) is None
    assert caplog.messages[0] == "the storage is away"


def test_roll_back_stands_where_a_later_checkpoint_cannot_be_removed(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Storage had lost its newest checkpoint, and the job went on from what it was to leave."""
    steps = [StoredStep(300, 1), StoredStep(200, 1), StoredStep(100, 1)]
    removed = []

    def remove(_: str, stored: StoredStep, *, now: float) -> None:
        removed.append(stored.step)
        if stored.step == 200:
            raise CheckpointError("the storage is away")

    monkeypatch.setattr(restorer, "agreed_steps", lambda *_: steps)
    monkeypatch.setattr(restorer.housekeeping, "remove", remove)
    resumed = Resumed(Position(100, 100), "checkpoint")
    monkeypatch.setattr(Restorer, "_restore_stored", lambda *_: resumed)
    with running.job as job:
        assert restorer_of(job, "/url")._roll_back(150) is resumed
    assert removed == [300, 200]
    (error,) = (record.message for record in caplog.records if record.levelname == "ERROR")
    assert "step-00000200-000001, which the job has rolled back from, is not removed" in error


def test_rejected_step_is_undone_and_its_batch_is_skipped(running: Running) -> None:
    """Also if the loop has caught the exception."""
    seen = []
    with running.job as job:
        for batch in batches(job):
            seen.append(int(batch[0, 0]))
            with job.step() as step:
                assert step.number == job.steps + 1
                try:
                    step.report(value=float("inf") if seen[-1] == 3 else 0.0)
                except Exception:  # noqa: BLE001 - as a careless loop does
                    continue
                if seen[-1] == 6:
                    step.reject("it is even")
                job.model(batch).sum().backward()
                job.optimizer.step()
        assert seen == [0, 1, 2, 3, 0, 1, 2, 4, 5, 6, 0, 1, 2, 4, 5, 7]
        assert job.steps == 6
    broken = [message.error for message in running.agent.said if isinstance(message, Broken)]
    assert broken == [
        "rank 0 rejected step 4: value=inf; global batch 3 is skipped",
        "rank 0 rejected step 6: it is even; global batch 6 is skipped",
    ]


def test_one_rejected_step_too_many_is_an_error_of_the_job(running: Running) -> None:
    with running.job as job:
        for number, _ in enumerate(batches(job)):
            if number == 2:
                with pytest.raises(StepRejected, match="step 1 of global batch 2: no"):
                    running.reject("no")
                break
            running.reject("no")
        assert job.world.generation == 3


def test_loss_that_requires_gradients_is_reported_without_a_warning(running: Running) -> None:
    loss = torch.ones((), requires_grad=True) * 2
    with running.job as job:
        for _ in batches(job):
            with warnings.catch_warnings(), job.step() as step:
                warnings.simplefilter("error")
                step.report(loss=loss)
            assert step.completed
            break
    assert loss.requires_grad


@pytest.mark.parametrize("placement", [Shard(0), Partial()])
def test_tensor_of_which_a_rank_has_a_part_is_not_judged(
    running: Running, placement: Placement
) -> None:
    """As the norm of a sharded gradient: its number is that of this rank's part."""
    with running.job as job:
        for _ in batches(job):
            part, whole = (
                DTensor.from_local(torch.ones(1), job.world.mesh, [place], run_check=False)
                for place in (placement, Replicate())
            )
            with pytest.raises(UsageError, match=r"norm\.full_tensor\(\)"), job.step() as step:
                step.report(norm=part)
            with job.step() as step:
                step.report(norm=whole, loss=1.0)
            assert step.completed
            break


def test_reports_need_a_policy_and_a_step(running: Running) -> None:
    with running.job as job:
        with pytest.raises(UsageError, match=r"inside `with job\.step"):
            job.step().report(loss=1.0)
        job._steps._judge = None
        for _ in batches(job):
            with pytest.raises(UsageError, match="on_bad_step="), job.step() as step:
                step.report(loss=1.0)
            break


def test_step_outside_of_a_loop_is_refused(running: Running) -> None:
    """Nothing would end its generation in good order, and the next pass leave out its batch."""
    refused = r"outside of a loop over job\.batches"
    with running.job as job:
        with pytest.raises(UsageError, match=refused):
            running.step()
        for _ in batches(job):
            assert running.step().completed
        with pytest.raises(UsageError, match=refused):
            running.step()
        for _ in batches(job):
            break
        with pytest.raises(UsageError, match=refused):
            running.step()
        assert job.steps == len(SAMPLES)


def test_second_step_of_a_batch_is_refused_and_one_after_an_error_of_the_loop_is_not(
    running: Running,
) -> None:
    """The batches that later steps count would be left out after a recovery."""
    seen = []
    with running.job as job:
        for batch in batches(job):
            seen.append(int(batch[0, 0]))
            with pytest.raises(ZeroDivisionError), job.step():
                _ = 1 / 0
            assert running.step().completed
            with pytest.raises(UsageError, match="has had its step"):
                running.step()
    assert seen == list(range(len(SAMPLES)))


def test_stopped_pass_is_over_on_this_rank_and_the_next_pass_is_not(running: Running) -> None:
    steps = []
    with running.job as job:
        for _ in range(2):
            for _ in batches(job):
                if job.steps == 2:
                    job.stop()
                assert running.step().completed
            steps.append(job.steps)
        job.stop()
    assert steps == [3, 11]


def test_job_that_is_started_again_with_another_global_batch_is_refused(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its position counts batches: samples would be left out, or trained twice."""
    captured: list[Position] = []
    capture = TrainingState.capture

    def note(self: TrainingState, position: Position) -> Any:
        captured.append(position)
        return capture(self, position)

    monkeypatch.setattr(TrainingState, "capture", note)
    with running.job as job:
        monkeypatch.setattr(Restorer, "resume", lambda *_: Resumed(captured[-1], "memory"))
        for _ in job.batches(SAMPLES, 1):
            assert running.step().completed
            if job.steps == 2:
                with job.guard():
                    raise PEER_LOST
                break
        # A process that is new has begun no pass.
        job._passes = job._state._passes = Passes()
        assert next(job.batches(SAMPLES, 1)) is not None
        job._passes = job._state._passes = Passes()
        with pytest.raises(UsageError, match="2 batches into a pass over 8 samples"):
            next(job.batches(SAMPLES, 2))


def test_pass_that_begins_before_the_last_one_is_over_is_refused(running: Running) -> None:
    """It restarted the script, which came to the same place again, without an end."""
    with running.job as job:
        for _ in batches(job):
            with pytest.raises(UsageError, match=f"{8 - job.steps} global batches of the pass"):
                next(batches(job))
            assert running.step().completed
            if job.steps == 2:
                break
        with pytest.raises(UsageError, match=r"6 global batches.*end it early by job\.stop\(\)"):
            next(batches(job))


def test_pass_whose_last_step_was_completed_before_a_break_is_over(running: Running) -> None:
    with running.job as job:
        for _ in range(2):
            for _ in batches(job):
                assert running.step().completed
                if job.steps % len(SAMPLES) == 0:
                    break
        assert job.steps == 2 * len(SAMPLES)


def test_script_whose_state_is_of_an_earlier_pass_restarts(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed = Resumed(Position(3, 3), "memory")

    def train_two_passes() -> None:
        for _ in range(2):
            for _ in batches(running.job):
                if running.job.steps == len(SAMPLES):
                    monkeypatch.setattr(Restorer, "resume", lambda *_: resumed)
                    with running.job.guard():
                        raise PEER_LOST
                else:
                    assert running.step().completed

    with pytest.raises(Replaced, match="in an earlier pass over the data"), running.job:
        train_two_passes()


def test_script_that_counted_steps_which_were_undone_restarts(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next pass begins too early, but it did nothing wrong."""
    resumed = Resumed(Position(1, 1), "memory")

    def train_two_passes_by_counting() -> None:
        for _ in range(2):
            for number, _ in enumerate(batches(running.job), 1):
                if number == 3:
                    monkeypatch.setattr(Restorer, "resume", lambda *_: resumed)
                    with running.job.guard():
                        raise PEER_LOST
                else:
                    assert running.step().completed
                if number == len(SAMPLES):
                    break

    with pytest.raises(Replaced, match="steps of the pass before were undone"), running.job:
        train_two_passes_by_counting()


def read_shard(shard: int, offset: int) -> Iterator[tuple[torch.Tensor, int]]:
    return ((SAMPLES[place], place + 1) for place in range(offset, len(SAMPLES)))


def whole_position(stream: Any, batches: int) -> StreamPosition:
    """Return what a snapshot of all ranks holds of a stream."""
    data: DataPass[Any] = DataPass(0, 0, 0, stream, 4, steps=8)
    reading = data.from_position(Position(), 0, 1)
    for _ in range(batches):
        next(reading)
    reached = data.stream_position(Position(batches, batches))
    assert reached is not None
    return reached


@pytest.mark.parametrize("in_good_order", [False, True])
def test_state_of_a_smaller_world_holds_the_position_of_partitions_that_other_ranks_had(
    running: Running, monkeypatch: pytest.MonkeyPatch, in_good_order: bool
) -> None:
    stream = keepstep.ShardedStream(range(4), read_shard)
    enter, resume, capture = ProcessGroups.enter, Restorer.resume, TrainingState.capture
    expected = whole_position(stream, 3)
    captured: list[tuple[int, StreamPosition | None]] = []

    def enter_as_one_of_two(self: ProcessGroups, *arguments: Any) -> World:
        world = enter(self, *arguments)
        return replace(world, data_rank=0, data_size=2) if world.generation == 1 else world

    def resume_whole(self: Restorer, *arguments: Any) -> Resumed:
        resumed = resume(self, *arguments)
        is_first = running.job.world.generation == 1
        return resumed if is_first else Resumed(Position(3, 3, expected), "memory")

    def note(self: TrainingState, position: Position) -> Any:
        captured.append((running.job.world.generation, position.stream))
        return capture(self, position)

    monkeypatch.setattr(ProcessGroups, "enter", enter_as_one_of_two)
    monkeypatch.setattr(Restorer, "resume", resume_whole)
    monkeypatch.setattr(TrainingState, "capture", note)
    with running.job as job:
        for _ in job.batches(stream, 4, steps=4):
            assert running.step().completed
            if job.steps == 3 and in_good_order:
                snapshots = job._state.snapshots
                ending = Outcome(is_ending=True)
                snapshots._agreement = replace(snapshots._agreement, outcome=ending)
            elif job.steps == 3:
                with job.guard():
                    raise PEER_LOST
                # As a snapshot that is taken again asks for it.
                assert job._passes.located(Position(3, 3)).stream == expected
    in_first = [position for generation, position in captured if generation == 1]
    assert all(position and set(position.states) == {0, 1} for position in in_first)
    in_second = [position for generation, position in captured if generation == 2]
    assert in_second[0] == expected
    assert in_second[-1] == whole_position(stream, 4)


def test_loop_that_takes_two_batches_without_a_step_is_refused(running: Running) -> None:
    """It ended well, and nothing was protected."""
    with running.job as job:
        loop = batches(job)
        next(loop)
        next(loop)
        with pytest.raises(UsageError, match=r"two batches without a step.*job\.step\(\)"):
            next(loop)


def test_loop_that_leaves_out_batches_is_not_refused(running: Running) -> None:
    with running.job as job:
        for number, _ in enumerate(batches(job)):
            if number in (1, 3, 4):
                assert running.step().completed
        assert (number, job.steps) == (7, 3)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda model: None, r"build returned None: return keepstep\.State\(model, functools"),
        (lambda model: model, "build returned Linear"),
        (
            lambda model: keepstep.State(model, torch.optim.AdamW(model.parameters(), lr=0.5)),  # type: ignore[arg-type]
            r"made already, of type AdamW.*functools\.partial\(AdamW, lr=0\.5\)",
        ),
        (lambda model: keepstep.State(model, None), "optimizer=...\\) is of type NoneType"),  # type: ignore[arg-type]
        (lambda model: keepstep.State("m", torch.optim.SGD), "model=...\\) is of type str"),  # type: ignore[arg-type]
        (
            lambda model: keepstep.State(
                model,
                torch.optim.SGD,
                torch.optim.lr_scheduler.LambdaLR(  # type: ignore[arg-type]
                    torch.optim.SGD(model.parameters()), lambda _: 1.0
                ),
            ),
            r"made already, of type LambdaLR.*functools\.partial\(LambdaLR\)",
        ),
        (lambda model: keepstep.State(model, lambda _: None), "State.optimizer returned None"),  # type: ignore[arg-type, return-value]
        (lambda model: keepstep.State(model, lambda _: [3]), "State.optimizer returned 3"),  # type: ignore[arg-type, list-item, return-value]
    ],
)
def test_state_that_cannot_work_is_refused_at_once(
    running: Running, state: Callable[[nn.Module], Any], message: str
) -> None:
    running.job._state._build = lambda _: cast(keepstep.State, state(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match=message):
        running.job.__enter__()
