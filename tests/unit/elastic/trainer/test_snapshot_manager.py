"""Claims about when the ranks take snapshots, with a copier that takes no time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from keepstep.checkpoint.errors import StateChanged
from keepstep.elastic.data.position import Position
from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer import snapshot_manager
from keepstep.elastic.trainer.snapshot_interval import SnapshotInterval
from keepstep.elastic.trainer.snapshot_manager import SnapshotManager
from keepstep.elastic.trainer.state import State
from keepstep.elastic.trainer.training_state import TrainingState
from tests.unit.elastic.worker.places import assignment


class Copier:
    """Seals what it is given, unless the state is said to have changed meanwhile."""

    def __init__(self, *_: object) -> None:
        self.begun: list[tuple[int, bool]] = []
        self.is_torn = False

    def start(
        self,
        step: int,
        *_: object,
        discard_uncommitted: bool,
        agree: Callable[[bool], bool] | None,
    ) -> None:
        self.begun.append((step, discard_uncommitted))
        self.agrees = agree is not None and agree(True) and not agree(False)

    def wait(self) -> None:
        if self.is_torn:
            self.is_torn = False
            raise StateChanged("model/weight has changed")

    def close(self) -> None:
        return


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[SnapshotManager]:
    """A worker takes snapshots after each second step, and none is ever committed."""
    monkeypatch.setattr(snapshot_manager, "Snapshotter", Copier)
    monkeypatch.setattr(snapshot_manager, "SnapshotClient", lambda *_: Mock())
    device = torch.device("cpu")
    state = State(nn.Linear(2, 2), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    opened = SnapshotManager(
        training=TrainingState(state, device, 0),
        device=device,
        assignment=assignment(1),
        session=Mock(is_committed=lambda step: step == -1, is_closing=lambda generation: False),
        interval=SnapshotInterval(2, 0.0),
    )
    yield opened
    opened.close()


def compute_step(manager: SnapshotManager, step: int, *, writes: bool = True) -> None:
    position = Position(step, step)
    manager.begin_step()
    manager._training.model(torch.ones(1, 2)).sum().backward()
    for optimizer in manager._training.optimizers if writes else ():
        optimizer.step()
    if manager.complete_step(position):
        manager.take_agreed(position)


def test_optimizer_steps_inside_steps_only(manager: SnapshotManager) -> None:
    (optimizer,) = manager._training.optimizers
    for step in (1, 2):
        with pytest.raises(UsageError, match=r"put it inside `with job\.step\(\)`"):
            optimizer.step()
        compute_step(manager, step)


@pytest.mark.parametrize("writes", [True, False], ids=["it writes", "its gradients overflowed"])
def test_torn_copy_is_agreed_on_in_the_next_step_also_if_that_has_no_snapshot(
    manager: SnapshotManager, writes: bool
) -> None:
    """A rank that did not know of another's torn copy waited at the end for its commit, for ever.

    All ranks decide by the same reduction: here it is one rank that must have learnt by it.
    """
    copier: Any = manager._snapshotter
    for step in (1, 2):
        compute_step(manager, step)
    assert copier.begun == [(2, False)]
    copier.is_torn = True
    compute_step(manager, 3, writes=writes)
    wait_for_commit = Mock(return_value=False)
    manager.seal_before_closing(Position(3, 3), wait_for_commit)
    assert copier.begun == [(2, False), (3, True)]
    wait_for_commit.assert_not_called()


def test_final_snapshot_that_is_torn_is_taken_again_by_agreement(
    manager: SnapshotManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is that of the first copy, which other ranks have sealed: none may seal too soon."""
    copier: Any = manager._snapshotter
    for step in (1, 2):
        compute_step(manager, step)
    copier.is_torn = True
    # What tore the first copy may have been a tensor that was given other memory.
    looks_for_moved = Mock()
    monkeypatch.setattr(manager._training, "invalidate_if_moved", looks_for_moved)
    wait_for_commit = Mock(return_value=True)
    assert manager.commit_final_snapshot(Position(2, 2), wait_for_commit)
    assert copier.begun == [(2, False), (2, True)]
    assert copier.agrees
    wait_for_commit.assert_called_once_with(2)
    looks_for_moved.assert_called_once()


def test_state_that_changes_after_the_end_is_an_error_and_no_endless_wait(
    manager: SnapshotManager,
) -> None:
    copier: Any = manager._snapshotter
    for step in (1, 2):
        compute_step(manager, step)
    copier.wait = Mock(side_effect=StateChanged("model/weight has changed"))
    with pytest.raises(StateChanged):
        manager.commit_final_snapshot(Position(2, 2), Mock(side_effect=AssertionError))
    copier.wait = Mock()
