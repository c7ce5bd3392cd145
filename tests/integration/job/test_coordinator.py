"""A job whose coordinator has three members, one of which dies under it."""

from pathlib import Path

import pytest

from tests.integration.job.jobs import STEPS, cluster, last_run_of_each_step, step_of
from tests.integration.store.cluster import EtcdCluster


@pytest.mark.parametrize("lost", [0, 1])
def test_job_does_not_notice_that_a_member_of_its_coordinator_dies(tmp_path: Path, lost: int) -> None:
    with EtcdCluster() as members, cluster(tmp_path, store=members.url) as running:
        running.start("a")
        running.start("b")
        running.wait_until(lambda view: step_of(view) >= 5, 120)
        # Agents talk to the first; where the cluster's own leader is, chance decides.
        members.kill(lost)
        running.wait_until(lambda view: step_of(view) >= 15, 120)
        members.start(lost)
        assert [running.wait(node, 120) for node in ("a", "b")] == [0, 0], running.output()
    lines = last_run_of_each_step(tmp_path)
    assert lines.keys() == set(range(1, STEPS + 1))
    assert {line["generation"] for ranks in lines.values() for line in ranks.values()} == {1}
