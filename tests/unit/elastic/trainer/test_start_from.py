"""Claims about `start_from`: a new job goes on from what a checkpoint has, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from keepstep import checkpoint
from keepstep.elastic.data.position import Position
from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer.start_from import StartFrom, scheduler_state
from keepstep.elastic.trainer.state import State
from keepstep.elastic.trainer.training_state import TrainingState


def training(*, is_meta: bool = False) -> TrainingState:
    with torch.device("meta" if is_meta else "cpu"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    state = State(
        model,
        lambda _: torch.optim.AdamW(model.named_parameters(), lr=0.1),
        scheduler=lambda optimizer: LinearLR(optimizer, total_iters=10),
    )
    return TrainingState(state, torch.device("cpu"), 0)


def train(state: TrainingState, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = (state.model(torch.ones(2, 3)) ** 2).sum()
        state.optimizers[0].zero_grad()
        loss.backward()
        state.optimizers[0].step()
        state.schedulers[0].step()
        losses.append(loss.item())
    return losses


def saved(root: Path, name: str = "lr_scheduler") -> TrainingState:
    """Train, and save as scripts do."""
    torch.manual_seed(0)
    state = training()
    train(state, 3)
    content: dict[str, Any] = {
        "model": state.model.state_dict(),
        "optimizer": state.optimizers[0].state_dict(),
        name: state.schedulers[0].state_dict(),
        "step": 3,
    }
    torch.save(content, root / "a.pt")
    return state


@pytest.mark.parametrize(("name", "is_meta"), [("lr_scheduler", False), ("scheduler", True)])
def test_training_goes_on_as_if_it_had_always_been_this_job(
    tmp_path: Path, name: str, is_meta: bool
) -> None:
    before = saved(tmp_path, name)
    state = training(is_meta=is_meta)
    position, source = state.start_from(StartFrom(f"torch:{tmp_path}/a.pt"), seed=1)
    assert (position, source) == (Position(3, 0), "start_from (torch.save, step 3)")
    assert train(state, 3) == train(before, 3)


def test_of_the_model_alone_nothing_else_is_taken(tmp_path: Path) -> None:
    before = saved(tmp_path)
    state = training()
    position, _ = state.start_from(StartFrom(f"{tmp_path}/a.pt", only="model"), seed=1)
    assert position == Position(0, 0)
    assert state.optimizers[0].state == {}
    assert state.schedulers[0].last_epoch == 0
    for name, value in state.model.state_dict().items():
        assert torch.equal(value, before.model.state_dict()[name])


def test_no_other_part_can_be_taken_alone() -> None:
    with pytest.raises(UsageError, match=r"give .model., or leave it out"):
        StartFrom("a.pt", only=cast(Any, "weights"))


def test_a_url_alone_stands_for_all_of_a_checkpoint_and_an_empty_one_for_none() -> None:
    assert StartFrom.of("a.pt") == StartFrom("a.pt")
    assert StartFrom.of(StartFrom("a.pt", only="model")) == StartFrom("a.pt", only="model")
    assert StartFrom.of(None) is StartFrom.of("") is None


def test_names_may_become_those_of_the_module_by_rules(tmp_path: Path) -> None:
    before = training()
    state = {f"body.{name}": value for name, value in before.model.state_dict().items()}
    torch.save(state, tmp_path / "a.pt")
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nmatch = "body.{rest...}"\nrename = "{rest}"\n')
    after = training()
    after.start_from(StartFrom(str(tmp_path / "a.pt"), rules=str(rules)), seed=1)
    for name, value in after.model.state_dict().items():
        assert torch.equal(value, before.model.state_dict()[name])


def test_weights_alone_begin_a_new_training_in_the_type_that_the_job_wants(tmp_path: Path) -> None:
    before = training()
    torch.save({n: v.half() for n, v in before.model.state_dict().items()}, tmp_path / "a.pt")
    state = training()
    position, _ = state.start_from(StartFrom(str(tmp_path / "a.pt")), seed=1)
    assert position == Position(0, 0)
    assert state.optimizers[0].state == {}
    weight = next(state.model.parameters())
    assert torch.equal(weight, next(before.model.parameters()).half().float())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    torch.save({"other.weight": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(checkpoint.LayoutMismatch, match=r"0\.weight, .*: missing in the source"):
        training().start_from(StartFrom(str(tmp_path / "a.pt")), seed=1)


OWN = {"last_epoch": 0, "base_lrs": [0.1], "_last_lr": [0.1]}


@pytest.mark.parametrize(
    ("documents", "number", "count", "expected"),
    [
        ({"values": {"scheduler/last_epoch": 4}}, 0, 1, OWN | {"last_epoch": 4}),
        ({"values": {"lr_schedulers": [{"last_epoch": 4, "x": 1}]}}, 0, 1, OWN | {"last_epoch": 4}),
        (
            {"trainer": {"schedulers": [{}, {"last_epoch": 7, "x": 1}]}},
            1,
            2,
            OWN | {"last_epoch": 7},
        ),
        # Which of two it would be of is not said; and how far it was is what matters.
        ({"values": {"scheduler/last_epoch": 4}}, 0, 2, None),
        ({"values": {"scheduler/base_lrs": [3.0]}}, 0, 1, None),
        ({}, 0, 1, None),
    ],
)
def test_a_schedulers_state_is_found_under_the_names_that_tools_give_it(
    documents: dict[str, Any], number: int, count: int, expected: dict[str, Any] | None
) -> None:
    assert scheduler_state(documents, number, count, OWN) == expected


def test_schedule_that_starts_over_has_the_rates_of_the_job(tmp_path: Path) -> None:
    before = saved(tmp_path, "of_no_scheduler")
    assert (
        before.optimizers[0].param_groups[0]["lr"] != training().optimizers[0].param_groups[0]["lr"]
    )
    state = training()
    state.start_from(StartFrom(f"torch:{tmp_path}/a.pt"), seed=1)
    new = training()
    for name in ("lr", "initial_lr"):
        assert state.optimizers[0].param_groups[0][name] == new.optimizers[0].param_groups[0][name]
    assert state.schedulers[0].last_epoch == 0
