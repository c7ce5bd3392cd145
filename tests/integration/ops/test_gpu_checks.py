"""Claims about the parts of checks for GPUs that use keepstep; they run on a CPU as well."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ops.gpu import keepstep_job, nccl_job
from ops.gpu.keepstep_tree import RECORDER_MODULES, recorder_library, require
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, figures_of, run_ranks
from ops.gpu.recorded_process import operations, recording
from tests.adaptive_timeouts import patient

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_job_that_loses_a_worker_ends_with_the_weights_of_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keepstep_job, "_LIMIT_S", patient(120.0))
    finding = keepstep_job.check(Machine())
    assert finding.figures["killed_at_step"] > 0
    if not torch.cuda.is_available():
        assert finding.broken == ["the state was on the GPU"]
    else:
        assert finding.broken == []


def test_job_whose_worker_is_killed_and_hangs_recovers_in_the_other_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit in ("_LIMIT_S", "_NAMING_LIMIT_S"):
        monkeypatch.setattr(nccl_job, limit, patient(120.0))
    recorder_library(limit_s=patient(120.0))
    finding = nccl_job.check(Machine())
    if not torch.cuda.is_available():
        assert finding.broken == ["the state was on the GPU", "the groups were of NCCL"]
    else:
        assert finding.broken == []


def record_two_sums(rank: Rank) -> Mapping[str, Any]:
    """Record the second of two sums of one rank over gloo."""
    with recording(rank.options["directory"], rank.rank) as reader:
        dist.init_process_group("gloo", store=rank.store(), rank=rank.rank, world_size=1)
        dist.all_reduce(torch.ones(1))
        since = reader.operations.position
        dist.all_reduce(torch.ones(1))
        return {"operations": operations(reader, since)}


def test_recorded_operations_are_read_from_a_position_on() -> None:
    require(*RECORDER_MODULES)
    recorder_library(limit_s=patient(120.0))
    with tempfile.TemporaryDirectory() as directory:
        (found,) = figures_of(
            run_ranks(
                record_two_sums,
                1,
                limit_s=patient(60.0),
                environment=lambda rank: {},
                options={"directory": directory},
            )
        )
    (operation,) = found["operations"]
    assert operation["name"] == "ALL_REDUCE"
    assert operation["ended"]
    assert not operation["has_device_times"]
