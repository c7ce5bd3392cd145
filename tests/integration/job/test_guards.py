"""Claims about collectives outside of steps: evaluations, and stops that one rank decides on."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.patient_cluster import PatientCluster

SCRIPT = Path(__file__).with_name("guarded.py")


def test_guards_recover_run_again_and_all_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    """A worker dies in an evaluation, after the decision to stop, in the second pass, and at last.

    In the second pass the guard between the passes is over, so that a process that is new leaves it
    out, and the other one stays.
    """
    with PatientCluster(
        "job", [str(SCRIPT), str(tmp_path)], nnodes="1", workers=2, log=tmp_path / "agents"
    ) as running:
        running.start("a")
        assert running.wait("a", 180) == 0, running.output()
        output = running.output()
    assert {path.name for path in tmp_path.iterdir()} >= {
        "in-guard", "after-the-decision", "in-the-second-pass", "in-first-guard-after-the-loop",
        "in-last-guard",
    }  # fmt: skip
    of_processes = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in tmp_path.glob("pid-*.jsonl")
    ]
    of_rank_0 = [lines for lines in of_processes if any(line[0] == 0 for line in lines)]
    # The other worker went on in its process, but for the last time: what is new begins with the
    # first guard after the loop, which this one had completed.
    before, after = sorted(of_rank_0, key=len, reverse=True)
    assert max(line[1] for line in before) == 5, output
    assert {line[2] for line in after} == {"pass", "at last", "at the very last"}
    between = [line for lines in of_processes for line in lines if line[2] == "between"]
    assert [line[:2] for line in sorted(between)] == [[0, 3], [1, 3]]
    interrupted = [line[2:] for line in before if line[2] == "interrupted"]
    assert interrupted[0][1] == 8
    found: dict[Any, set[Any]] = defaultdict(set)
    for rank, _, kind, *values in (line for lines in of_processes for line in lines):
        if kind in ("evaluated", "at last", "at the very last"):
            # Again and on any rank with the same result.
            found[kind, values[0]].add(values[1])
        elif kind == "pass":
            found[kind, rank].add((values[0], values[1]))
    assert all(len(values) == 1 for key, values in found.items() if key[0] != "pass"), found
    assert {key[1] for key in found if key[0] == "evaluated"} == {4, 8, 12, 16, 20, 24, 28, 32}
    assert {key[1] for key in found if key[0] == "at last"} == {33}
    assert found["at the very last", 33] == found["at last", 33]
    # Later processes know that the first pass is over, and read nothing of it.
    assert found["pass", 0] == {(1, 13), (1, 33), (2, 33)}
    assert found["pass", 1] == {(1, 13), (1, 18), (1, 33), (2, 33)}
