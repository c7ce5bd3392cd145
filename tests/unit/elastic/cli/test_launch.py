"""Claims about what `keepstep run` checks before it starts anything."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from keepstep.checkpoint.snapshot.isal import isal
from keepstep.elastic.cli import launch
from keepstep.elastic.cli.main import main


@pytest.fixture
def _without_isal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def no_package(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    isal.cache_clear()
    monkeypatch.setattr(importlib.metadata, "files", no_package)
    monkeypatch.setattr(ctypes.util, "find_library", lambda _: None)
    yield
    isal.cache_clear()


@pytest.mark.usefixtures("_without_isal")
@pytest.mark.parametrize("parity", [0, 1])
def test_a_job_with_parity_does_not_begin_without_the_library_that_computes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parity: int
) -> None:
    started: list[int] = []

    async def start(options: object, command: object, policy: object, *_: object) -> int:
        started.append(parity)
        return 0

    monkeypatch.setattr(launch, "_launch", start)
    (tmp_path / "train.py").touch()
    done = CliRunner().invoke(main, ["run", f"--parity={parity}", str(tmp_path / "train.py")])
    if parity:
        assert "install pyeclib from its wheel" in done.output
        assert (done.exit_code, started) == (1, [])
    else:
        assert (done.exit_code, started) == (0, [0])


@pytest.mark.parametrize(
    "option",
    [
        "--lease-ttl=0", "--drain-timeout=-1", "--abort-timeout=-1", "--grace=-0.5", "--spares=-1",
        "--max-restarts=-1", "--parity=-1", "--group-size=0",
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_meant_are_refused(tmp_path: Path, option: str) -> None:
    done = CliRunner().invoke(main, ["run", option, str(tmp_path / "train.py")])
    assert done.exit_code == 2
    assert "is not in the range" in done.output
