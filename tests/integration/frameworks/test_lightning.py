"""Claims about Lightning's Trainer under keepstep: processes and nodes are lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.elastic.errors import UsageError
from tests.adaptive_timeouts import patient
from tests.integration.frameworks.framework_jobs import (
    check,
    cluster,
    run_and_kill,
    run_undisturbed,
)
from tests.integration.job.jobs import last_run_of_each_step, samples

lightning = pytest.importorskip("lightning")
pytestmark = pytest.mark.frameworks

SCRIPT = "lightning_trainer.py"


@pytest.mark.parametrize(
    ("strategy", "validate_every"),
    [("ddp", 2), ("fsdp2", 4)],
)
def test_trainer_that_loses_a_worker_and_a_node_computes_the_same_losses(
    tmp_path: Path, strategy: str, validate_every: int
) -> None:
    """Its learning rates, which follow validation, are the same, and so are its random numbers."""
    options = {"epochs": 25, "dropout": 0.0, "strategy": strategy, "validate_every": validate_every}
    undisturbed = run_undisturbed(SCRIPT, tmp_path / "undisturbed", **options)
    disturbed = run_and_kill(SCRIPT, tmp_path / "disturbed", **options)
    check(disturbed, undisturbed)
    # Lightning does not handle the loss of another rank as an error.
    assert not (tmp_path / "disturbed/log/failed").exists()
    assert max(undisturbed) == 100
    assert undisturbed[100][0]["validated"] == list(
        range(validate_every // 2, 100, validate_every // 2)
    )
    for step, ranks in disturbed.items():
        for rank, line in ranks.items():
            if line["world_size"] == 2:
                assert line["drawn"] == undisturbed[step][rank]["drawn"]
            for name in ("rate", "validated", "epochs", "logged"):
                assert line[name] == undisturbed[step][0][name], (step, name)
            assert line["answers_notices"] == "keepstep.elastic.worker.script_signals"


def test_node_that_joins_takes_part_and_no_step_is_computed_again(tmp_path: Path) -> None:
    """The state between two snapshots is handed over, as Trainer's loops have it there."""
    options = {"epochs": 8, "dropout": 0.0, "strategy": "fsdp2", "validate_every": 4}
    undisturbed = run_undisturbed(SCRIPT, tmp_path / "undisturbed", **options)
    options["snapshot_every"] = 100
    directory = tmp_path / "joined"
    with cluster(
        SCRIPT, directory, workers=1, nnodes="1:2", last_call_s=0.0, pause_s=0.6, **options
    ) as running:
        running.start("a")
        running.wait_until(lambda view: view.history.recoveries, 180)
        running.start("b")
        view = running.wait_until(lambda view: len(view.history.recoveries) == 2, 180)
        (directory / "log/hurry").touch()
        assert [running.wait(node, 180) for node in ("a", "b")] == [0, 0], running.output()
    assert [recovery.world_size for recovery in view.history.recoveries] == [1, 2]
    assert "0 steps computed again" in running.output()
    lines = last_run_of_each_step(directory)
    assert lines.keys() == undisturbed.keys()
    for step, ranks in undisturbed.items():
        assert sorted(samples({step: lines[step]})) == sorted(samples({step: ranks}))
        for name in ("rate", "validated", "epochs", "logged"):
            assert lines[step][0][name] == ranks[0][name]


def test_trainer_that_resumes_from_storage_goes_on_with_its_random_numbers(tmp_path: Path) -> None:
    """The model, of which Lightning calls a part only, drops activations at random."""
    options = {
        "epochs": 4,
        "max_steps": 16,
        "dropout": 0.1,
        "strategy": "fsdp2",
        "validate_every": 4,
    }
    undisturbed = run_undisturbed(SCRIPT, tmp_path / "undisturbed", **options)
    options["checkpoint"] = str(tmp_path / "checkpoint")
    first = run_undisturbed(SCRIPT, tmp_path / "first", **options, stop_at=8)
    assert max(first) == 8
    resumed = run_undisturbed(SCRIPT, tmp_path / "resumed", **options)
    assert min(resumed) == 9
    for step, ranks in resumed.items():
        for rank, line in ranks.items():
            for name in ("loss", "rate", "validated", "epochs"):
                assert line[name] == undisturbed[step][rank][name], (step, rank, name)


ALONE = """
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from keepstep.elastic.errors import UsageError
from keepstep.integrations.lightning import KeepstepCallback, placement
from lightning.pytorch import Trainer

strategy, steps, batch, resumed, stored = sys.argv[1:]
dataset = range(64)
read = []


class Module(LightningModule):
    def configure_model(self):
        self.net = torch.nn.Linear(1, 1)
        if strategy:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, number):
        read.extend(batch.tolist())
        return self.net(batch[:, None].float()).square().mean()

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == int(steps)
        return torch.optim.SGD(self.parameters(), lr=1e-4, momentum=0.9)


protection = KeepstepCallback()
saves = ModelCheckpoint(Path(stored).parent, Path(stored).stem, every_n_train_steps=int(steps))
trainer = Trainer(
    **placement(), accelerator="cpu", strategy=ModelParallelStrategy(1, 1) if strategy else "auto",
    callbacks=[protection, saves], max_epochs=99, max_steps=int(steps), logger=False,
    enable_progress_bar=False, enable_model_summary=False,
)
try:
    trainer.fit(
        Module(), protection.loader(dataset, global_batch=int(batch)), ckpt_path=resumed or None
    )
except UsageError as refused:
    print(refused)
else:
    print(read)
"""


def run_alone(directory: Path, *arguments: str) -> str:
    script = directory / "alone.py"
    script.write_text(ALONE)
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_without_keepstep_the_loader_goes_on_where_lightnings_checkpoint_is(
    tmp_path: Path,
) -> None:
    """From the middle of an epoch, and from its end."""
    stored = [str(tmp_path / f"{number}.ckpt") for number in range(3)]
    read = [
        json.loads(run_alone(tmp_path, "", str(steps), "8", before, after))
        for steps, before, after in zip((3, 8, 20), ["", *stored[:2]], stored, strict=True)
    ]
    assert [len(samples) for samples in read] == [24, 40, 96]
    everything = [sample for samples in read for sample in samples]
    assert sorted(everything[:64]) == sorted(everything[64:128]) == list(range(64))
    assert everything[:64] != everything[64:128]
    refusal = run_alone(tmp_path, "", "9", "4", stored[0], stored[2])
    assert "change them between two epochs" in refusal


def test_checkpoint_that_lightning_reads_too_late_is_refused(tmp_path: Path) -> None:
    stored = str(tmp_path / "3.ckpt")
    run_alone(tmp_path, "model parallel", "3", "8", "", stored)
    refusal = run_alone(tmp_path, "model parallel", "5", "8", stored, stored)
    assert "reads ckpt_path" in refusal


def test_nodes_with_other_numbers_of_workers_have_no_placement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from keepstep.integrations.lightning import placement

    monkeypatch.setenv("WORLD_SIZE", "5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="as many workers on each node"):
        placement()
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert placement() == {"devices": 2, "num_nodes": 3}
    monkeypatch.delenv("WORLD_SIZE")
    assert placement() == {}
