"""Claims about how the library of the erasure code's kernels is found."""

from __future__ import annotations

import ctypes
import importlib.metadata

import pytest

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.snapshot import isal as isal_module

load = isal_module.isal.__wrapped__


def no_package(_: str) -> None:
    raise importlib.metadata.PackageNotFoundError("pyeclib")


def test_without_pyeclib_the_systems_library_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    bundled = isal_module.isal()._name
    monkeypatch.setattr(importlib.metadata, "files", no_package)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: asked.append(name) or bundled)
    assert load().gf_mul(3, 7) == 9
    assert asked == ["isal"]


def test_a_library_that_is_missing_or_broken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "files", no_package)
    monkeypatch.setattr(ctypes.util, "find_library", lambda _: None)
    with pytest.raises(CheckpointError, match="ISA-L, which computes parity, is not installed"):
        load()
    monkeypatch.setattr(ctypes.util, "find_library", lambda _: "/dev/null")
    with pytest.raises(CheckpointError, match=r"ISA-L cannot be loaded: .*; install pyeclib again"):
        load()
