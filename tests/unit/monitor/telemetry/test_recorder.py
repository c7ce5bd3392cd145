"""Claims about recorded steps and phases, with real loops in this process.

Operations are tested in tests/integration/monitor.
"""

import gc
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from keepstep import monitor
from keepstep.monitor.errors import RecorderUnavailable
from keepstep.monitor.records import Communicator, Kind, Measure, Phase
from keepstep.monitor.telemetry import native
from keepstep.monitor.telemetry.attachment import is_of_communication
from keepstep.monitor.telemetry.native import NativeRecorder, build, library_path
from keepstep.monitor.telemetry.phases import AutomaticPhases
from keepstep.monitor.telemetry.recorder import Recorder
from keepstep.monitor.telemetry.ring import WorkerIdentity
from keepstep.monitor.telemetry.ring_reader import Records, RingReader


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setenv("KEEPSTEP_MONITOR_DIR", str(tmp_path / "rings"))
    return Recorder(WorkerIdentity("job", 0, "here"), None)


@pytest.fixture
def watched(recorder: Recorder) -> Iterator[Recorder]:
    gc.disable()
    phases = AutomaticPhases(recorder)
    yield recorder
    phases.remove()
    gc.enable()


def marks(recorder: Recorder) -> Records:
    return RingReader(recorder.ring.path).marks.last(1000)


def phases_of(recorder: Recorder) -> list[tuple[str, int]]:
    return [
        (Phase(mark["code"]).name, int(mark["step"]))
        for mark in marks(recorder)
        if mark["kind"] == Kind.PHASE
    ]


def train(*optimizers: torch.optim.Optimizer, model: torch.nn.Module, batches: int = 1) -> None:
    for _ in range(batches):
        model(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    return model, torch.optim.SGD(model.parameters())


def test_step_consists_of_its_phases(watched: Recorder) -> None:
    model, optimizer = parts()
    train(optimizer, model=model)
    train(optimizer, model=model)
    names = ["STEP", "FORWARD", "BACKWARD", "OPTIMIZER"]
    assert phases_of(watched) == [(name, step) for step in (1, 2) for name in names]
    records = marks(watched)
    assert (records["ended_s"] >= records["enqueued_s"]).all()
    assert records["ended_s"][0] == records["enqueued_s"][4]


def test_accumulated_batches_belong_to_one_step(watched: Recorder) -> None:
    model, optimizer = parts()
    train(optimizer, model=model, batches=3)
    assert phases_of(watched) == [
        ("STEP", 1),
        *3 * [("FORWARD", 1), ("BACKWARD", 1)],
        ("OPTIMIZER", 1),
    ]


def test_step_with_several_optimizers_ends_with_the_last(watched: Recorder) -> None:
    model, optimizer = parts()
    other = torch.optim.SGD(model.parameters())
    train(optimizer, other, model=model)
    assert phases_of(watched)[-2:] == [("OPTIMIZER", 1), ("OPTIMIZER", 1)]
    records = marks(watched)
    assert records["ended_s"][0] >= records["ended_s"][-1]
    train(optimizer, other, model=model)
    assert watched.step == 2


def test_recomputed_activations_are_not_a_forward_pass(watched: Recorder) -> None:
    model, _ = parts()
    checkpointed = torch.utils.checkpoint.checkpoint(
        model, torch.ones(1, 2, requires_grad=True), use_reentrant=False
    )
    assert checkpointed is not None
    checkpointed.sum().backward()
    assert phases_of(watched) == [("STEP", 1), ("FORWARD", 1), ("BACKWARD", 1)]


def test_call_without_gradients_is_an_evaluation_and_begins_no_step(
    watched: Recorder,
) -> None:
    model, optimizer = parts()
    train(optimizer, model=model)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(1, 2))
    assert phases_of(watched)[4:] == [("EVALUATION", 1)]
    assert marks(watched)["ended_s"][-1] == 0
    train(optimizer, model=model)
    assert phases_of(watched)[5:] == [
        ("STEP", 2),
        ("FORWARD", 2),
        ("BACKWARD", 2),
        ("OPTIMIZER", 2),
    ]
    assert (marks(watched)["ended_s"] > 0).all()


