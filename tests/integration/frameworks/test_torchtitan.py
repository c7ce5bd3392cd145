"""Claims about torchtitan's Trainer under keepstep: processes and nodes are lost.

It is made for accelerators: `torchtitan_on_cpus` lets it run here, with gloo.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch

from keepstep import Packed, PackedRow
from keepstep.elastic.data.partitions import Partition
from keepstep.elastic.errors import UsageError
from tests.integration.frameworks.framework_jobs import (
    check,
    cluster,
    run_and_kill,
    run_undisturbed,
)
from tests.integration.job.jobs import (
    Lines,
    committed_in,
    committed_step_of,
    last_run_of_each_step,
    samples,
)

pytest.importorskip("torchtitan")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
STEPS = 60


def run_on_cpus(patch: pytest.MonkeyPatch) -> None:
    """Let jobs run torchtitan without accelerators."""
    patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE / "torchtitan_on_cpus"), str(ROOT)]))
    patch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_cpus(monkeypatch)


def titan(options: Mapping[str, Any]) -> list[str]:
    """Return the command line of torchtitan; an option's name is that of its flag."""
    flags = {"config": "small", "dump_folder": options["log"], **options}
    del flags["log"]
    if "pause_s" in flags:
        flags["metrics.pause_s"] = flags.pop("pause_s")
    return [
        *("-m", "torchtitan.train"),
        *("--module", "tests.integration.frameworks.torchtitan_configs"),
        *(text for name, value in flags.items() for text in words(name, value)),
    ]


def words(name: str, value: Any) -> list[str]:
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    with pytest.MonkeyPatch.context() as patch:
        run_on_cpus(patch)
        return run_undisturbed(
            titan, tmp_path_factory.mktemp("undisturbed"), **{"training.steps": STEPS}
        )


def test_trainer_that_loses_a_worker_and_a_node_computes_the_same_losses(
    tmp_path: Path, undisturbed: Lines
) -> None:
    """Its learning rates and its number of tokens are the same, too."""
    disturbed = run_and_kill(titan, tmp_path, **{"training.steps": STEPS})
    check(disturbed, undisturbed)
    assert max(undisturbed) == STEPS
    for step, ranks in disturbed.items():
        for line in ranks.values():
            assert line["metrics"] == undisturbed[step][0]["metrics"]
            assert line["metrics"]["n_tokens_seen"] == 16 * 16 * step


def test_ranks_of_tensor_parallelism_lose_a_worker_and_compute_the_same_losses(
    tmp_path: Path,
) -> None:
    options = {"training.steps": 20, "parallelism.tensor_parallel_degree": 2}
    undisturbed = run_undisturbed(titan, tmp_path / "undisturbed", **options)
    directory = tmp_path / "disturbed"
    with cluster(titan, directory, workers=2, nnodes="1:1", pause_s=0.6, **options) as running:
        running.start("a")
        running.wait_until(lambda view: committed_step_of(view) >= 3, 180)
        running.workers_of("a")[1].kill()
        view = running.wait_until(lambda view: committed_in(view, 2), 180)
        (directory / "log/hurry").touch()
        assert running.wait("a", 180) == 0, running.output()
    assert [recovery.source for recovery in view.history.recoveries] == ["start", "memory"]
    lines = last_run_of_each_step(directory)
    assert lines.keys() == undisturbed.keys()
    assert {line["generation"] for ranks in lines.values() for line in ranks.values()} == {1, 2}
    for step, ranks in lines.items():
        for rank, line in ranks.items():
            for name in ("loss", "samples", "metrics"):
                assert line[name] == undisturbed[step][rank][name], (step, rank, name)
        assert ranks[0]["samples"] == ranks[1]["samples"]


