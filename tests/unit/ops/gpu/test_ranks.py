"""Claims about starting the ranks of a check, without a GPU."""

from pathlib import Path

import pytest

from ops.gpu.check import NotRun
from ops.gpu.environment import on_one_gpu
from ops.gpu.ranks import figures_of, run_ranks
from tests.adaptive_timeouts import patient
from tests.unit.ops.gpu.tiny_checks import meet_and_add, run_out_of_memory, wait_for_nobody

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_ranks_meet_in_the_stores_of_their_check() -> None:
    results = run_ranks(
        meet_and_add, 2, limit_s=patient(60), generations=2, options={"option": "passed on"}
    )
    assert figures_of(results) == [{"sum": 3, "option": "passed on"}] * 2


def test_rank_that_does_not_end_is_killed_and_named() -> None:
    results = run_ranks(wait_for_nobody, 2, limit_s=patient(8), present=[0, 1])
    assert [result.timed_out for result in results] == [False, True]
    assert "in wait_for_nobody" in results[1].output, "it tells where it was"
    with pytest.raises(RuntimeError, match="rank 1 was not done in time"):
        figures_of(results)


def test_too_little_memory_is_no_failure() -> None:
    with pytest.raises(NotRun, match="too little memory"):
        figures_of(run_ranks(run_out_of_memory, 1, limit_s=patient(60)))


def test_ranks_on_one_gpu_are_nodes_of_their_own() -> None:
    assert on_one_gpu(0)["NCCL_HOSTID"] != on_one_gpu(1)["NCCL_HOSTID"]
