"""Claims about steps that a rank rejects: they are undone, and their batches are skipped."""

import json
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.patient_cluster import PatientCluster

SCRIPT = Path(__file__).with_name("rejected.py")
BATCHES = 24
SKIPPED = [3, 10, 11, 12]


def cluster(directory: Path, nodes: int = 1, **options: Any) -> PatientCluster:
    """Return a cluster of two workers, on one node or on two."""
    content = {"log": str(directory), "batches": BATCHES, **options}
    return PatientCluster(
        "job",
        [str(SCRIPT), json.dumps(content)],
        nnodes=f"1:{nodes}",
        workers=2 // nodes,
        log=directory / "agents",
        last_call_s=60.0,
    )


def lines(directory: Path, name: str) -> list[Any]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def last_of_each_step(directory: Path, rank: int) -> dict[int, tuple[str, float]]:
    """Return loss and a random number of each step, of the generation that computed it last."""
    return {
        line["step"]: (line["loss"], line["drawn"])
        for line in lines(directory, f"steps-{rank}.jsonl")
    }


def test_a_job_that_rejects_steps_is_bit_equal_to_one_that_skips_their_batches(
    tmp_path: Path,
) -> None:
    """The first step has no state to roll back to, the second has; then a worker is killed."""
    (tmp_path / "skips").mkdir()
    with cluster(tmp_path / "skips", skipped=SKIPPED) as running:
        running.start("a")
        assert running.wait("a", 120) == 0, running.output()
    with cluster(tmp_path, checkpoint=str(tmp_path / "stored"), dies=True) as running:
        running.start("a")
        view = running.wait_until(lambda view: len(view.history.recoveries) == 4, 120)
        (tmp_path / "release").touch()
        assert running.wait("a", 120) == 0, running.output()
        output = running.output()
    reasons = [recovery.reason for recovery in view.history.recoveries]
    assert reasons[1].startswith("rank 1: rank 1 rejected step 4: loss=nan; global batches 1 to 3")
    assert reasons[2].startswith("rank 0: rank 0 rejected step 12: loss=")
    assert reasons[2].endswith("; global batches 10 to 12 are skipped")
    assert "no checkpoint of step 1 or before it to roll back to" in output
    assert [recovery.source.split()[0] for recovery in view.history.recoveries] == [
        "start", "memory", "storage", "memory",
    ]  # fmt: skip
    # On every rank once; the process that replaced the killed one has it from the state.
    rejections = [[4, 1, [3]], [12, 0, [10, 11, 12]]]
    assert sorted(lines(tmp_path, "rejections.jsonl")) == [
        [rank, *rejected] for rank in (0, 1) for rejected in rejections
    ]
    # What was undone is gone: of each stored step there is one, up to the last.
    stored = [found.step for found in list_steps(open_storage(str(tmp_path / "stored")))]
    assert stored[0] == BATCHES - len(SKIPPED)
    assert len(stored) == len(set(stored))
    for rank in (0, 1):
        expected = last_of_each_step(tmp_path / "skips", rank)
        assert expected.keys() == set(range(1, BATCHES - len(SKIPPED) + 1))
        assert last_of_each_step(tmp_path, rank) == expected


def test_batches_are_skipped_by_another_number_of_ranks_too(tmp_path: Path) -> None:
    (tmp_path / "release").touch()
    with cluster(tmp_path, nodes=2, node_dies=True, roll_back=0) as running:
        running.start("a")
        running.start("b")
        statuses = sorted(running.wait(node, 180) for node in ("a", "b"))
        assert statuses == [-9, 0], running.output()
    by_step: dict[int, dict[int, dict[int, list[int]]]] = defaultdict(lambda: defaultdict(dict))
    for rank in (0, 1):
        for line in lines(tmp_path, f"steps-{rank}.jsonl"):
            by_step[line["step"]][line["generation"]][rank] = line["samples"]
    last = [generations[max(generations)] for _, generations in sorted(by_step.items())]
    # Rank 1 rejected the step, and its node was lost after that.
    assert [0, 4, 1, [3]] in lines(tmp_path, "rejections.jsonl")
    assert len(last[-1]) == 1
    found = [sample for ranks in last for rank in sorted(ranks) for sample in ranks[rank]]
    assert found == [
        zlib.crc32(torch.sin(torch.arange(8.0) * (index + 1)).numpy().tobytes())
        for index in range(4 * BATCHES)
        if index // 4 not in (3, 12)
    ]


def test_more_rejected_steps_than_allowed_end_the_job_and_name_rank_step_and_value(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, at_most=0) as running:
        running.start("a")
        assert running.wait("a", 120) == 1, running.output()
        output = running.output()
    assert "rank 1 rejected step 4 of global batch 3: loss=nan" in output
    assert "generation 2" not in output
