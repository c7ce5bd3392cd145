"""Claims about what is read from torchrun's command line."""

from __future__ import annotations

import sys

import pytest

from keepstep.elastic.torchrun.command_line import local_workers


@pytest.mark.parametrize(
    ("arguments", "workers"),
    [
        ("--rdzv-id run7 --nproc-per-node 4 train.py --rdzv-id other", 4),
        ("--rdzv_id=run7 --nproc_per_node=2 -m train", 2),
        ("--rdzv-id run7 train.py", 1),
        ("--rdzv-id other --nproc-per-node 4 train.py", None),
        ("--epochs 3", None),
        ("--rdzv-id run7 --nproc-per-node no-such-device train.py", None),
        ("", None),
    ],
)
def test_workers_are_known_where_torchrun_itself_was_called_for_the_job(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: str,
    workers: int | None,
) -> None:
    monkeypatch.setattr(sys, "argv", ["torchrun", *arguments.split()])
    assert local_workers("run7") == workers
    assert capfd.readouterr() == ("", "")


def test_workers_of_the_environment_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["torchrun", "--rdzv-id", "run7", "train.py"])
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    assert local_workers("run7") == 3
