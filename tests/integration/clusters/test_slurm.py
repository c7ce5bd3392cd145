"""Claims about the script for Slurm's users: it trains to the end, whatever happens to its nodes.

Slurm's own daemons run it as two nodes on this machine; the script is submitted as it stands.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.local_slurm import LocalSlurm, not_installed
from ops.slurm_training import STEPS, SlurmTraining, training
from tests.adaptive_timeouts import patient
from tests.integration.job.jobs import made_once

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(not_installed() is not None, reason=not_installed() or ""),
]
AT_STEP = 8
WITHOUT_MEMORY = {"PET_KEEP_STATE": "0"}
"""Where control groups follow processes, Slurm ends what a job has left in memory."""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[LocalSlurm]:
    with LocalSlurm(tmp_path / "slurm") as cluster:
        yield cluster


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of two ranks that nothing happens to, without Slurm."""

    def run(directory: Path) -> None:
        command = training(directory)
        (directory / "hurry").touch()
        subprocess.run(
            [sys.executable, "-m", "keepstep", "run", "--nproc-per-node", "2", *command], check=True
        )

    directory = made_once(tmp_path_factory, "undisturbed-slurm", run)
    losses = SlurmTraining(LocalSlurm(directory), directory).losses()
    assert len(losses) == STEPS
    return losses


def started(
    slurm: LocalSlurm, directory: Path, *options: str, **variables: str
) -> tuple[SlurmTraining, str]:
    """Submit the script, and wait until it trains on both nodes."""
    running = SlurmTraining(slurm, directory)
    job = running.submit(*options, **variables)
    running.wait_for_step(AT_STEP, patient(120), world_size=2)
    return running, job


def completed(running: SlurmTraining, job: str) -> dict[str, str]:
    """Let a job end, by success, and return what Slurm shows of it."""
    running.hurry()
    shown = running.wait_for_end(job, patient(180))
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), running.output()
    return shown


def test_killed_worker_and_killed_agent_cost_at_most_a_step_each(
    tmp_path: Path, slurm: LocalSlurm, undisturbed: list[float]
) -> None:
    running, job = started(slurm, tmp_path / "job")
    running.worker("n2").kill()
    running.wait_for_step(AT_STEP + 10, patient(60), world_size=2)
    assert running.losses()[:AT_STEP] == undisturbed[:AT_STEP]
    running.agent("n2").kill()
    running.slurm.wait_until(
        lambda: "found the state of step" in running.output(), patient(60), "agent on n2 again"
    )
    shown = completed(running, job)
    assert shown["Restarts"] == "0"
    assert running.lost_steps() <= 2
    # While the agent was away one rank computed what two had computed.
    assert running.losses() == pytest.approx(undisturbed, rel=1e-4)


def test_job_goes_on_without_a_node_that_is_down_and_with_one_that_joins(
    tmp_path: Path, slurm: LocalSlurm, undisturbed: list[float]
) -> None:
    running, job = started(slurm, tmp_path / "job")
    slurm.lose_node("n2")
    running.wait_for_step(AT_STEP + 3, patient(60), world_size=1)
    slurm.wait_until(lambda: slurm.job(job)["NumNodes"] == "1", patient(60), "node that is down")
    slurm.start_node("n2")
    slurm.wait_until(lambda: "n2" in slurm.idle_nodes(), patient(60), "node that is back")
    added = running.submit("--nodes=1", JOIN=job)
    running.wait_for_step(0, patient(120), world_size=2)
    completed(running, job)
    completed(running, added)
    assert running.lost_steps() <= 1
    assert running.losses() == pytest.approx(undisturbed, rel=1e-4)


def test_preempted_job_waits_in_the_queue_and_goes_on_without_a_lost_step(
    tmp_path: Path, slurm: LocalSlurm, undisturbed: list[float]
) -> None:
    running, job = started(slurm, tmp_path / "job", **WITHOUT_MEMORY)
    urgent = slurm.submit("--partition=urgent", "--nodes=2", "--wrap", "true")
    running.wait_for_end(urgent, patient(60))
    shown = completed(running, job)
    assert shown["Restarts"] == "1"
    assert running.lost_steps() == 0
    assert running.losses() == undisturbed


