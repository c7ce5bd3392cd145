"""Claims about a job whose coordinator of three members loses one of them, or all."""

from pathlib import Path

import psutil
import pytest

from tests.integration.job.jobs import (
    STEPS,
    cluster,
    last_run_of_each_step,
    step_of,
    wait_for_output,
)
from tests.integration.store.cluster import EtcdCluster


@pytest.mark.parametrize("lost", [0, 1])
def test_job_continues_without_a_recovery_when_a_coordinator_member_dies(
    tmp_path: Path, lost: int
) -> None:
    with (
        EtcdCluster() as members,
        cluster(tmp_path, store=members.url, workers=1, disturbed=0) as running,
    ):
        # A cluster elects a leader within two seconds, but takes longer on a busy machine.
        for node in ("a", "b"):
            running.start(node, "--lease-ttl", "30")
        running.wait_until(lambda view: step_of(view) >= 5, 120)
        # Agents are connected to the first member; any member may be the cluster's leader.
        members.kill(lost)
        running.wait_until(lambda view: step_of(view) >= 15, 120)
        members.start(lost)
        assert [running.wait(node, 120) for node in ("a", "b")] == [0, 0], running.output()
    lines = last_run_of_each_step(tmp_path)
    assert lines.keys() == set(range(1, STEPS + 1))
    assert {line["generation"] for ranks in lines.values() for line in ranks.values()} == {1}


def test_job_trains_on_while_all_coordinator_members_are_dead_and_commits_afterwards(
    tmp_path: Path,
) -> None:
    with (
        EtcdCluster() as members,
        cluster(tmp_path, workers=1, endless=True, store=members.url) as running,
    ):
        for node in ("a", "b"):
            running.start(node, "--lease-ttl", "2")
        before = running.wait_until(lambda view: step_of(view) >= 5, 120)
        for member in range(3):
            members.kill(member)
        wait_for_output(running, "training goes on")
        for member in range(3):
            members.start(member)
        assert before.snapshot is not None
        committed = before.snapshot.snapshot.step
        after = running.wait_until(
            lambda view: view.snapshot is not None and view.snapshot.snapshot.step > committed + 5,
            120,
        )
        assert after.generation_number == before.generation_number, running.output()


def test_node_that_lost_its_lease_joins_again_with_what_it_holds_in_memory(tmp_path: Path) -> None:
    with cluster(tmp_path, "1:1", workers=1, endless=True) as running:
        running.start("a", "--lease-ttl", "2")
        before = running.wait_until(lambda view: step_of(view) >= 5, 120)
        agent = psutil.Process(running.agents["a"].pid)
        agent.suspend()
        running.wait_until(lambda view: "a" not in view.nodes, 60)
        agent.resume()
        view = running.wait_until(lambda view: len(view.history.recoveries) == 2, 120)
        recovery = view.history.recoveries[1]
        assert before.snapshot is not None
        assert recovery.source == "memory"
        assert recovery.resumed_step >= before.snapshot.snapshot.step
    assert "Task was destroyed" not in running.output(), running.output()
