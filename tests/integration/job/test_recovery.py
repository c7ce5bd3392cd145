"""Claims about complete jobs: real agents, workers over gloo, etcd and SIGKILL."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from keepstep.checkpoint.format.stored.object_names import StoredStep
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.elastic.cli.status import render, summary
from keepstep.elastic.rendezvous.view import View
from tests.adaptive_timeouts import patient
from tests.integration.job.jobs import (
    STEPS,
    Lines,
    cluster,
    committed_in,
    committed_step_of,
    last_run_of_each_step,
    made_once,
    mean_losses,
    samples,
    step_of,
    wait_for_output,
)
from tests.patient_cluster import PatientCluster


def run_undisturbed(directory: Path, **options: Any) -> Lines:
    # On one node, which starts sooner than two: where four ranks are does not change their losses.
    with cluster(directory, "1:1", workers=4, disturbed=0, **options) as running:
        running.start("a")
        assert running.wait("a", 120) == 0, running.output()
    return last_run_of_each_step(directory)


DROPOUT = {"dropout": 0.1, "two": True, "average": True}
"""Losses depend on the generators; there are two optimizers, and an average of the weights."""


@pytest.fixture(scope="module")
def with_dropout(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return last_run_of_each_step(
        made_once(tmp_path_factory, "with-dropout", lambda it: run_undisturbed(it, **DROPOUT))
    )


@pytest.fixture(scope="module")
def without_dropout(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return last_run_of_each_step(made_once(tmp_path_factory, "without-dropout", run_undisturbed))


def test_killed_worker_is_replaced_and_every_later_loss_is_bit_identical(
    tmp_path: Path, with_dropout: Lines
) -> None:
    with cluster(tmp_path, spares=1, **DROPOUT) as running:
        running.start("a")
        running.start("b")
        before = running.wait_until(lambda view: committed_step_of(view) >= 8, 60)
        running.workers_of("b")[1].kill()
        view = running.wait_until(lambda view: len(view.history.recoveries) == 2, 60)
        assert [running.wait(node, 60) for node in ("a", "b")] == [0, 0], running.output()
    recovery = view.history.recoveries[1]
    assert recovery.source == "memory"
    assert recovery.resumed_step >= committed_step_of(before)
    assert recovery.world_size == 4
    disturbed = last_run_of_each_step(tmp_path)
    assert disturbed.keys() == set(range(1, STEPS + 1))
    for step, lines in disturbed.items():
        for rank, line in lines.items():
            expected = with_dropout[step][rank]
            for what in ("loss", "samples", "average"):
                assert line[what] == expected[what], (what, step, rank)


def test_collectives_that_may_leave_garbage_are_aborted_by_order_once_all_are_fenced(
    tmp_path: Path, with_dropout: Lines
) -> None:
    """A worker is lost, and then a node."""

    def fenced(view: View) -> list[int]:
        return [joined.record.fenced for joined in view.nodes.values()]

    with cluster(tmp_path, spares=1, **DROPOUT, backend="other", disturbed=2) as running:
        for node in "abc":
            running.start(node)
        view = running.wait_until(lambda view: committed_step_of(view) >= 8, 60)
        running.workers_of(view.generation.members[1].node)[1].kill()
        view = running.wait_until(lambda view: len(view.history.recoveries) == 2, 60)
        assert fenced(view).count(1) == 2
        view = running.wait_until(lambda view: committed_in(view, 2), 60)
        running.kill(view.generation.members[1].node)
        view = running.wait_until(lambda view: len(view.history.recoveries) == 3, 60)
        assert fenced(view).count(2) == 1
        remaining = running.agents.keys()
        assert [running.wait(node, 60) for node in remaining] == [0] * len(remaining)
    # Whoever waited for the order got it in time: three ranks did, and then two. gloo may hold one
    # (docs/limits.md).
    assert running.output().count("did not stop in") <= 1
    disturbed = last_run_of_each_step(tmp_path)
    for step, lines in disturbed.items():
        for rank, line in lines.items():
            assert line["loss"] == with_dropout[step][rank]["loss"], (step, rank)


STREAM = {"stream": True, "scaled": True, "micro_batches": 2, "stop_at": 20}


@pytest.fixture(scope="module")
def of_a_stream(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return last_run_of_each_step(
        made_once(tmp_path_factory, "of-a-stream", lambda it: run_undisturbed(it, **STREAM))
    )


def test_scaled_micro_batches_of_a_stream_that_stop_early_are_those_of_an_undisturbed_run(
    tmp_path: Path, of_a_stream: Lines
) -> None:
    """Gradients accumulate, a GradScaler's scale grows, and rank 0 decides when to stop.

    A worker is lost, and then a node: the last steps are computed by half of the ranks.
    """
    assert max(of_a_stream) == 20
    with cluster(tmp_path, **STREAM, disturbed=2) as running:
        running.start("a")
        running.start("b")
        running.wait_until(lambda view: committed_step_of(view) >= 6, 60)
        running.workers_of("b")[1].kill()
        running.wait_until(lambda view: committed_in(view, 2), 60)
        running.kill("b")
        assert running.wait("a", 120) == 0, running.output()
    disturbed = last_run_of_each_step(tmp_path)
    assert samples(disturbed) == samples(of_a_stream)
    assert mean_losses(disturbed) == pytest.approx(mean_losses(of_a_stream), rel=1e-3)
    computed_in = set()
    for step, lines in disturbed.items():
        for rank, line in lines.items():
            expected = of_a_stream[step][rank]
            assert line["scale"] == expected["scale"]
            computed_in.add(line["generation"])
            if line["world_size"] == 4:
                # NumPy's and Python's generators too are where they were.
                assert (line["loss"], line["drawn"]) == (expected["loss"], expected["drawn"])
    assert computed_in == {1, 2, 3}


def test_wrongly_restored_state_is_found_never_committed_and_restored_again(
    tmp_path: Path, with_dropout: Lines
) -> None:
    with cluster(tmp_path, **DROPOUT, restores_wrongly=True) as running:
        running.start("a")
        running.start("b")
        running.wait_until(lambda view: step_of(view) >= 8, 60)
        running.workers_of("b")[1].kill()
        view = running.wait_until(
            lambda view: view.generation_number == 3 and _restored_state(view) is not None, 60
        )
        restored = _restored_state(view)
        assert [running.wait(node, 60) for node in ("a", "b")] == [0, 0], running.output()
    assert "differs from the snapshot in model/" in running.output()
    assert restored is not None
    assert restored["differing"] == []
    assert restored["compared_nbytes"] > 0
    disturbed = last_run_of_each_step(tmp_path)
    assert {
        step: [lines[rank]["loss"] for rank in sorted(lines)] for step, lines in disturbed.items()
    } == {
        step: [lines[rank]["loss"] for rank in sorted(lines)]
        for step, lines in with_dropout.items()
    }


def _restored_state(view: View) -> dict[str, Any] | None:
    restored: dict[str, Any] | None = summary(view, time.time())["restored_state"]
    return restored


def test_writes_to_the_state_between_steps_are_reported_and_snapshots_continue(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, workers=1, write_between_steps=True) as running:
        running.start("a")
        running.start("b")
        running.wait_until(
            lambda view: view.snapshot is not None and view.snapshot.snapshot.step >= 8, 60
        )
        running.workers_of("b")[0].kill()
        view = running.wait_until(lambda view: len(view.history.recoveries) == 2, 60)
        assert [running.wait(node, 60) for node in ("a", "b")] == [0, 0], running.output()
    assert view.history.recoveries[1].source == "memory"
    warnings = [
        line
        for line in running.output().splitlines()
        if "from now on training waits while state is copied" in line
    ]
    assert 1 <= len(warnings) <= 5
    assert all("only inside `with job.step()`" in line for line in warnings)


def test_job_survives_the_loss_of_a_node_and_its_return_without_storage(
    tmp_path: Path, without_dropout: Lines
) -> None:
    with cluster(tmp_path) as running:
        running.start("a")
        running.start("b")
        before = running.wait_until(lambda view: committed_step_of(view) >= 8, 60)
        running.kill("b")
        lost = running.wait_until(
            lambda view: len(view.history.recoveries) == 2, 60
        ).history.recoveries[1]
        assert lost.source == "memory, parity"
        assert lost.resumed_step >= committed_step_of(before)
        running.start("b")
        # The job may end before the node is ready; then the node cannot join.
        status = running.wait("a", 60)
        assert status == 0, running.output()
    disturbed = last_run_of_each_step(tmp_path)
    assert {len(lines) for step, lines in disturbed.items() if step == 8 + 3} <= {2, 4}
    assert samples(disturbed) == samples(without_dropout)
    assert mean_losses(disturbed) == pytest.approx(mean_losses(without_dropout), rel=1e-4)


def test_job_survives_the_loss_of_a_second_node_during_recovery_from_the_first(
    tmp_path: Path,
) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    with cluster(tmp_path, "1:3", workers=1, checkpoint=checkpoint, every=3) as running:
        for node in ("a", "b", "c"):
            running.start(node)
        running.wait_until(lambda view: view.checkpoint is not None and step_of(view) >= 6, 120)
        running.kill("b")
        # Node b's shards are being rebuilt, or have just been.
        running.wait_until(lambda view: view.generation_number == 2, 60)
        running.kill("c")
        assert running.wait("a", 120) == 0, running.output()
    disturbed = last_run_of_each_step(tmp_path)
    assert disturbed.keys() == set(range(1, STEPS + 1))


def test_job_with_automatic_intervals_shows_them_and_recovers(tmp_path: Path) -> None:
    def is_chosen(view: View) -> bool:
        return view.checkpoint is not None and any(
            joined.record.snapshot_every for joined in view.nodes.values()
        )

    with cluster(
        tmp_path,
        workers=1,
        endless=True,
        snapshots="auto",
        every="auto",
        checkpoint=str(tmp_path / "checkpoint"),
    ) as running:
        running.start("a")
        running.start("b")
        view = running.wait_until(is_chosen, 60)
        intervals = summary(view, time.time())["intervals"]
        # The prior is one failure in weeks, and a snapshot costs milliseconds: so the interval is
        # many of these short steps.
        assert intervals["snapshot_every"] > 10
        assert intervals["checkpoint_interval_s"] > 60
        console = Console(file=io.StringIO(), record=True)
        console.print(render("job", view, time.time()))
        shown = console.export_text()
        assert "snapshots, chosen:" in shown
        assert "checkpoints, chosen:" in shown
        running.workers_of("b")[0].kill()
        view = running.wait_until(lambda view: len(view.history.recoveries) == 2, 60)
        recovery = view.history.recoveries[1]
        running.wait_until(lambda view: step_of(view) > recovery.resumed_step, 60)
    assert recovery.source == "memory"
    assert recovery.after_failure


def test_shards_missing_in_memory_are_read_from_storage_if_the_snapshot_is_stored(
    tmp_path: Path, without_dropout: Lines
) -> None:
    def is_stored(view: View) -> bool:
        return (
            view.snapshot is not None and view.checkpoint is not None and view.checkpoint.step >= 20
        )

    with cluster(
        tmp_path,
        "1:3",
        workers=1,
        steps=60,
        snapshots=20,
        every=20,
        checkpoint=str(tmp_path / "checkpoint"),
    ) as running:
        for node in ("a", "b", "c"):
            running.start(node)
        running.wait_until(is_stored, 120)
        # Parity covers the loss of only one of the group's three nodes.
        for node in ("b", "c"):
            os.kill(running.agents[node].pid, signal.SIGKILL)
        lost = running.wait_until(
            lambda view: len(view.history.recoveries) == 2, 60
        ).history.recoveries[1]
        assert running.wait("a", 120) == 0, running.output()
    assert lost.source == "memory, storage"
    assert lost.resumed_step == 20
    disturbed = last_run_of_each_step(tmp_path)
    assert disturbed.keys() == set(range(1, 61))
    first_steps = {step: lines for step, lines in disturbed.items() if step <= STEPS}
    assert samples(first_steps) == samples(without_dropout)
    assert mean_losses(first_steps) == pytest.approx(mean_losses(without_dropout), rel=1e-4)


def test_preempted_node_hands_over_its_shards_and_no_step_is_lost(
    tmp_path: Path, without_dropout: Lines
) -> None:
    """Node a leads and has rank 0: without it the other ranks change, also for DTensor's caches.

    `test_generation_that_ends_in_good_order` ends one that does not lead.
    """
    with cluster(tmp_path, held=True) as running:
        running.start("a")
        running.wait_until(lambda view: view.leader == "a", 60)
        running.start("b")
        running.wait_until(lambda view: step_of(view) >= 6, 60)
        running.terminate("a")
        assert running.wait("a", 60) == 128 + signal.SIGTERM, running.output()
        # The last node to leave a job that is done deletes what the job has recorded.
        view = running.wait_until(
            lambda view: len(view.history.recoveries) == 2 and view.leader == "b", 60
        )
        (tmp_path / "log" / "release").touch()
        assert running.wait("b", 60) == 0, running.output()
    recovery = view.history.recoveries[1]
    assert "memory" in recovery.source
    assert (recovery.world_size, recovery.lost_steps) == (2, 0)
    disturbed = last_run_of_each_step(tmp_path)
    assert samples(disturbed) == samples(without_dropout)
    assert mean_losses(disturbed) == pytest.approx(mean_losses(without_dropout), rel=1e-4)


def test_nodes_that_are_all_preempted_store_every_step_and_the_job_goes_on_from_there(
    tmp_path: Path,
) -> None:
    """Each process of theirs is sent the signal: all but the agents leave it to these."""
    checkpoint = str(tmp_path / "checkpoint")
    with cluster(tmp_path, workers=1, endless=True, checkpoint=checkpoint) as running:
        for node in ("a", "b"):
            running.start(node)
        running.wait_until(lambda view: step_of(view) >= 4, 60)
        for node in ("a", "b"):
            running.terminate_all(node)
        for node in ("a", "b"):
            assert running.wait(node, 60) == 128 + signal.SIGTERM, running.output()
    computed = max(step for step, lines in last_run_of_each_step(tmp_path).items() if lines)
    with cluster(
        tmp_path, workers=1, disturbed=0, steps=computed + 2, checkpoint=checkpoint
    ) as running:
        for node in ("a", "b"):
            running.start(node)
        assert [running.wait(node, 120) for node in ("a", "b")] == [0, 0], running.output()
    runs = [
        json.loads(line)["step"]
        for line in (tmp_path / "log" / "rank-0.jsonl").read_text().splitlines()
    ]
    assert runs == list(range(1, computed + 3))


def store_checkpoints(directory: Path) -> None:
    """Run a job until it has stored two checkpoints."""
    checkpoint = str(directory / "checkpoint")
    with cluster(directory, workers=1, endless=True, every=3, checkpoint=checkpoint) as running:
        for node in ("a", "b"):
            running.start(node)
        # Where storing is slow a due checkpoint may be skipped.
        running.wait_until(lambda view: len(list_steps(open_storage(checkpoint))) >= 2, 60)


@pytest.mark.parametrize("damage", ["part", "tensor"])
def test_all_ranks_resume_from_the_newest_checkpoint_that_is_intact(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, damage: str
) -> None:
    stored = made_once(tmp_path_factory, "stored-checkpoints", store_checkpoints)
    checkpoint = Path(shutil.copytree(stored / "checkpoint", tmp_path / "checkpoint"))
    *_, older, newest = list_steps(open_storage(str(checkpoint)))[::-1]
    pattern = "attempt-*/parts/*" if damage == "part" else "attempt-*/packs/*"
    # One rank alone may find the damage; all of them take the other checkpoint.
    next(iter(sorted((checkpoint / newest.directory).glob(pattern)))).unlink()
    with cluster(
        tmp_path, workers=1, disturbed=0, steps=newest.step, every=3, checkpoint=str(checkpoint)
    ) as running:
        for node in ("a", "b"):
            running.start(node)
        view = running.wait_until(lambda view: len(view.history.recoveries) == 1, 60)
        assert [running.wait(node, 120) for node in ("a", "b")] == [0, 0], running.output()
    first = view.history.recoveries[0]
    # Two ranks with a shard each have read each stored byte once.
    assert first.source == f"step {newest.step} damaged, storage (1.00 x)"
    assert first.resumed_step == older.step
    assert f"goes on after step {older.step}" in running.output()
    # The damaged checkpoint is stored again, under a generation that is greater than its own.
    assert list_steps(open_storage(str(checkpoint)))[:2] == (
        StoredStep(newest.step, newest.generation + 1), newest
    )  # fmt: skip


def test_job_removes_the_checkpoints_that_it_is_not_to_keep(tmp_path: Path) -> None:
    url = str(tmp_path / "checkpoint")
    kept = {"checkpoint": url, "every": 2, "keep_last": 1, "keep_every": 5}
    with cluster(tmp_path, "1:1", workers=1, disturbed=0, steps=20, **kept) as running:
        running.start("a")
        assert running.wait("a", 120) == 0, running.output()
    steps = [stored.step for stored in list_steps(open_storage(url))]
    # Where storing is slow a due checkpoint may be skipped, but not the last one.
    assert steps[0] == 20
    assert all(step % 5 == 0 for step in steps)
    assert list(Path(url).glob("step-*/attempt-*/removed.json")), "some were stored and removed"
    StoredCheckpoint.open(open_storage(url)).verify()
    with cluster(tmp_path, "1:1", workers=1, disturbed=0, steps=22, **kept) as running:
        running.start("a")
        assert running.wait("a", 120) == 0, running.output()
    assert [stored.step for stored in list_steps(open_storage(url))] == [22, *steps]


@pytest.mark.long
def test_job_that_is_run_again_resumes_from_its_compressed_checkpoints_and_ends_well(
    tmp_path: Path,
) -> None:
    """Also one that is done, or has done more steps than are asked for."""
    checkpoint = str(tmp_path / "checkpoint")
    options = {"checkpoint": checkpoint, "every": 3, "compression": "zstd", "context": 8192}
    for steps in (9, 9, 6, 12):
        with cluster(tmp_path, "1:1", workers=1, disturbed=0, steps=steps, **options) as running:
            running.start("a")
            assert running.wait("a", 120) == 0, running.output()
            assert "not stored" not in running.output()
        source = StoredCheckpoint.open(open_storage(checkpoint))
        assert source.step == max(9, steps)
        source.verify()
        # The only one of 1 MiB.
        assert source.stored_tensors["model/positions.weight"].compression == "zstd"
    # Where storing is slow a due checkpoint may be skipped, but not the last one; none is repeated.
    stored = [stored.step for stored in list_steps(open_storage(checkpoint))]
    assert 9 in stored
    assert len(set(stored)) == len(stored)
    lines = (tmp_path / "log" / "rank-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))


def test_generation_that_ends_in_good_order_leaves_no_state_of_a_step_that_was_begun(
    tmp_path: Path,
) -> None:
    """Rank 0 is held between two steps: it knows of the end when others are inside the next one."""
    with cluster(tmp_path, snapshots=10**6) as running:
        for node in ("a", "b"):
            running.start(node)
        running.wait_until(lambda view: step_of(view) >= 5, 60)
        running.terminate("b")
        view = running.wait_until(lambda view: len(view.history.recoveries) == 2, 60)
        assert running.wait("a", 120) == 0, running.output()
    assert view.history.recoveries[1].lost_steps == 0
    lines = last_run_of_each_step(tmp_path)
    assert lines.keys() == set(range(1, STEPS + 1))
    assert {
        (step, line["entered_before"]) for step, of in lines.items() for line in of.values()
    } == {(step, step - 1) for step in lines}


def test_recovery_on_a_two_dimensional_mesh_keeps_samples_and_losses(
    tmp_path: Path, without_dropout: Lines
) -> None:
    with cluster(tmp_path, mesh={"dp": -1, "tp": 2}) as running:
        running.start("a")
        running.start("b")
        running.wait_until(lambda view: step_of(view) >= 8, 60)
        running.workers_of("a")[0].kill()
        view = running.wait_until(lambda view: len(view.history.recoveries) == 2, 60)
        assert [running.wait(node, 60) for node in ("a", "b")] == [0, 0], running.output()
    assert view.history.recoveries[1].source == "memory"
    disturbed = last_run_of_each_step(tmp_path)
    assert disturbed.keys() == set(range(1, STEPS + 1))
    for step, lines in disturbed.items():
        # The two ranks of a tensor-parallel group have the same samples and loss.
        assert (lines[0]["samples"], lines[2]["samples"]) == (
            lines[1]["samples"],
            lines[3]["samples"],
        ), step
        assert lines[0]["loss"] == lines[1]["loss"], step
    data_parallel = {step: {0: lines[0], 1: lines[2]} for step, lines in disturbed.items()}
    assert samples(data_parallel) == samples(without_dropout)
    assert mean_losses(data_parallel) == pytest.approx(mean_losses(without_dropout), rel=1e-4)


def test_job_whose_mesh_has_no_place_for_those_that_are_left_waits_for_a_node(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, workers=1, mesh={"dp": -1, "tp": 2}) as running:
        running.start("a")
        running.start("b")
        running.wait_until(lambda view: step_of(view) >= 5, 120)
        running.kill("b")
        wait_for_output(running, "the mesh needs a multiple of 2")
        running.start("b")
        assert [running.wait(node, 120) for node in ("a", "b")] == [0, 0], running.output()
    disturbed = last_run_of_each_step(tmp_path)
    assert disturbed.keys() == set(range(1, STEPS + 1))
    assert {len(lines) for lines in disturbed.values()} == {2}


def test_evicted_node_hands_over_its_state_leaves_and_is_no_longer_listed(tmp_path: Path) -> None:
    def keepstep(*arguments: str) -> str:
        command = [
            sys.executable, "-P", "-m", "keepstep", *arguments,
            "--store", running.url, "--job", "job",
        ]  # fmt: skip
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=patient(60)
        ).stdout

    with cluster(tmp_path, workers=1, endless=True) as running:
        running.start("a")
        running.start("b")
        running.wait_until(lambda view: step_of(view) >= 4, 60)
        before = json.loads(keepstep("status", "--once", "--json"))
        assert (before["world_size"], [node["node"] for node in before["nodes"]]) == (2, ["a", "b"])
        keepstep("evict", "b", "--reason", "its fan is loud")
        view = running.wait_until(
            lambda view: view.generation_number == 2 and "b" not in view.nodes, 60
        )
        assert view.generation is not None
        assert view.generation.reason == "evicted b: its fan is loud"
        assert running.wait("b", 60) != 0
        after = json.loads(keepstep("status", "--once", "--json"))
        assert (after["generation"], after["world_size"]) == (2, 1)
        running.wait_until(lambda view: step_of(view) > after["step"], 60)


def test_dead_snapshot_servers_are_replaced_and_their_shards_are_rebuilt(tmp_path: Path) -> None:
    """Node a's server dies, and in the next generation node b's."""
    with cluster(tmp_path, disturbed=2) as running:
        for node in ("a", "b"):
            running.start(node)
        running.wait_until(lambda view: committed_step_of(view) >= 8, 60)
        for generation, server in ((1, "a"), (2, "b")):
            before = running.wait_until(
                lambda view, generation=generation: committed_in(view, generation), 60
            )
            running.snapshot_server_of(server).kill()
            view = running.wait_until(
                lambda view, generation=generation: len(view.history.recoveries) == generation + 1,
                60,
            )
            recovery = view.history.recoveries[generation]
            assert {"memory", "parity"} <= set(recovery.source.split(", "))
            assert "storage" not in recovery.source
            assert recovery.world_size == 4
            assert recovery.resumed_step >= committed_step_of(before)
        assert [running.wait(node, 60) for node in ("a", "b")] == [0, 0], running.output()
    assert last_run_of_each_step(tmp_path).keys() == set(range(1, STEPS + 1))


def test_model_is_released_before_the_next_one_is_built(tmp_path: Path) -> None:
    """A GPU may have no memory for both."""
    script = [str(Path(__file__).parent / "released.py")]
    with PatientCluster("job", script, nnodes="1", workers=2, log=tmp_path) as running:
        running.start("a")
        running.wait_until(lambda view: committed_step_of(view) >= 4, 60)
        running.workers_of("a")[1].kill()
        assert running.wait("a", 60) == 0, running.output()


def test_killed_agent_leaves_no_process_behind(tmp_path: Path) -> None:
    """Not even what its workers have started in sessions of their own."""
    with cluster(tmp_path, "1:1", starts_session=True) as running:
        running.start("a")
        running.wait_until(lambda view: step_of(view) >= 2, 60)
        agent = psutil.Process(running.agents["a"].pid)
        descendants = agent.children(recursive=True)
        own_sessions = [process for process in descendants if process.name() == "sleep"]
        assert len(own_sessions) == 2
        agent.kill()
        gone, alive = psutil.wait_procs(descendants, timeout=patient(20))
        assert not alive
        assert len(gone) == len(descendants)


def test_stopped_node_loses_its_lease_and_the_others_continue(tmp_path: Path) -> None:
    """An agent that cannot renew its lease is no longer a member."""
    checkpoint = str(tmp_path / "checkpoint")
    with cluster(tmp_path, workers=1, checkpoint=checkpoint, every=3) as running:
        running.start("a", "--lease-ttl", "2")
        running.start("b", "--lease-ttl", "2")
        running.wait_until(lambda view: view.checkpoint is not None and step_of(view) >= 4, 60)
        tree = [psutil.Process(running.agents["b"].pid), *running.workers_of("b")]
        for process in tree:
            process.suspend()
        running.wait_until(lambda view: view.generation_number == 2 and step_of(view) > 0, 60)
        assert running.wait("a", 120) == 0, running.output()
        # The stopped processes continue; fencing keeps them from changing anything.
        for process in tree:
            if process.is_running():
                process.resume()


def test_node_that_loses_its_lease_while_it_warms_up_keeps_its_workers(tmp_path: Path) -> None:
    """They know nothing of a job yet, and take long to start on a starved machine (T23)."""
    with cluster(tmp_path, "2", workers=1, disturbed=0) as running:
        running.start("a", "--lease-ttl", "2")
        running.wait_until(lambda view: len(running.workers_of("a")) == 1, 60)
        warming_up = running.workers_of("a")
        agent = psutil.Process(running.agents["a"].pid)
        agent.suspend()
        running.wait_until(lambda view: not view.nodes, 60)
        agent.resume()
        running.start("b", "--lease-ttl", "2")
        running.wait_until(lambda view: step_of(view) > 0, 120)
        assert running.workers_of("a")[:1] == warming_up
        assert [running.wait(node, 120) for node in ("a", "b")] == [0, 0], running.output()
    assert "joining again" in running.output()
    assert "Task was destroyed" not in running.output(), running.output()


def test_killed_node_may_return_under_its_name_before_its_lease_ends(
    tmp_path: Path,
) -> None:
    with cluster(
        tmp_path, workers=1, endless=True, checkpoint=str(tmp_path / "checkpoint"), every=3
    ) as running:
        for node in ("a", "b"):
            # The lease must not end by itself during the test.
            running.start(node, "--lease-ttl", "60")
        running.wait_until(lambda view: view.checkpoint is not None and step_of(view) >= 4, 60)
        # While an agent lives, no other agent can join under its name.
        command = list(running.agents["a"].args)
        second_agent = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
        assert second_agent.returncode == 2
        assert "node 'a' is already in job 'job'; choose another --node name" in second_agent.stderr
        running.kill("b")
        running.start("b", "--lease-ttl", "60")
        view = running.wait_until(
            lambda view: view.generation_number >= 3 and view.generation.world_size == 2, 60
        )
        assert "b" in view.nodes
