"""Claims about trackers: a job is one run of W&B, MLflow and TensorBoard, whatever fails in it.

A tracker that drops no step itself may have one twice, with the same loss.
"""

from __future__ import annotations

import json
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.frameworks.framework_jobs import cluster
from tests.integration.job.jobs import committed_step_of, set_module_path, step_of

mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
pytest.importorskip("wandb", reason="W&B is not installed")
pytest.importorskip("tensorboard", reason="TensorBoard is not installed")

pytestmark = pytest.mark.frameworks
STEPS = 24


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a job whose rank 0 is killed, and which is stopped and run again; return its records."""
    directory = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        runtime = directory / "run"
        runtime.mkdir(mode=0o700)
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        set_module_path(patch)
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_TRACKING_URI", f"file://{directory}/mlruns")
        with cluster(
            "tracked_loop.py", directory, workers=2, nnodes="1:1", steps=STEPS, killed_at=8
        ) as running:
            running.start("a", "--keep-state", "2m")
            running.wait_until(
                lambda view: view.generation_number == 2 and committed_step_of(view) >= 9, 180
            )
            running.terminate("a")
            assert running.wait("a", 180) == 128 + signal.SIGTERM, running.output()
            running.start("a", "--keep-state", "2m")
            running.wait_until(lambda view: step_of(view) >= 14, 180)
            (directory / "log/hurry").touch()
            assert running.wait("a", 180) == 0, running.output()
        assert "found the state of step" in running.output()
    return directory / "log"


def test_wandb_has_one_run_with_each_step(log: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    losses: dict[int, set[str]] = {}
    runs, folders = set(), sorted((log / "wandb").glob("offline-run-*"))
    for folder in folders:
        (path,) = folder.glob("*.wandb")
        for data in records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                runs.add(record.run.run_id)
            values = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            if "loss" in values:
                losses.setdefault(int(values["_step"]), set()).add(values["loss"])
    # One folder for each process that was rank 0; a server joins them by the id.
    assert len(folders) == 3
    (run,) = runs
    assert run.startswith("job-")
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert [step for step, values in losses.items() if len(values) > 1] == []


def records(data: bytes) -> Iterator[bytes]:
    """Return the records of W&B's file: a header, and blocks as in LevelDB's log."""
    header, size, payload = 7, 32768, b""
    at = header
    while at + header <= len(data):
        left = size - at % size
        if left < header:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        piece = data[at + header : at + header + length]
        at += header + length
        payload = piece if kind in (1, 2) else payload + piece
        # The last record of a process that was killed may be written in part.
        if kind in (1, 4) and len(piece) == length:
            yield payload


def test_mlflow_has_one_run_with_each_step(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(f"file://{log.parent}/mlruns")
    (run,) = client.search_runs(["0"])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "loop")
    losses: dict[int, set[float]] = {}
    for metric in client.get_metric_history(run.info.run_id, "loss"):
        losses.setdefault(metric.step, set()).add(metric.value)
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert [step for step, values in losses.items() if len(values) > 1] == []


def test_tensorboard_shows_each_step_once(log: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(log / "board"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, STEPS + 1))


def test_steps_were_computed_again(log: Path) -> None:
    """Else the other claims would say nothing."""
    steps = [int(line.split()[0]) for line in (log / "steps").read_text().splitlines()]
    assert len(steps) > len(set(steps)), json.dumps(steps)
