"""Claims about `attach`: what it refuses, and what a loop without a launcher sees."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import keepstep
from keepstep.checkpoint.errors import CheckpointError
from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer import attach as attach_module
from keepstep.elastic.trainer import attached as attached_module
from tests.adaptive_timeouts import patient


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(training: keepstep.Attached, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    training.step_done()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"checkpoint_every": 5}, "checkpoint_every needs checkpoint=URL"),
        ({"scheduler": "cosine"}, r"attach\(scheduler=...\) is of type str"),
        ({"extra": [1]}, "extra is of type list: give a dictionary of objects by name"),
        ({"extra": {"x": object()}}, "extra 'x' is of type object, which has no state_dict"),
        ({"mesh": {"other": -1}}, "whether ranks of dimension 'other' compute the same samples"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused(
    arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        keepstep.attach(*model_and_optimizer(), **arguments)


def test_objects_that_nobody_could_restore_are_refused() -> None:
    model, optimizer = model_and_optimizer()
    with pytest.raises(UsageError, match=r"attach\(optimizer=...\) is of type Linear"):
        keepstep.attach(model, model)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"give a torch\.nn\.Module"):
        keepstep.attach(optimizer, optimizer)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"attach\(optimizer=...\) has one of them twice"):
        keepstep.attach(model, [optimizer, optimizer])
    other = torch.optim.lr_scheduler.StepLR(model_and_optimizer()[1], 1)
    with pytest.raises(UsageError, match="scheduler 0 drives an optimizer that is not among"):
        keepstep.attach(model, optimizer, other)
    with pytest.raises(UsageError, match="2 tensors of the model are on the meta device"):
        keepstep.attach(nn.Linear(2, 2, device="meta"), optimizer)
    with pytest.raises(CheckpointError, match="parameter"):
        keepstep.attach(nn.Linear(2, 2), optimizer)


def test_several_ranks_without_process_groups_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(UsageError, match=r"call torch\.distributed\.init_process_group before"):
        keepstep.attach(*model_and_optimizer())


def test_process_attaches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_module, "current", lambda: Mock(has_joined=True))
    with pytest.raises(UsageError, match="has attached a model or joined a job before"):
        keepstep.attach(*model_and_optimizer())


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer as Accelerate does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state = optimizer.state
        self._optimizer_step_pre_hooks: dict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: dict[int, Any] = OrderedDict()


@pytest.mark.parametrize("wraps_attached", [False, True])
def test_scheduler_may_drive_a_wrapper_of_an_attached_optimizer(wraps_attached: bool) -> None:
    model, optimizer = model_and_optimizer()
    wrapper = Wrapper(optimizer)
    inner, outer = (wrapper, optimizer) if wraps_attached else (optimizer, wrapper)
    scheduler = torch.optim.lr_scheduler.StepLR(outer, 1)
    training = keepstep.attach(model, inner, scheduler)
    training.restore()
    training.finish()


def test_steps_are_counted_only_between_restore_and_finish() -> None:
    model, optimizer = model_and_optimizer()
    training = keepstep.attach(model, optimizer)
    with pytest.raises(UsageError, match="call restore"):
        step(training, model, optimizer)
    assert training.restore() == 0
    with pytest.raises(UsageError, match=r"restore\(\) was called before"):
        training.restore()
    step(training, model, optimizer)
    assert training.steps == 1
    training.finish()
    training.finish()
    with pytest.raises(UsageError, match=r"finish\(\) was called"):
        training.step_done()


def test_rank_that_waits_long_at_its_end_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = model_and_optimizer()
    training = keepstep.attach(model, optimizer)
    training.restore()
    step(training, model, optimizer)

    def commit(*_: object) -> bool:
        until_s = time.monotonic() + patient(10)
        while "rank 0 has come to its end after step 1, and waits" not in caplog.text:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        return True

    monkeypatch.setattr(attached_module, "_LONG_WAIT_S", 0.01)
    monkeypatch.setattr(attached_module.SnapshotManager, "commit_final_snapshot", commit)
    training.finish()


def test_job_that_has_nothing_to_restore_begins_with_what_a_function_loads() -> None:
    model, optimizer = model_and_optimizer()
    training = keepstep.attach(model, optimizer)
    assert training.restore(step=lambda: 3) == 3
    step(training, model, optimizer)
    assert training.steps == 4
    training.finish()


@pytest.mark.parametrize("count", [-1, 2.5, "5", None])
def test_counts_that_count_nothing_are_refused(count: Any) -> None:
    training = keepstep.attach(*model_and_optimizer())
    with pytest.raises(UsageError, match=r"restore\(step=.*\): give a whole number, at least 0"):
        training.restore(step=count)
    with pytest.raises(UsageError, match=r"restore\(step=.*\): give a whole number, at least 0"):
        training.restore(step=lambda: count)
    training.restore(step=7)
    with pytest.raises(UsageError, match=r"step_done\(batches=.*\): give a whole number"):
        training.step_done(batches=count)
    assert training.steps == 7
    training.finish()


def test_steps_count_that_consume_no_batch() -> None:
    model, optimizer = model_and_optimizer()
    training = keepstep.attach(model, optimizer)
    training.restore()
    for _ in training.batches(torch.arange(8.0), 2):
        training.step_done(batches=0)
    assert training.steps == 4
    training.finish()


def test_new_job_keeps_the_random_numbers_of_its_script() -> None:
    model, optimizer = model_and_optimizer()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    training = keepstep.attach(model, optimizer)
    training.restore()
    model(torch.ones(1, 2))
    assert torch.equal(torch.rand(3), expected)
    training.finish()


def test_batches_and_samplers_follow_each_other_and_skipped_batches_count() -> None:
    model, optimizer = model_and_optimizer()
    training = keepstep.attach(model, optimizer)
    training.restore()
    seen = []
    for inputs in training.batches(torch.arange(8.0), 2, shuffle=False):
        seen.append(inputs.tolist())
        if len(seen) != 2:
            training.step_done()
    assert seen == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert training.steps == 3
    sampler = training.batch_sampler(4, 2, epochs=2, shuffle=False)
    with pytest.raises(UsageError, match="4 global batches of the pass before are left"):
        training.batch_sampler(4, 2)
    for _ in range(2):
        for _ in sampler:
            training.step_done()
    assert list(sampler) == []
    assert sampler.epoch == 2
    with pytest.raises(UsageError, match="epochs=0: give at least 1"):
        training.batch_sampler(4, 2, epochs=0)
    training.finish()


def test_sampler_of_other_samples_is_refused_within_the_pass_that_is_resumed() -> None:
    """Its position would mean other samples, and nothing would show it."""
    model, optimizer = model_and_optimizer()
    stored = keepstep.attach(model, optimizer)
    stored.restore()
    stored.batch_sampler(8, 2, epochs=2)
    stored.step_done()
    position = stored._located()
    for samples, global_batch, reason in ((6, 2, "over 8 samples"), (8, 4, "global_batch=2")):
        resumed = keepstep.attach(model, optimizer)
        resumed.restore()
        resumed._position = position
        with pytest.raises(UsageError, match=reason):
            resumed.batch_sampler(samples, global_batch, epochs=2)
    stored.finish()
