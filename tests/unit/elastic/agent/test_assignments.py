"""Claims about the places that a node's workers are given."""

from __future__ import annotations

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.agent.assignments import JobContext, assignments_of
from keepstep.elastic.rendezvous.records import Generation, Member, SnapshotCommit

CONTEXT = JobContext(job="job", secret=b"\x01\xff", server="unix:/s", max_restarts=3)


def test_workers_of_the_second_node_follow_those_of_the_first() -> None:
    members = (
        Member("a", "host-a", 3, 0, "host-a:1", "tcp:host-a:2"),
        Member("b", "host-b", 2, 3, "host-b:1", "tcp:host-b:2"),
    )
    resume = SnapshotCommit(SnapshotId(1, 40), members)
    generation = Generation(2, members, "host-a", 29500, "lost c", resume=resume)
    assignments = assignments_of(generation, members[1], CONTEXT)
    assert [place.rank for place in assignments] == [3, 4]
    assert [place.local_rank for place in assignments] == [0, 1]
    first = assignments[0]
    assert (first.node, first.node_rank, first.node_count) == ("b", 1, 2)
    assert (first.world_size, first.local_world_size) == (5, 2)
    assert (first.secret, first.server) == ("01ff", "unix:/s")
    assert first.resume == resume
    assert first.environment()["MASTER_ADDR"] == "host-a"
    assert first.environment()["MASTER_PORT"] == "29500"
    assert first.environment()["TORCHELASTIC_RESTART_COUNT"] == "1"


def test_secret_is_not_printed() -> None:
    assert "ff" not in repr(CONTEXT)
