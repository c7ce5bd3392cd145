"""Tests whom a verdict names once the job's own names of its nodes are known."""

from dataclasses import replace

import pytest

from keepstep.monitor.diagnosis.subjects import with_job_nodes
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict
from keepstep.monitor.watch.verdict_log import VerdictChanges
from keepstep.monitor.watch.watch import DiagnosisRound

PLACES = {0: "a", 1: "a", 2: "b", 3: "b"}
VERDICT = Verdict(
    subject=Subject("rank", (2,), "host"),
    syndrome=Syndrome.DEAD_PROCESS,
    since_s=0.0,
    evidence=(),
    confidence=1.0,
    cost_s_per_step=0.0,
    advice=Advice.RESTART_WORKER,
)


@pytest.mark.parametrize(
    ("reported", "named"),
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
        pytest.param(
            Subject("node", (), "standby-7"),
            Subject("node", (), "standby-7"),
            id="a node without ranks keeps its name",
        ),
        pytest.param(Subject("job", ()), Subject("job", ()), id="the job is nowhere"),
    ],
)
def test_ranks_determine_which_node_is_named(reported: Subject, named: Subject) -> None:
    assert with_job_nodes([replace(VERDICT, subject=reported)], PLACES) == (
        replace(VERDICT, subject=named),
    )


def test_verdicts_on_all_ranks_of_a_member_merge_even_if_its_host_has_more_ranks() -> None:
    def hang(rank: int) -> Verdict:
        return replace(
            VERDICT, subject=Subject("rank", (rank,), "host"), evidence=(f"rank {rank} is gone",)
        )

    (merged,) = with_job_nodes([hang(2), hang(3)], PLACES)
    assert (merged.subject, merged.advice) == (Subject("node", (2, 3), "b"), Advice.REPLACE_NODE)
    assert merged.evidence == ("rank 2 is gone", "rank 3 is gone")
    # Not merged: one of two ranks, one rank of each of two members, or different syndromes.
    slow = replace(hang(3), syndrome=Syndrome.NON_COMMUNICATION_HANG)
    for verdicts in ([hang(2)], [hang(0), hang(2)], [hang(2), slow]):
        assert {verdict.subject.kind for verdict in with_job_nodes(verdicts, PLACES)} == {"rank"}
        assert len(with_job_nodes(verdicts, PLACES)) == len(verdicts)


def test_rank_that_has_not_joined_the_generation_is_not_named() -> None:
    early = replace(VERDICT, subject=Subject("rank", (0,)))
    turn = DiagnosisRound(
        (VERDICT, early), 1.0, VerdictChanges(), generation=2, nodes={0: "host", 1: "host"}
    )
    assert turn.current == (early,)
