"""A telemetry ring in a directory of the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.monitor.telemetry.ring import (
    Ring,
)
from keepstep.monitor.telemetry.ring_files import (
    create_ring,
)
from tests.unit.monitor.telemetry.ring.rings import IDENTITY, SMALL


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "rings"
    monkeypatch.setenv("KEEPSTEP_MONITOR_DIR", str(place))
    return place


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = create_ring(IDENTITY, SMALL)
    yield made
    made.close()
