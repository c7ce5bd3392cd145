"""Claims about whom a verdict names once the job's own names for its nodes are known."""

from dataclasses import replace

import pytest

from keepstep.monitor.diagnosis.subjects import with_job_nodes
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict
from keepstep.monitor.watch.verdict_log import VerdictChanges
from keepstep.monitor.watch.watch import DiagnosisRound

PLACES = {0: "a", 1: "a", 2: "b", 3: "b"}
VERDICT = Verdict(
    Subject("rank", (2,), "host"), Syndrome.DEAD_PROCESS, 0.0, (), 1.0, 0.0, Advice.RESTART_WORKER
)


@pytest.mark.parametrize(
    ("told", "named"),
    [
        pytest.param(
            Subject("rank", (2,), "host"), Subject("rank", (2,), "b"), id="a rank is on its member"
        ),
        pytest.param(
            Subject("rank", (9,), "host"),
            Subject("rank", (9,)),
            id="a rank of no member is nowhere",
        ),
        pytest.param(
            Subject("link", (0, 2), "host"), Subject("link", (0, 2)), id="a link between members"
        ),
        pytest.param(
            Subject("node", (2, 3), "host"),
            Subject("node", (2, 3), "b"),
            id="a whole member is a node",
        ),
        pytest.param(
            Subject("node", (0, 1, 2, 3), "host"),
            Subject("group", (0, 1, 2, 3)),
            id="two members are none",
        ),
        pytest.param(
            Subject("node", (2,), "host"),
            Subject("group", (2,), "b"),
            id="a part of a member is no node",
        ),
        pytest.param(Subject("job", ()), Subject("job", ()), id="the job is nowhere"),
    ],
)
def test_ranks_decide_which_node_is_named(told: Subject, named: Subject) -> None:
    assert with_job_nodes([replace(VERDICT, subject=told)], PLACES) == (
        replace(VERDICT, subject=named),
    )


def test_what_holds_of_all_ranks_of_a_member_is_the_members_though_its_host_has_more() -> None:
    def hang(rank: int) -> Verdict:
        return replace(
            VERDICT, subject=Subject("rank", (rank,), "host"), evidence=(f"rank {rank} is gone",)
        )

    (whole,) = with_job_nodes([hang(2), hang(3)], PLACES)
    assert (whole.subject, whole.advice) == (Subject("node", (2, 3), "b"), Advice.REPLACE_NODE)
    assert whole.evidence == ("rank 2 is gone", "rank 3 is gone")
    # One of two, or one of each of two members, or two with different syndromes, are no node.
    slow = replace(hang(3), syndrome=Syndrome.NON_COMMUNICATION_HANG)
    for parts in ([hang(2)], [hang(0), hang(2)], [hang(2), slow]):
        assert {one.subject.kind for one in with_job_nodes(parts, PLACES)} == {"rank"}
        assert len(with_job_nodes(parts, PLACES)) == len(parts)


def test_while_a_generation_begins_who_has_not_told_of_it_is_not_named() -> None:
    early = replace(VERDICT, subject=Subject("rank", (0,)))
    turn = DiagnosisRound(
        (VERDICT, early), 1.0, VerdictChanges(), generation=2, nodes={0: "host", 1: "host"}
    )
    assert turn.current == (early,)
