"""Claims about Hugging Face's Trainer under keepstep: processes and nodes are lost."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.elastic.errors import UsageError
from tests.integration.frameworks.framework_jobs import (
    check,
    cluster,
    run_and_kill,
    run_undisturbed,
)

transformers = pytest.importorskip("transformers")

SCRIPT = "hugging_face_trainer.py"
OPTIONS = {"epochs": 10, "dropout": 0.0}
FSDP2 = {"fsdp2": {"activation_checkpointing": True, "cpu_ram_efficient_loading": True}}
LAYOUTS = pytest.mark.parametrize(
    "layout",
    [pytest.param({}, id="DDP"), pytest.param(FSDP2, id="FSDP2", marks=pytest.mark.frameworks)],
)


@LAYOUTS
def test_trainer_that_loses_a_worker_and_a_node_computes_the_same_losses(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    """So does its learning rate, and its logs have each step once."""
    options = OPTIONS | layout
    undisturbed = run_undisturbed(SCRIPT, tmp_path / "undisturbed", **options)
    disturbed = run_and_kill(SCRIPT, tmp_path / "disturbed", **options)
    check(disturbed, undisturbed)
    for step, ranks in disturbed.items():
        for line in ranks.values():
            assert line["rate"] == undisturbed[step][0]["rate"]
            assert line["logged"] == list(range(1, step + 1))


@LAYOUTS
@pytest.mark.frameworks
def test_trainer_that_resumes_from_storage_goes_on_with_its_random_numbers(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    """The model drops activations at random; the first job ends after half of the epochs."""
    options = {"epochs": 4, "dropout": 0.1} | layout
    undisturbed = run_undisturbed(SCRIPT, tmp_path / "undisturbed", **options)
    checkpoint = str(tmp_path / "checkpoint")
    first = tmp_path / "first"
    # The schedule of learning rates is that of all epochs.
    halved = run_undisturbed(SCRIPT, first, **options, stop_at=8, checkpoint=checkpoint)
    assert max(halved) == 8
    resumed = run_undisturbed(SCRIPT, tmp_path / "resumed", **options, checkpoint=checkpoint)
    assert min(resumed) == 9
    for step, ranks in resumed.items():
        for rank, line in ranks.items():
            assert line["loss"] == undisturbed[step][rank]["loss"], (step, rank)


@LAYOUTS
@pytest.mark.frameworks
def test_folder_of_trainer_is_resumed_where_keepstep_has_nothing(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    options = {"epochs": 4, "dropout": 0.0, "output": str(tmp_path / "output")} | layout
    undisturbed = run_undisturbed(SCRIPT, tmp_path / "undisturbed", **options)
    run_undisturbed(SCRIPT, tmp_path / "first", **options, stop_at=6, save_steps=6)
    resumed = run_undisturbed(
        SCRIPT,
        tmp_path / "resumed",
        **options,
        resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-6"),
    )
    assert min(resumed) == 7
    for step, ranks in resumed.items():
        for rank, line in ranks.items():
            assert line["loss"] == undisturbed[step][rank]["loss"], (step, rank)


@pytest.mark.frameworks
def test_job_that_resumes_with_other_batches_is_refused(tmp_path: Path) -> None:
    options = {"epochs": 4, "dropout": 0.0, "checkpoint": str(tmp_path / "checkpoint")}
    run_undisturbed(SCRIPT, tmp_path / "first", **options, stop_at=6)
    with cluster(
        SCRIPT, tmp_path / "other", workers=2, nnodes="1:1", **options, global_batch=8
    ) as running:
        running.start("a")
        assert running.wait("a", 180) != 0
    assert "a step had 16 of 64 samples, and has 8 of 64 now" in running.output()


def test_what_has_no_position_or_another_order_is_refused(tmp_path: Path) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    from keepstep.integrations.transformers import KeepstepMixin

    class Protected(KeepstepMixin, Trainer):
        pass

    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1)
    model = torch.nn.Linear(1, 1)
    with pytest.raises(UsageError, match="an IterableDataset has no position"):
        Protected(model=model, args=arguments, train_dataset=Endless()).train()
    arguments.train_sampling_strategy = "group_by_length"
    with pytest.raises(UsageError, match="leave it at 'random'"):
        Protected(model=model, args=arguments, train_dataset=[1, 2]).train()
    arguments.train_sampling_strategy = "random"
    Protected.global_batch = 7
    arguments.gradient_accumulation_steps = 2
    with pytest.raises(UsageError, match="global_batch=7 is no multiple of"):
        Protected(model=model, args=arguments, train_dataset=[1, 2]).train()

    class Repeated(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler([1, 1])

    class ProtectedRepeated(KeepstepMixin, Repeated):
        pass

    with pytest.raises(UsageError, match=r"another one, by its _get_train_sampler\(\)"):
        ProtectedRepeated(model=model, args=arguments, train_dataset=[1, 2]).train()
    with pytest.raises(UsageError, match=r"Behind has KeepstepMixin behind Trainer.*protect noth"):
        type("Behind", (Trainer, KeepstepMixin), {})
