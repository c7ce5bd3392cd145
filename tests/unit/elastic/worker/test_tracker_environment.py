"""Claims about the variables by which trackers go on with a job's run."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from keepstep.elastic.worker.messages import Assignment
from keepstep.elastic.worker.tracker_environment import run_id, tracker_variables

RANK_0 = Assignment(
    generation=1, node="a", rank=0, world_size=2, local_rank=0, local_world_size=2, node_rank=0,
    node_count=1, store_host="127.0.0.1", store_port=1, server="", secret="5e", job="run7",
    max_restarts=3,
)  # fmt: skip
RANK_1 = replace(RANK_0, rank=1)


def test_run_is_that_of_the_job_for_each_rank_in_all_generations() -> None:
    first = tracker_variables(RANK_0, {})
    assert first == {
        "KEEPSTEP_RUN_ID": run_id(RANK_0),
        "WANDB_RUN_ID": run_id(RANK_0),
        "WANDB_RESUME": "allow",
    }
    assert tracker_variables(replace(RANK_0, generation=2, node="b"), {}) == first
    other = tracker_variables(RANK_1, {})
    assert other.keys() == first.keys()
    assert other["WANDB_RUN_ID"] == f"{run_id(RANK_0)}-rank1"
    # A process that takes over another rank takes over its run.
    assert tracker_variables(RANK_0, other) == first


def test_later_job_of_the_name_is_another_run() -> None:
    assert run_id(replace(RANK_0, secret="5f")) != run_id(RANK_0)


@pytest.mark.parametrize("name", ["WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID"])
def test_what_the_user_has_set_for_wandb_stays(name: str) -> None:
    assert tracker_variables(RANK_0, {name: "mine"}).keys() == {"KEEPSTEP_RUN_ID"}


def test_name_has_only_what_wandb_takes() -> None:
    name = run_id(replace(RANK_0, job="a/b #" + "x" * 100))
    assert re.fullmatch(r"a-b--x+-[0-9a-f]{8}", name)
    assert len(f"{name}-rank99999") <= 64
