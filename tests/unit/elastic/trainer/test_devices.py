"""Claims about the device that a worker computes on."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.elastic.errors import DeviceUnavailable
from keepstep.elastic.trainer import devices
from keepstep.elastic.trainer.devices import DeviceType, bind, choose_device, device_type


@pytest.mark.parametrize(
    ("asked", "backend", "found", "chosen"),
    [
        (None, None, {}, "cpu"),
        (None, None, {"cuda_is_built": True}, "cpu"),
        (None, None, {"has_gpus": True}, "cpu"),
        (None, None, {"cuda_works": True, "cuda_is_built": True, "has_gpus": True}, "cuda"),
        ("cpu", None, {"cuda_works": True, "cuda_is_built": True, "has_gpus": True}, "cpu"),
        ("cpu", None, {"cuda_is_built": True, "has_gpus": True}, "cpu"),
        (None, "gloo", {}, "cpu"),
    ],
)
def test_gpus_are_used_where_there_are_any(
    asked: DeviceType | None, backend: str | None, found: dict[str, bool], chosen: str
) -> None:
    none: Any = {"cuda_works": False, "cuda_is_built": False, "has_gpus": False}
    assert choose_device(asked, backend, **{**none, **found}) == chosen


@pytest.mark.parametrize(
    ("asked", "backend", "found"),
    [
        # The driver has failed, or the environment names GPUs that are gone.
        (None, None, {"cuda_is_built": True, "has_gpus": True}),
        ("cuda", None, {}),
        ("cuda", None, {"cuda_is_built": True}),
        (None, "nccl", {}),
        (None, "cpu:gloo,cuda:nccl", {"cuda_is_built": True}),
    ],
)
def test_job_for_gpus_never_computes_on_cpus(
    asked: DeviceType | None, backend: str | None, found: dict[str, bool]
) -> None:
    none: Any = {"cuda_works": False, "cuda_is_built": False, "has_gpus": False}
    with pytest.raises(DeviceUnavailable, match="GPUs"):
        choose_device(asked, backend, **{**none, **found})


def test_gpus_are_those_that_the_environment_names_else_those_of_the_machine(
    tmp_path: Path,
) -> None:
    assert not devices._has_gpus({}, tmp_path)
    for name in ("nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert not devices._has_gpus({}, tmp_path)
    (tmp_path / "nvidia0").touch()
    assert devices._has_gpus({}, tmp_path)
    assert not devices._has_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
    assert not devices._has_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path)
    assert devices._has_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1"}, Path(os.devnull))


def test_named_gpus_that_pytorch_cannot_use_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceUnavailable, match='join with device="cpu"'):
        device_type(None, None)
    assert device_type("cpu", None) == "cpu"


def test_workers_never_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", bound.append)
    assert bind("cpu", 7) == torch.device("cpu")
    assert [bind("cuda", rank) for rank in (0, 1)] == bound
    assert bound == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(DeviceUnavailable, match="PyTorch sees 2"):
        bind("cuda", 2)