def test_node_that_joins_takes_part_and_no_step_is_computed_again(
    tmp_path: Path, undisturbed: Lines
) -> None:
    """The state between two snapshots is handed over when Trainer has begun to count a step."""
    options = {
        "training.steps": 30,
        "lr_scheduler.total_steps": STEPS,
        "checkpoint.snapshot_every": 100,
    }
    with cluster(
        titan, tmp_path, workers=1, nnodes="1:2", last_call_s=0.0, pause_s=0.6, **options
    ) as running:
        running.start("a")
        running.wait_until(lambda view: view.history.recoveries, 180)
        running.start("b")
        view = running.wait_until(lambda view: len(view.history.recoveries) == 2, 180)
        (tmp_path / "log/hurry").touch()
        assert [running.wait(node, 180) for node in ("a", "b")] == [0, 0], running.output()
    assert [recovery.world_size for recovery in view.history.recoveries] == [1, 2]
    assert "0 steps computed again" in running.output()
    lines = last_run_of_each_step(tmp_path)
    assert sorted(lines) == list(range(1, 31))
    for step, ranks in lines.items():
        expected = undisturbed[step]
        assert sorted(samples({step: ranks})) == sorted(samples({step: expected}))
        assert ranks[0]["metrics"] == expected[0]["metrics"]


def test_trainer_resumes_from_storage_and_leaves_weights_for_hugging_face(
    tmp_path: Path, undisturbed: Lines
) -> None:
    """A further job begins with these weights, which have learned the first batch."""
    folder = tmp_path / "checkpoint"
    options: dict[str, Any] = {
        "lr_scheduler.total_steps": STEPS,
        "checkpoint.enable": True,
        "checkpoint.folder": folder,
    }
    first = run_undisturbed(titan, tmp_path / "first", **options, **{"training.steps": 6})
    assert max(first) == 6
    options |= {
        "training.steps": 12,
        "checkpoint.last_save_in_hf": True,
        "checkpoint.last_save_model_only": True,
        # Only a new job would look for it.
        "checkpoint.initial_load_path": "/nowhere",
    }
    resumed = run_undisturbed(titan, tmp_path / "resumed", **options)
    assert sorted(resumed) == list(range(7, 13))
    for step, ranks in resumed.items():
        for rank, line in ranks.items():
            for name in ("loss", "samples", "metrics"):
                assert line[name] == undisturbed[step][rank][name], (step, rank, name)
    options = {
        "training.steps": 1,
        "checkpoint.enable": True,
        "checkpoint.initial_load_path": folder / "step-12",
        "checkpoint.initial_load_in_hf": True,
    }
    begun = run_undisturbed(titan, tmp_path / "begun", **options)
    assert begun[1][0]["samples"] == undisturbed[1][0]["samples"]
    assert float.fromhex(begun[1][0]["loss"]) < float.fromhex(undisturbed[1][0]["loss"]) - 0.1


def test_job_goes_on_after_a_checkpoint_of_torchtitans_own(tmp_path: Path) -> None:
    """Its steps count on, and its samples begin with the first one."""
    options = {"lr_scheduler.total_steps": 8, "checkpoint.folder": tmp_path / "checkpoint"}
    steps = {"training.steps": 4}
    run_undisturbed(titan, tmp_path / "own", config="own_manager", **options, **steps)
    steps = {"training.steps": 8}
    continued = run_undisturbed(
        titan, tmp_path / "continued", **options, **steps, **{"checkpoint.enable": True}
    )
    assert sorted(continued) == [5, 6, 7, 8]
    assert continued[5][0]["metrics"]["n_tokens_seen"] == 5 * 16 * 16


def refusal(loader: Any = None, **changed: Any) -> str:
    """Return why a checkpoint manager is refused; names are `part__option` of the config."""
    from keepstep.integrations.torchtitan.config_registry import llama3_debugmodel
    from keepstep.integrations.torchtitan.dataloader import KeepstepDataLoader

    config = llama3_debugmodel()
    for name, value in changed.items():
        part, _, option = name.partition("__")
        setattr(getattr(config, part), option, value)
    with pytest.raises(UsageError) as refused:
        config.checkpoint.build(
            dataloader=loader or object.__new__(KeepstepDataLoader),
            model_parts=[torch.nn.Linear(1, 1)],
            optimizers=None,
            lr_schedulers=None,
            states={"train_state": SimpleNamespace(config=config)},
            sd_adapter=None,
        )
    return str(refused.value)


