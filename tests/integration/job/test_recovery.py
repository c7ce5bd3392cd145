"""Claims about whole jobs: real agents, real workers over gloo, a real etcd, real SIGKILL."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from keepstep.elastic.cli.status import render, summary
from keepstep.elastic.rendezvous.view import View
from tests.integration.job.jobs import (
    STEPS,
    Lines,
    cluster,
    last_run_of_each_step,
    mean_losses,
    samples,
    step_of,
)


def run_undisturbed(directory: Path, **options: Any) -> Lines:
    with cluster(directory, **options) as running:
        running.start("a")
        running.start("b")
        assert [running.wait(node, 120) for node in ("a", "b")] == [0, 0], running.output()
    return last_run_of_each_step(directory)


@pytest.fixture(scope="module")
def with_dropout(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    with pytest.MonkeyPatch.context() as patch:
        root = Path(__file__).parents[3]
        patch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "examples")]))
        return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), dropout=0.1)


@pytest.fixture(scope="module")
def without_dropout(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    with pytest.MonkeyPatch.context() as patch:
        root = Path(__file__).parents[3]
        patch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "examples")]))
        return run_undisturbed(tmp_path_factory.mktemp("undisturbed"))


def test_killed_worker_is_replaced_and_every_later_loss_is_bit_identical(
    tmp_path: Path, with_dropout: Lines
) -> None:
    with cluster(tmp_path, dropout=0.1) as running:
        running.start("a")
        running.start("b")
        running.wait_until(lambda view: step_of(view) >= 8, 60)
        running.workers_of("b")[1].kill()
        view = running.wait_until(lambda view: len(view.history.recoveries) == 2, 60)
        assert [running.wait(node, 60) for node in ("a", "b")] == [0, 0], running.output()
    recovery = view.history.recoveries[1]
    assert recovery.source == "memory"
    assert recovery.lost_steps <= 1
    assert recovery.world_size == 4
    disturbed = last_run_of_each_step(tmp_path)
    assert disturbed.keys() == set(range(1, STEPS + 1))
    for step, lines in disturbed.items():
        for rank, line in lines.items():
            expected = with_dropout[step][rank]
            assert (line["loss"], line["samples"]) == (expected["loss"], expected["samples"]), (
                step,
                rank,
            )


def test_several_optimizers_and_an_average_of_the_weights_come_back_too(tmp_path: Path) -> None:
    undisturbed = run_undisturbed(tmp_path / "undisturbed", two=True, average=True)
    with cluster(tmp_path / "disturbed", two=True, average=True) as running:
        running.start("a")
        running.start("b")
        running.wait_until(lambda view: step_of(view) >= 8, 60)
        running.workers_of("a")[0].kill()
        assert [running.wait(node, 60) for node in ("a", "b")] == [0, 0], running.output()
    disturbed = last_run_of_each_step(tmp_path / "disturbed")
    for step, lines in undisturbed.items():
        for rank, expected in lines.items():
            line = disturbed[step][rank]
            assert (line["loss"], line["average"]) == (expected["loss"], expected["average"]), (
                step,
                rank,
            )


def test_who_writes_to_the_state_between_steps_is_told_and_still_has_snapshots(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, meddle=True) as running:
        running.start("a")
        running.start("b")
        running.wait_until(
            lambda view: view.snapshot is not None and view.snapshot.snapshot.step >= 8, 60
        )
        running.workers_of("b")[1].kill()
        view = running.wait_until(lambda view: len(view.history.recoveries) == 2, 60)
        assert [running.wait(node, 60) for node in ("a", "b")] == [0, 0], running.output()
    assert view.history.recoveries[1].source == "memory"
    told = [line for line in running.output().splitlines() if "was written to while" in line]
    assert len(told) <= 5
    assert all("`with job.step()` only" in line for line in told)
    assert told


def test_lost_node_is_outlived_and_taken_in_again_without_storage(
    tmp_path: Path, without_dropout: Lines
) -> None:
    with cluster(tmp_path) as running:
        running.start("a")
        running.start("b")
        running.wait_until(lambda view: step_of(view) >= 8, 60)
        running.kill("b")
        lost = running.wait_until(
            lambda view: len(view.history.recoveries) == 2, 60
        ).history.recoveries[1]
        assert lost.source == "memory, parity"
        assert lost.resumed_step > 0
        assert lost.lost_steps <= 2
        running.start("b")
        # The job may be over before the node has warmed up; then it has nothing to join.
        status = running.wait("a", 60)
        assert status == 0, running.output()
    disturbed = last_run_of_each_step(tmp_path)
    assert {len(lines) for step, lines in disturbed.items() if step == 8 + 3} <= {2, 4}
    assert samples(disturbed) == samples(without_dropout)
    assert mean_losses(disturbed) == pytest.approx(mean_losses(without_dropout), rel=1e-4)


def test_a_second_node_lost_while_the_first_loss_is_made_good_is_outlived_too(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, "1:3", checkpoint=str(tmp_path / "checkpoint"), every=3) as running:
        for node in ("a", "b", "c"):
            running.start(node)
        running.wait_until(lambda view: view.checkpoint is not None and step_of(view) >= 6, 120)
        running.kill("b")
        # Its shards are being rebuilt, or just have been.
        running.wait_until(lambda view: view.generation_number == 2, 60)
        running.kill("c")
        assert running.wait("a", 120) == 0, running.output()
    disturbed = last_run_of_each_step(tmp_path)
    assert disturbed.keys() == set(range(1, STEPS + 1))


def test_a_job_that_chooses_its_own_intervals_says_so_and_recovers(tmp_path: Path) -> None:
    def is_chosen(view: View) -> bool:
        return view.checkpoint is not None and any(
            joined.record.snapshot_every for joined in view.nodes.values()
        )

    with cluster(
        tmp_path, snapshots="auto", every="auto", checkpoint=str(tmp_path / "checkpoint")
    ) as running:
        running.start("a")
        running.start("b")
        view = running.wait_until(is_chosen, 60)
        facts = summary(view, time.time())["intervals"]
        # Failures are weeks apart by what is known, and a snapshot costs milliseconds: that is many of these tiny steps.
        assert facts["snapshot_every"] > 10
        assert facts["checkpoint_interval_s"] > 60
        console = Console(file=io.StringIO(), record=True)
        console.print(render("job", view, time.time()))
        shown = console.export_text()
        assert "snapshots, chosen:" in shown
        assert "checkpoints, chosen:" in shown
        running.workers_of("b")[1].kill()
        view = running.wait_until(lambda view: len(view.history.recoveries) == 2, 60)
        assert [running.wait(node, 60) for node in ("a", "b")] == [0, 0], running.output()
    assert view.history.recoveries[1].source == "memory"
    assert view.history.recoveries[1].after_failure
    assert last_run_of_each_step(tmp_path).keys() == set(range(1, STEPS + 1))


def test_what_memory_lacks_of_a_stored_snapshot_comes_from_storage(
    tmp_path: Path, without_dropout: Lines
) -> None:
    def is_stored(view: View) -> bool:
        return (
            view.snapshot is not None and view.checkpoint is not None and view.checkpoint.step >= 20
        )

    with cluster(
        tmp_path, "1:3", steps=60, snapshots=20, every=20, checkpoint=str(tmp_path / "checkpoint")
    ) as running:
        for node in ("a", "b", "c"):
            running.start(node)
        running.wait_until(is_stored, 120)
        # Of three nodes in a group, any one may be lost.
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
    first = {step: lines for step, lines in disturbed.items() if step <= STEPS}
    assert samples(first) == samples(without_dropout)
    assert mean_losses(first) == pytest.approx(mean_losses(without_dropout), rel=1e-4)


@pytest.mark.parametrize("leaver", ["a", "b"])
def test_preempted_node_hands_its_shards_over_and_no_step_is_lost(
    tmp_path: Path, without_dropout: Lines, leaver: str
) -> None:
    """Also if it leads and has rank 0: then the other's ranks move, and DTensor must not remember their old places."""
    other = "b" if leaver == "a" else "a"
    with cluster(tmp_path) as running:
        running.start("a")
        running.wait_until(lambda view: view.leader == "a", 60)
        running.start("b")
        running.wait_until(lambda view: step_of(view) >= 6, 60)
        running.terminate(leaver)
        assert running.wait(leaver, 60) == 128 + signal.SIGTERM, running.output()
        view = running.wait_until(lambda view: len(view.history.recoveries) == 2, 60)
        assert view.leader == other
        assert running.wait(other, 60) == 0, running.output()
    recovery = view.history.recoveries[1]
    assert "memory" in recovery.source
    assert (recovery.world_size, recovery.lost_steps) == (2, 0)
    disturbed = last_run_of_each_step(tmp_path)
    assert samples(disturbed) == samples(without_dropout)
    assert mean_losses(disturbed) == pytest.approx(mean_losses(without_dropout), rel=1e-4)


