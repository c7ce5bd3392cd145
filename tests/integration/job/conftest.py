"""The environment of all tests with complete jobs."""

import pytest

from tests.integration.job.jobs import set_module_path


@pytest.fixture(autouse=True)
def example_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    set_module_path(monkeypatch)