def test_what_has_no_effect_or_was_not_tried_is_refused() -> None:
    assert "checkpoint.load_step=3 has no effect" in refusal(checkpoint__load_step=3)
    assert "async_mode='async' has no effect" in refusal(checkpoint__async_mode="async")
    assert "load_only=True has no effect" in refusal(checkpoint__load_only=True)
    assert "is for checkpoint.last_save_in_hf" in refusal(checkpoint__export_dtype="bfloat16")
    both = {"checkpoint__start_from": "/a", "checkpoint__initial_load_path": "/b"}
    assert "both say what the job begins from" in refusal(**both)
    assert "list has positions that hold for one number" in refusal(loader=[1])
    assert "give --training.global_batch_size" in refusal(training__global_batch_size=-1)
    assert "--training.disable_cuda_graphs" in refusal(training__disable_cuda_graphs=False)
    degree = refusal(parallelism__context_parallel_degree=2)
    assert "parallelism.context_parallel_degree=2 was not tried" in degree


def test_manager_that_is_closed_after_an_error_waits_for_no_step() -> None:
    """The others may not come to its end; the error of the script is what the agent reports."""
    from keepstep.integrations.torchtitan import KeepstepCheckpointManager

    manager = object.__new__(KeepstepCheckpointManager)
    attached = Mock()
    manager.enable, manager._attached, manager._config = True, attached, Mock(enable=False)
    error = ValueError("of the script")
    try:
        raise error
    except ValueError:
        manager.close()
    manager.close()
    assert attached.mock_calls == [call.end_if_lost(error)]
    manager._attached = attached
    manager.close()
    assert attached.mock_calls[1:] == [call.finish()]


def test_options_of_a_checkpoint_manager_are_kept_and_a_dataset_is_asked_for() -> None:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from keepstep.integrations.torchtitan import protected

    config = llama3_debugmodel()
    config.checkpoint.interval, config.checkpoint.async_mode = 17, "async"
    checkpoint = protected(config).checkpoint
    assert (checkpoint.interval, checkpoint.async_mode) == (17, "disabled")
    options = {"tokenizer": None, "seq_len": 8, "local_batch_size": 1}
    with pytest.raises(UsageError, match=r"give --dataloader\.dataset_path"):
        config.dataloader.build(**options)


def test_ranks_fit_if_the_global_batch_has_micro_batches_for_all() -> None:
    from keepstep.integrations.torchtitan.checkpointer import mesh_of
    from keepstep.integrations.torchtitan.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.training.global_batch_size, config.training.local_batch_size = 48, 4
    rule = mesh_of(config)
    assert [ranks for ranks in range(1, 20) if rule(ranks)] == [1, 2, 3, 4, 6, 12]
    config.parallelism.data_parallel_replicate_degree = 2
    rule = mesh_of(config)
    assert rule(6) == {"dp_replicate": 2, "dp_shard": 3, "tp": 1}
    assert rule(3) is None
    config.parallelism.tensor_parallel_degree = 2
    assert [ranks for ranks in range(1, 20) if mesh_of(config)(ranks)] == [4, 8, 12]


def test_no_document_predicts_the_next_one(tmp_path: Path) -> None:
    from torchtitan.components.loss import IGNORE_INDEX

    from keepstep.integrations.torchtitan.dataloader import collate

    packed = Packed([[1, 2, 3], [4, 5], [6, 7, 8, 9]], length=6)
    reader = packed.open_partition(Partition(number=0, count=1, key=0, shuffle=False), None)
    inputs, labels = collate([reader.read(), PackedRow(torch.arange(6), torch.zeros(6).long())])
    assert inputs["input"].tolist() == [[1, 2, 3, 4, 5], [0, 1, 2, 3, 4]]
    assert inputs["positions"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert labels.tolist() == [[2, 3, IGNORE_INDEX, 5, IGNORE_INDEX], [1, 2, 3, 4, 5]]
    inputs, labels = collate([[3, 4, 5], torch.tensor([6, 7, 8], dtype=torch.int32)])
    assert inputs["positions"].tolist() == [[0, 1]] * 2
    assert labels.tolist() == [[4, 5], [7, 8]]


def test_rows_of_a_file_share_the_token_between_them(tmp_path: Path) -> None:
    from keepstep.integrations.torchtitan.tokens import TokenFile

    path = str(tmp_path / "tokens.npy")
    np.save(path, np.arange(12, dtype=np.uint16))
    rows = TokenFile(path, 5)
    assert len(rows) == 2
    assert [rows[index].tolist() for index in range(2)] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    np.save(path, np.ones((2, 6)))
    with pytest.raises(UsageError, match="has float64 in 2 dimensions"):
        TokenFile(path, 5)
