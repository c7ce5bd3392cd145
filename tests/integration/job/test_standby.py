"""Claims about nodes beyond the maximum, in complete jobs that lose a node to SIGKILL."""

import re
from pathlib import Path

from keepstep.elastic.rendezvous.view import View
from tests.integration.job.jobs import (
    STEPS,
    cluster,
    committed_step_of,
    last_run_of_each_step,
)

DOMAINS = {"a": "r1", "b": "r2", "c": "r1", "d": "r2"}


def test_standby_node_of_another_rack_takes_the_lost_place_in_the_very_next_generation(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, workers=1) as running:
        for node, domain in DOMAINS.items():
            running.start(node, "--domain", domain)
            running.wait_until(lambda view, node=node: node in view.nodes, 60)
        before = running.wait_until(
            lambda view: _all_warm(view) and committed_step_of(view) > 0, 60
        )
        assert before.generation is not None
        lost = before.generation.members[1]
        stays = before.generation.members[0].node
        # Whoever was warm first is a member; the others are in the order in which they joined.
        standby = [node for node in DOMAINS if before.generation.member(node) is None]
        takes_over = next(node for node in standby if DOMAINS[node] != DOMAINS[stays])
        running.kill(lost.node)
        view = running.wait_until(lambda view: len(view.history.recoveries) == 2, 60)
        codes = {node: running.wait(node, 60) for node in running.agents}
        assert set(codes.values()) == {0}, running.output()
        of_nodes = re.split("^--- ", running.output(), flags=re.MULTILINE)
        printed = next(text for text in of_nodes if text.startswith(f"{takes_over}.log"))
    waits = printed.index("generation 1 has no place for this node, which waits for one")
    rank = lost.ranks[0]
    assert waits < printed.index(f"generation 2: this node takes a place, as rank {rank}")
    assert view.generation is not None
    assert [member.node for member in view.generation.members] == [stays, takes_over]
    assert view.generation.members[1].ranks == lost.ranks
    recovery = view.history.recoveries[1]
    assert (recovery.generation, recovery.world_size) == (2, 2)
    assert "parity" in recovery.source
    assert recovery.resumed_step >= committed_step_of(before)
    assert last_run_of_each_step(tmp_path).keys() == set(range(1, STEPS + 1))


def _all_warm(view: View) -> bool:
    return len(view.nodes) == 4 and all(joined.record.warm for joined in view.nodes.values())