def test_each_call_in_an_evaluation_is_recorded_as_progress(
    watched: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = parts()
    monkeypatch.setattr("keepstep.monitor.telemetry.phases._HEARTBEAT_S", 0.0)

    def fails(*_: object) -> None:
        raise ValueError("no such token")

    with torch.no_grad():
        model(torch.ones(1, 2))
        failing = model.register_forward_pre_hook(fails)
        with pytest.raises(ValueError, match="no such token"):
            model(torch.ones(1, 2))
        failing.remove()
        model(torch.ones(1, 2))
    # One for each call by the loop, independent of its submodules and of how it ended.
    assert phases_of(watched) == [("EVALUATION", 0)] * 3
    assert not model._forward_hooks


def test_evaluation_continues_between_its_batches_and_after_the_last(watched: Recorder) -> None:
    model, optimizer = parts()
    train(optimizer, model=model)
    with torch.no_grad():
        for batch in torch.utils.data.DataLoader(list(torch.ones(2, 2)), batch_size=1):
            model(batch)
    names = [name for name, _ in phases_of(watched)[4:]]
    assert names == [
        "STEP",
        "DATA_WAIT",
        "EVALUATION",
        "DATA_WAIT",
        "EVALUATION",
        "DATA_WAIT",
        "EVALUATION",
    ]
    train(optimizer, model=model)
    assert phases_of(watched)[11:] == [("FORWARD", 2), ("BACKWARD", 2), ("OPTIMIZER", 2)]


def test_open_phase_is_recorded_as_open(watched: Recorder) -> None:
    model, optimizer = parts()
    seen: list[list[tuple[int, bool]]] = []

    def look(*_: object) -> None:
        seen.append([(int(mark["code"]), bool(mark["ended_s"] > 0)) for mark in marks(watched)])

    model[0].register_full_backward_hook(look)  # type: ignore[index]
    train(optimizer, model=model)
    assert seen == [[(Phase.STEP, False), (Phase.FORWARD, True), (Phase.BACKWARD, False)]]


def test_failed_backward_pass_has_an_end(watched: Recorder) -> None:
    with pytest.raises(RuntimeError, match="grad"):
        torch.ones(1).sum().backward()
    assert marks(watched)["ended_s"][-1] > 0
    assert phases_of(watched)[-1] == ("BACKWARD", 1)


def test_phases_of_other_threads_are_not_recorded(watched: Recorder) -> None:
    model, _ = parts()
    thread = threading.Thread(target=lambda: train(model=model))
    thread.start()
    thread.join()
    assert phases_of(watched) == []


def test_collections_of_the_oldest_generation_are_recorded(
    watched: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a loaded machine any collection may take a millisecond.
    monkeypatch.setattr("keepstep.monitor.telemetry.phases._SHORT_COLLECTION_S", 60.0)
    gc.collect(0)
    gc.collect(2)
    assert phases_of(watched) == [("GARBAGE_COLLECTION", 0)]


def test_hooks_are_removed_completely(recorder: Recorder) -> None:
    from torch.nn.modules.module import _global_forward_pre_hooks
    from torch.utils.data import dataloader

    def places() -> list[object]:
        return [
            torch.autograd.backward,
            torch.save,
            dataloader._BaseDataLoaderIter.__next__,
            list(gc.callbacks),
        ]

    before = places()
    hooks = len(_global_forward_pre_hooks)
    phases = AutomaticPhases(recorder)
    assert places() != before
    phases.remove()
    assert places() == before
    assert len(_global_forward_pre_hooks) == hooks
    model, optimizer = parts()
    train(optimizer, model=model)
    assert phases_of(recorder) == []


def test_steps_have_the_numbers_given_by_the_loop(watched: Recorder) -> None:
    model, optimizer = parts()
    watched.begin_step(1001)
    train(optimizer, model=model)
    train(optimizer, model=model)
    assert watched.step == 1001
    watched.begin_step()
    assert watched.step == 1002
    records = marks(watched)
    steps = records[records["code"] == Phase.STEP]
    assert steps["number"].tolist() == [1001, 1002]
    assert steps["ended_s"].tolist() == [steps["enqueued_s"][1], 0.0]


def test_no_step_is_open_between_steps(watched: Recorder) -> None:
    watched.begin_step(1)
    watched.end_step()
    ended_s = marks(watched)["ended_s"][-1]
    assert ended_s > 0
    watched.end_step()
    watched.begin_step(2)
    records = marks(watched)
    assert records["ended_s"].tolist() == [ended_s, 0.0]
    assert records["number"].tolist() == [1, 2]


def test_measures_keep_every_bit(recorder: Recorder) -> None:
    for value in (0.1, float("inf"), -0.0, float(2**32 - 1)):
        recorder.measure(Measure.GRADIENT_NORM, value)
    recorder.measure(Measure.LOSS, float("nan"))
    records = marks(recorder)["nbytes"].view(np.float64)
    assert records[:4].tolist() == [0.1, float("inf"), 0.0, 2**32 - 1]
    assert struct.pack("<d", records[2]) == struct.pack("<d", -0.0)
    assert np.isnan(records[4])


def test_marks_do_nothing_without_an_attached_recorder() -> None:
    with monitor.phase(Phase.CHECKPOINT):
        monitor.measure(Measure.LOSS, 1.0)
        monitor.begin_step()
        monitor.end_step()


def test_communicators_identity_depends_on_name_and_order_of_ranks() -> None:
    groups = [
        ("0", (0, 1)),
        ("1", (0, 1)),
        ("0", (1, 0)),
        ("0", (0, 1, 2)),
        ("00", (1,)),
        ("0", (1,)),
    ]
    assert len({Communicator.of(name, ranks).identity for name, ranks in groups}) == len(groups)
    assert Communicator.of("0", (0, 1)) == Communicator.of("0", [0, 1])


@pytest.mark.parametrize("compiler", ["false", "/no/such/compiler"])
def test_error_without_a_compiler_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("KEEPSTEP_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(RecorderUnavailable, match="cannot be built"):
        NativeRecorder()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RecorderUnavailable, match="Install g"):
        NativeRecorder()


def test_library_that_others_may_write_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSTEP_CACHE_DIR", str(tmp_path))
    library_path().write_bytes(b"")
    library_path().chmod(0o666)
    with pytest.raises(RecorderUnavailable, match="written by other users"):
        NativeRecorder()


def test_recorder_is_not_loaded_from_a_directory_that_others_may_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSTEP_CACHE_DIR", str(tmp_path))
    library_path().touch(mode=0o700)
    assert build() == library_path()
    tmp_path.chmod(0o777)
    with pytest.raises(RecorderUnavailable, match="written by other users"):
        build()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_recorder_of_another_user_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSTEP_CACHE_DIR", str(tmp_path))
    library_path().touch(mode=0o700)
    for path in (library_path(), tmp_path):
        os.chown(path, 12345, 12345)
        with pytest.raises(RecorderUnavailable, match="owner 12345"):
            build()
        os.chown(path, 0, 0)


def test_building_truncates_no_file_that_a_link_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("content")
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("KEEPSTEP_CACHE_DIR", str(cache))
    library_path().with_suffix(".lock").symlink_to(precious)
    with pytest.raises(RecorderUnavailable, match="cannot be built"):
        build()
    assert precious.read_text() == "content"


def test_recorder_that_was_built_with_a_generous_umask_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSTEP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_compile", lambda target: target.touch(mode=0o666))
    umask = os.umask(0)
    try:
        assert build().exists()
    finally:
        os.umask(umask)


def test_failure_of_communication_is_distinguished_from_other_errors() -> None:
    closed = RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    )
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = closed
    assert all(
        map(is_of_communication, (closed, wrapped, dist.DistNetworkError("the store is gone")))
    )
    assert not any(
        map(
            is_of_communication,
            (ValueError("no such batch"), RuntimeError("CUDA error: out of memory")),
        )
    )
