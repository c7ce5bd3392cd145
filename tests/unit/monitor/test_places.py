"""Claims about whom a verdict names once the job's own names for its nodes are known."""

from dataclasses import replace

import pytest

from monitor.daemon.verdict_log import Changes
from monitor.daemon.watch import Turn
from monitor.diagnosis.places import placed
from monitor.verdicts import Advice, Subject, Syndrome, Verdict

PLACES = {0: "a", 1: "a", 2: "b", 3: "b"}
VERDICT = Verdict(Subject("rank", (2,), "host"), Syndrome.DEAD_PROCESS, 0.0, (), 1.0, 0.0, Advice.RESTART_WORKER)


@pytest.mark.parametrize(
    ("told", "named"),
    [
        pytest.param(Subject("rank", (2,), "host"), Subject("rank", (2,), "b"), id="a rank is on its member"),
        pytest.param(Subject("rank", (9,), "host"), Subject("rank", (9,)), id="a rank of no member is nowhere"),
        pytest.param(Subject("link", (0, 2), "host"), Subject("link", (0, 2)), id="a link between members"),
        pytest.param(Subject("node", (2, 3), "host"), Subject("node", (2, 3), "b"), id="a whole member is a node"),
        pytest.param(Subject("node", (0, 1, 2, 3), "host"), Subject("group", (0, 1, 2, 3)), id="two members are none"),
        pytest.param(Subject("node", (2,), "host"), Subject("group", (2,), "b"), id="a part of a member is no node"),
        pytest.param(Subject("job", ()), Subject("job", ()), id="the job is nowhere"),
    ],
)
def test_ranks_decide_which_node_is_named(told: Subject, named: Subject) -> None:
    assert placed([replace(VERDICT, subject=told)], PLACES) == (replace(VERDICT, subject=named),)


def test_while_a_generation_begins_who_has_not_told_of_it_is_not_named() -> None:
    early = replace(VERDICT, subject=Subject("rank", (0,)))
    turn = Turn((VERDICT, early), 1.0, Changes(), generation=2, nodes={0: "host", 1: "host"})
    assert turn.current == (early,)
