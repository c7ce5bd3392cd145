"""Claims about data-parallel replicas in complete jobs: a rank that differs is found and named."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from keepstep.elastic.cli.status import summary
from tests.integration.job.jobs import made_once
from tests.patient_cluster import PatientCluster

SCRIPT = Path(__file__).parent / "replicas.py"
STEPS = 20
PAIR_STEPS = 120
"""Enough to evict a node before the job is done."""


def run(
    directory: Path, *, workers: int = 4, nodes: str = "a", spares: str = "", **options: Any
) -> tuple[int, str, dict[str, Any] | None]:
    """Run a job of nodes with some ranks each, and further nodes that are spares.

    Most jobs have one node, which starts soonest; two tests see that replicas of two are compared.

    Returns the greatest exit status of the nodes that were not evicted, all output, and the last
    comparison that the job's status showed.
    """
    log = directory / "log"
    log.mkdir()
    arguments = json.dumps({"steps": STEPS, "log": str(log), **options})
    with PatientCluster(
        "job",
        [str(SCRIPT), arguments],
        nnodes=str(len(nodes)),
        workers=workers,
        log=directory / "agents",
    ) as running:
        for node in nodes + spares:
            running.start(node)
        # Nothing is damaged before: a job of short steps may be over when a spare can take part.
        running.wait_until(
            lambda view: (
                sum(node.record.warm for node in view.nodes.values()) == len(nodes + spares)
                or view.result is not None
            ),
            120,
        )
        (log / "complete").touch()
        view = running.wait_until(
            lambda view: (
                view.result is not None
                or (summary(view, 0.0)["replicas"] or {"step": 0})["step"] >= STEPS - 5
            ),
            120,
        )
        statuses = {node: running.wait(node, 120) for node in nodes + spares}
        output = running.output()
        for evicted in re.findall(r"node (\w) is evicted", output):
            del statuses[evicted]
        return max(statuses.values()), output, summary(view, 0.0)["replicas"]


def sums(directory: Path) -> dict[int, list[int]]:
    """Return the checksums of the parameters after each step, in the order of ranks."""
    found: dict[int, list[int]] = {}
    for path in sorted((directory / "log").glob("*.jsonl")):
        lines = map(json.loads, path.read_text().splitlines())
        # Of a step that was computed again, the last result counts.
        for step, checksum in {line["step"]: line["sum"] for line in lines}.items():
            found.setdefault(step, []).append(checksum)
    return found


def run_undisturbed(directory: Path) -> None:
    status, output, replicas = run(directory, parallel=True)
    assert status == 0, output
    assert replicas is not None
    assert (replicas["replicas"], replicas["finding"]) == (4, "")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    return sums(made_once(tmp_path_factory, "replicas", run_undisturbed))


def test_replicas_that_are_equal_are_compared_and_nothing_is_said(
    undisturbed: dict[int, list[int]],
) -> None:
    assert all(len(set(found)) == 1 for found in undisturbed.values())


@pytest.mark.parametrize("on_divergence", ["report", "repair"])
def test_damaged_replica_is_named_with_its_tensor_and_repaired_if_asked(
    tmp_path: Path, undisturbed: dict[int, list[int]], on_divergence: str
) -> None:
    status, output, replicas = run(
        tmp_path, parallel=True, damage=[2, 10], on_divergence=on_divergence
    )
    assert status == 0, output
    assert "after step 10 rank 2 differs from 3 replicas that agree; first in model/" in output
    is_repaired = on_divergence == "repair"
    assert ("they were given the state of rank 0" in output) == is_repaired
    after = sums(tmp_path)
    # The damage came after the last step that was reduced with it.
    assert (after[11] == undisturbed[11]) == is_repaired
    assert (after[STEPS] == undisturbed[STEPS]) == is_repaired
    assert replicas is not None
    assert list(replicas["differing"]) == ([] if is_repaired else [2])
    assert ("rank 2 differs" in replicas["finding"]) != is_repaired
    # It was repaired where it was: the job went back to no snapshot.
    for path in (tmp_path / "log").glob("*.jsonl"):
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert steps == list(range(1, STEPS + 1))


def test_job_rolls_back_behind_the_damage_and_goes_on_as_if_undisturbed(
    tmp_path: Path, undisturbed: dict[int, list[int]]
) -> None:
    # A snapshot every 3 steps: the damage of step 7 is found before that of step 9 is taken, or, if
    # the one before is not committed by then, when replicas are compared anyway.
    status, output, replicas = run(
        tmp_path,
        nodes="ab",
        workers=2,
        parallel=True,
        damage=[2, 7],
        snapshot_every=3,
        on_divergence="roll back",
    )
    assert status == 0, output
    assert re.search("after step (9|10) rank 2 differs from 3 replicas that agree", output)
    assert re.search("goes on after step [36], from memory", output)
    assert sums(tmp_path) == undisturbed
    assert replicas is not None
    assert list(replicas["differing"]) == []


def run_undisturbed_pair(directory: Path) -> None:
    status, output, _ = run(directory, workers=2, parallel=True, world_size=2, steps=PAIR_STEPS)
    assert status == 0, output


@pytest.fixture(scope="module")
def undisturbed_pair(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    return sums(made_once(tmp_path_factory, "pair-of-replicas", run_undisturbed_pair))


@pytest.mark.parametrize("on_divergence", ["roll back", "replace"])
def test_which_of_two_replicas_was_wrong_is_found_by_computing_the_step_again(
    tmp_path: Path, undisturbed_pair: dict[int, list[int]], on_divergence: str
) -> None:
    is_replaced = on_divergence == "replace"
    steps = PAIR_STEPS if is_replaced else STEPS
    status, output, _ = run(
        tmp_path,
        workers=1,
        nodes="ab",
        spares="c" if is_replaced else "",
        parallel=True,
        world_size=2,
        damage=[1, 8],
        steps=steps,
        compare_every=1,
        on_divergence=on_divergence,
    )
    assert status == 0, output
    assert "after step 8 the replicas on ranks 0, 1 hold different states" in output
    finding = "step 8 computed again shows that rank 1 had computed wrongly"
    assert finding in output
    evicted = re.findall(rf"node \w is evicted: {finding}", output)
    assert len(evicted) == is_replaced
    after = sums(tmp_path)
    assert len(after) == steps
    assert after == {step: undisturbed_pair[step] for step in after}


def test_damage_in_the_last_step_does_not_reach_the_final_snapshot(
    tmp_path: Path, undisturbed: dict[int, list[int]]
) -> None:
    # Neither the interval of snapshots nor that of comparisons ends with this step.
    status, output, _ = run(
        tmp_path,
        parallel=True,
        damage=[3, 18],
        steps=18,
        snapshot_every=50,
        on_divergence="roll back",
    )
    assert status == 0, output
    assert "after step 18 rank 3 differs from 3 replicas that agree" in output
    assert sums(tmp_path)[18] == undisturbed[18]


@pytest.mark.parametrize("moment", ["compared", "committed", "stored"])
def test_worker_lost_after_the_last_step_is_replaced_and_all_ranks_end_the_job_together(
    tmp_path: Path, undisturbed: dict[int, list[int]], moment: str
) -> None:
    """One that is new compares, commits and stores: ranks that had done a part of it hung."""
    status, output, _ = run(
        tmp_path,
        parallel=True,
        lost_when_last_step_is=moment,
        steps=18,
        snapshot_every=50 if moment == "compared" else 1,
        on_divergence="roll back",
        checkpoint=f"file://{tmp_path}/checkpoints" if moment == "stored" else None,
    )
    assert status == 0, output
    assert "Traceback" not in output, output
    assert sums(tmp_path)[18] == undisturbed[18]


def test_job_that_shall_stop_ends_at_the_first_comparison_without_another_attempt(
    tmp_path: Path,
) -> None:
    status, output, _ = run(tmp_path, parallel=True, damage=[1, 5], on_divergence="stop")
    assert status == 1
    assert "after step 5 rank 1 differs from 3 replicas that agree" in output
    assert max(sums(tmp_path)) == 4
    assert "generation 2" not in output


def test_model_that_is_compiled_but_not_parallel_is_trained_and_reported_after_the_first_step(
    tmp_path: Path,
) -> None:
    status, output, _ = run(tmp_path, workers=2, world_size=2, parallel=False, compile=True)
    assert status == 0, output
    # To compare replicas does not break the one graph that the model must be.
    assert "generation 2" not in output
    assert max(sums(tmp_path)) == STEPS
    assert "after step 1 the replicas on ranks 0, 1 hold different states" in output
    assert "wrap it in DistributedDataParallel or fully_shard" in output