def test_sharded_over_two_dimensions_a_killed_worker_changes_nothing(
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
        # Two ranks of one tensor-parallel group have the same samples and the same loss.
        assert (lines[0]["samples"], lines[2]["samples"]) == (
            lines[1]["samples"],
            lines[3]["samples"],
        ), step
        assert lines[0]["loss"] == lines[1]["loss"], step
    one_of_each = {step: {0: lines[0], 1: lines[2]} for step, lines in disturbed.items()}
    assert samples(one_of_each) == samples(without_dropout)
    assert mean_losses(one_of_each) == pytest.approx(mean_losses(without_dropout), rel=1e-4)


def test_evicted_node_hands_over_leaves_and_is_seen_to_have_left(tmp_path: Path) -> None:
    def keepstep(*arguments: str) -> str:
        command = [
            sys.executable,
            "-P",
            "-m",
            "keepstep",
            *arguments,
            "--store",
            running.url,
            "--job",
            "job",
        ]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    with cluster(tmp_path, steps=10**6) as running:
        running.start("a")
        running.start("b")
        running.wait_until(lambda view: step_of(view) >= 4, 60)
        before = json.loads(keepstep("status", "--once", "--json"))
        assert (before["world_size"], [node["node"] for node in before["nodes"]]) == (4, ["a", "b"])
        keepstep("evict", "b", "--reason", "its fan is loud")
        view = running.wait_until(
            lambda view: view.generation_number == 2 and "b" not in view.nodes, 60
        )
        assert view.generation is not None
        assert view.generation.reason == "evicted b: its fan is loud"
        assert running.wait("b", 60) != 0
        after = json.loads(keepstep("status", "--once", "--json"))
        assert (after["generation"], after["world_size"]) == (2, 2)
        running.wait_until(lambda view: step_of(view) > after["step"], 60)


def test_agent_killed_alone_leaves_no_process_behind(tmp_path: Path) -> None:
    with cluster(tmp_path, "1:1") as running:
        running.start("a")
        running.wait_until(lambda view: step_of(view) >= 2, 60)
        agent = psutil.Process(running.agents["a"].pid)
        started = agent.children(recursive=True)
        assert len(started) >= 3
        agent.kill()
        gone, alive = psutil.wait_procs(started, timeout=20)
        assert not alive
        assert len(gone) == len(started)


def test_stopped_worker_is_noticed_by_the_generation_that_it_blocks(tmp_path: Path) -> None:
    """An agent that can no longer renew its lease is declared gone; the others go on."""
    with cluster(tmp_path, checkpoint=str(tmp_path / "checkpoint"), every=3) as running:
        running.start("a", "--lease-ttl", "2")
        running.start("b", "--lease-ttl", "2")
        running.wait_until(lambda view: view.checkpoint is not None and step_of(view) >= 4, 60)
        tree = [psutil.Process(running.agents["b"].pid), *running.workers_of("b")]
        for process in tree:
            process.suspend()
        running.wait_until(lambda view: view.generation_number == 2 and step_of(view) > 0, 60)
        assert running.wait("a", 120) == 0, running.output()
        # What was declared gone wakes up, finds itself fenced out, and changes nothing.
        for process in tree:
            if process.is_running():
                process.resume()


def test_killed_node_that_comes_back_at_once_is_not_mistaken_for_its_own_double(
    tmp_path: Path,
) -> None:
    with cluster(
        tmp_path, steps=10**6, checkpoint=str(tmp_path / "checkpoint"), every=3
    ) as running:
        for node in ("a", "b"):
            # So long that it would not have ended by itself.
            running.start(node, "--lease-ttl", "60")
        running.wait_until(lambda view: view.checkpoint is not None and step_of(view) >= 4, 60)
        # While an agent lives, nobody else can take its name.
        command = list(running.agents["a"].args)
        double = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert double.returncode == 2
        assert "node 'a' is already in job 'job'; choose another --node name" in double.stderr
        running.kill("b")
        running.start("b", "--lease-ttl", "60")
        view = running.wait_until(
            lambda view: view.generation_number >= 3 and view.generation.world_size == 4, 60
        )
        assert "b" in view.nodes
