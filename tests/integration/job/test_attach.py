"""Claims about scripts that own their model and attach it: processes and nodes are lost."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.adaptive_timeouts import patient
from tests.integration.job.jobs import (
    Lines,
    committed_in,
    committed_step_of,
    last_run_of_each_step,
    made_once,
    samples,
)
from tests.patient_cluster import PatientCluster

SCRIPT = Path(__file__).parent / "attached.py"
EPOCHS = 25
STEPS = EPOCHS * 4


def cluster(
    directory: Path,
    *,
    workers: int = 2,
    nnodes: str = "1:2",
    last_call_s: float = 60.0,
    **options: Any,
) -> PatientCluster:
    (directory / "log").mkdir(parents=True, exist_ok=True)
    given = {"epochs": EPOCHS, "dropout": 0.1, "log": str(directory / "log"), **options}
    return PatientCluster(
        "job",
        [str(SCRIPT), json.dumps(given)],
        nnodes=nnodes,
        workers=workers,
        log=directory / "agents",
        last_call_s=last_call_s,
        spares=0,
    )


def run_undisturbed(directory: Path) -> None:
    with cluster(directory, workers=4, nnodes="1:1") as running:
        running.start("a")
        assert running.wait("a", 120) == 0, running.output()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return last_run_of_each_step(made_once(tmp_path_factory, "attached", run_undisturbed))


def test_lost_worker_and_then_a_lost_node_change_no_loss_and_no_sample(
    tmp_path: Path, undisturbed: Lines
) -> None:
    """Its shards, its average of the weights, its scaler and its generators are restored."""
    with cluster(tmp_path, pause_s=0.1) as running:
        running.start("a")
        running.start("b")
        before = running.wait_until(lambda view: committed_step_of(view) >= 6, 60)
        running.workers_of("b")[1].kill()
        view = running.wait_until(lambda view: committed_in(view, 2), 60)
        running.kill("b")
        assert running.wait("a", 120) == 0, running.output()
    recovery = view.history.recoveries[1]
    assert recovery.source == "memory"
    assert recovery.resumed_step >= committed_step_of(before)
    lines = last_run_of_each_step(tmp_path)
    assert samples(lines) == samples(undisturbed)
    computed_in = set()
    for step, ranks in lines.items():
        for rank, line in ranks.items():
            computed_in.add(line["generation"])
            assert line["scale"] == undisturbed[step][rank]["scale"]
            # Fewer ranks draw other numbers for their dropout.
            if line["world_size"] == 4:
                assert line["loss"] == undisturbed[step][rank]["loss"], (step, rank)
    assert computed_in == {1, 2, 3}
    # A lost peer is not the script's error.
    assert "Traceback" not in running.output()


@pytest.mark.parametrize("stop_at", [8, 10], ids=["after an epoch", "within an epoch"])
def test_script_that_resumes_from_storage_draws_the_same_random_numbers(
    tmp_path: Path, undisturbed: Lines, stop_at: int
) -> None:
    """A loader draws from the generators when it is iterated, which a resumed epoch does again."""
    options = {"checkpoint": str(tmp_path / "checkpoint"), "workers": 4, "nnodes": "1:1"}
    for part, steps in (("first", stop_at), ("second", stop_at + 3)):
        with cluster(tmp_path / part, **options, stop_at=steps) as running:
            running.start("a")
            assert running.wait("a", 120) == 0, running.output()
    resumed = last_run_of_each_step(tmp_path / "second")
    assert sorted(resumed) == [stop_at + 1, stop_at + 2, stop_at + 3]
    for step, ranks in resumed.items():
        for rank, line in ranks.items():
            assert line["loss"] == undisturbed[step][rank]["loss"], (step, rank)


def test_node_that_joins_takes_part_and_no_step_is_computed_again(
    tmp_path: Path, undisturbed: Lines
) -> None:
    """The last step is stored, though the script has destroyed its process groups before."""
    checkpoint = str(tmp_path / "checkpoint")
    with cluster(
        tmp_path, pause_s=0.5, last_call_s=0.0, checkpoint=checkpoint, dropout=0.0
    ) as running:
        running.start("a")
        running.wait_until(lambda view: committed_step_of(view) >= 2, 60)
        running.start("b")
        view = running.wait_until(lambda view: len(view.history.recoveries) == 2, 60)
        (tmp_path / "log/hurry").touch()
        assert [running.wait(node, 120) for node in ("a", "b")] == [0, 0], running.output()
    assert [recovery.world_size for recovery in view.history.recoveries] == [2, 4]
    assert "0 steps computed again" in running.output()
    (stored,) = list_steps(open_storage(checkpoint))
    assert stored.step == STEPS
    assert samples(last_run_of_each_step(tmp_path)) == samples(undisturbed)


GROUPS = """
import torch.distributed
torch.distributed.init_process_group("gloo")
"""

ALONE = """
import sys
import torch
import keepstep

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
training = keepstep.attach(model, optimizer)
assert training.restore() == 0
for inputs in training.batches(torch.eye(2).repeat(8, 1), 4):
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    training.step_done()
print(f"steps {training.steps}\\n", end="", flush=True)
training.finish()
"""


@pytest.mark.parametrize(
    ("launcher", "begins"),
    [((), ""), (("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), GROUPS)],
    ids=["python", "torchrun"],
)
def test_script_runs_without_keepstep_run_and_says_once_what_that_means(
    tmp_path: Path, launcher: tuple[str, ...], begins: str
) -> None:
    script = tmp_path / "alone.py"
    script.write_text(begins + ALONE)
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert set(done.stdout.split("\n")) == {"steps 4", ""}, done.stderr
    assert done.stderr.count("without recovery") == 1
