"""The environment of all tests with complete jobs."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def example_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "examples")]))