def test_job_hands_over_before_its_limit_of_time_and_goes_on_after_it(
    tmp_path: Path, slurm: LocalSlurm, undisturbed: list[float]
) -> None:
    running, job = started(slurm, tmp_path / "job", **WITHOUT_MEMORY)
    # 5 minutes are left, as many as the script asks Slurm to announce; it looks every 30 s.
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=6")
    slurm.wait_until(lambda: slurm.job(job)["Restarts"] == "1", patient(120), "requeued job")
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    shown = completed(running, job)
    assert shown["Restarts"] == "1"
    assert running.lost_steps() == 0
    assert running.losses() == undisturbed


def test_job_whose_first_node_is_lost_begins_again_from_its_newest_checkpoint(
    tmp_path: Path, slurm: LocalSlurm, undisturbed: list[float]
) -> None:
    running = SlurmTraining(slurm, tmp_path / "job", every=5)
    # The node that is left waits so long for the coordinator, by default 600 s; so do both when
    # they start, until their workers are warm.
    job = running.submit(PET_RDZV_CONF="last_call_timeout=30,join_timeout=40")
    running.wait_for_step(AT_STEP, patient(120), world_size=2)
    slurm.lose_node("n1")
    slurm.wait_until(lambda: slurm.job(job)["Restarts"] == "1", patient(480), "requeued job")
    slurm.start_node("n1")
    shown = completed(running, job)
    assert shown["Restarts"] == "1"
    assert 0 < running.lost_steps() <= 10
    assert running.losses() == undisturbed


def test_job_of_three_nodes_goes_on_without_the_first_one(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    with LocalSlurm(tmp_path / "slurm", ("n1", "n2", "n3")) as slurm:
        running = SlurmTraining(slurm, tmp_path / "job")
        job = running.submit("--nodes=3", NODES="1:3")
        running.wait_for_step(AT_STEP, patient(120), world_size=3)
        slurm.lose_node("n1")
        running.wait_for_step(AT_STEP + 3, patient(60), world_size=2)
        slurm.wait_until(lambda: slurm.job(job)["NumNodes"] == "2", patient(60), "lost node")
        running.hurry()
        # Slurm has lost the script that would say how the job has ended.
        assert running.wait_for_end(job, patient(180))["JobState"] == "CANCELLED"
        assert running.lost_steps() <= 1
        assert running.losses() == pytest.approx(undisturbed, rel=1e-4)


def test_cancelled_job_stores_its_last_step_and_is_not_started_again(
    tmp_path: Path, slurm: LocalSlurm
) -> None:
    running, job = started(slurm, tmp_path / "job")
    slurm.call("scancel", job)
    shown = running.wait_for_end(job, patient(60))
    assert shown["JobState"] == "CANCELLED"
    last = max(line["step"] for line in running.lines())
    assert f"step {last:.0f} is stored in {tmp_path}/job/checkpoints" in running.output()


def test_job_whose_script_raises_fails_and_is_not_started_again(
    tmp_path: Path, slurm: LocalSlurm
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise RuntimeError('no such data')\n")
    running = SlurmTraining(slurm, tmp_path / "job")
    running.command = [str(script)]
    shown = running.wait_for_end(running.submit(), patient(120))
    assert (shown["JobState"], shown["ExitCode"], shown["Restarts"]) == ("FAILED", "1:0", "0")
    assert "no such data" in running.output()


def test_agent_that_is_killed_again_and_again_is_not_started_for_ever(
    tmp_path: Path, slurm: LocalSlurm
) -> None:
    running, job = started(slurm, tmp_path / "job")
    killed: set[int] = set()

    def has_new_agent() -> bool:
        return any(agent.pid not in killed for agent in running.agents("n2"))

    for _ in range(5):
        slurm.wait_until(has_new_agent, patient(60), "agent on n2 again")
        agent = running.agent("n2")
        killed.add(agent.pid)
        agent.kill()
    completed(running, job)
    assert not has_new_agent()
