"""Claims about `keepstep scale`, `pause` and `resume`, on a complete job."""

import signal
from pathlib import Path

import pytest

from keepstep.elastic.cli.follow import JobAddress
from keepstep.elastic.cli.operation import pause_job, resume_job, scale_job
from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.view import View
from keepstep.elastic.store.address import parse_address
from tests.integration.job.jobs import cluster, committed_step_of, last_run_of_each_step, step_of


@pytest.mark.long
def test_job_is_scaled_paused_and_resumed_and_goes_on_elsewhere_from_storage(
    tmp_path: Path,
) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    with cluster(tmp_path, workers=1, endless=True, checkpoint=checkpoint) as running:
        job = JobAddress(parse_address(running.url), "job")
        running.start("a")
        running.start("b")
        running.wait_until(lambda view: committed_step_of(view) >= 3, 60)

        answer = scale_job(job, 1, 1)
        assert answer == "job job has 1 to 1 nodes from now on; 1 of 2 are on standby"
        view = running.wait_until(lambda view: len(view.history.recoveries) == 2, 60)
        assert _nodes(view) == 1
        scale_job(job, 1, 2)
        view = running.wait_until(lambda view: len(view.history.recoveries) == 3, 60)
        assert _nodes(view) == 2
        assert "memory" in view.history.recoveries[2].source

        answer = pause_job(job, "maintenance")
        view = running.wait_until(lambda view: True, 60)
        assert view.checkpoint is not None
        paused_at = view.checkpoint.step
        assert paused_at == step_of(view)
        in_both = f"step {paused_at} is in the memory of its nodes and in {checkpoint}, so they may"
        assert in_both in answer
        assert "goes on after step" in resume_job(job)
        view = running.wait_until(lambda view: len(view.history.recoveries) == 4, 60)
        assert view.history.recoveries[3].resumed_step == paused_at
        # One node alone may begin, if the other has not started its workers again yet.
        assert view.history.recoveries[3].source in ("memory", "memory, peers' memory")
        with pytest.raises(UsageError, match="is not paused"):
            resume_job(job)

        pause_job(job, "the machines are needed")
        for node in "ab":
            running.terminate(node)
        left = 128 + signal.SIGTERM
        assert [running.wait(node, 60) for node in "ab"] == [left, left], running.output()
    done = max(last_run_of_each_step(tmp_path))
    # Another coordinator and other nodes: all that is left is what is stored.
    with cluster(
        tmp_path, "1:1", workers=1, disturbed=0, steps=done + 2, checkpoint=checkpoint
    ) as running:
        running.start("c")
        assert running.wait("c", 120) == 0, running.output()
    assert f"goes on after step {done}, from storage" in running.output()
    assert last_run_of_each_step(tmp_path).keys() == set(range(1, done + 3))


def _nodes(view: View) -> int:
    return len(view.generation.members) if view.generation else 0
