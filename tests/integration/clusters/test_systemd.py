"""Claims about the units of ops/systemd: their form, and what a job survives as a service."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.adaptive_timeouts import patient
from tests.integration.clusters.systemd_service import UNITS, Service

SCRIPT = Path(__file__).parents[1] / "job" / "warm.py"
STEPS = 24


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_units_are_valid(tmp_path: Path) -> None:
    for unit in UNITS.glob("*.service"):
        # Its executable has to exist.
        text = unit.read_text().replace("/opt/keepstep/bin/keepstep", "/bin/true")
        (tmp_path / unit.name).write_text(text)
    paths = sorted(tmp_path.iterdir())
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *paths],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    # It exits with 0 in spite of settings that it does not know.
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.read_text())
    options = json.dumps({"way": "join", "directory": str(tmp_path)})
    made = Service(
        "keepstep",
        "run7",
        tmp_path / "machine",
        {
            "KEEPSTEP_SCRIPT": f"{script} '{options}'",
            "PET_SPARES": "0",
            "PET_KEEP_STATE": "10m",
            "OMP_NUM_THREADS": "1",
        },
    )
    (tmp_path / "slow").touch()
    yield made
    made.close()


def losses(directory: Path) -> dict[int, list[str]]:
    """Return the losses of each step, in the order in which it was computed."""
    found: dict[int, list[str]] = {}
    for path in sorted(directory.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        for line in map(json.loads, path.read_text().splitlines()):
            found.setdefault(line["step"], []).append(line["loss"])
    return found


def wait_for(condition: Callable[[], bool], service: Service) -> None:
    until_s = time.monotonic() + patient(60)
    while not condition():
        assert time.monotonic() < until_s, service.output()
        time.sleep(0.05)


@pytest.mark.clusters
def test_service_that_is_restarted_or_killed_goes_on_from_memory(
    tmp_path: Path, service: Service
) -> None:
    """`systemctl restart` is a stop and a start; a killed agent is started by systemd."""
    service.start()
    wait_for(lambda: max(losses(tmp_path), default=0) >= 13, service)
    status = service.stop()
    assert status == 143
    assert not service.restarts(status)
    (kept,) = service.processes()
    assert "snapshot server" in " ".join(kept.cmdline())
    reached = max(losses(tmp_path))
    service.start()
    wait_for(lambda: max(losses(tmp_path)) > reached + 1, service)
    assert f"found the state of step {reached}" in service.output()
    assert service.restarts(service.kill())
    # All others have ended by themselves.
    wait_for(lambda: len(service.processes()) == 1, service)
    (tmp_path / "slow").unlink()
    service.start()
    assert service.wait() == 0, service.output()
    wait_for(lambda: not service.processes(), service)
    computed = losses(tmp_path)
    assert sorted(computed) == list(range(1, STEPS + 1))
    assert all(len(set(values)) == 1 for values in computed.values())
    # After the restart none, and after the kill the one whose snapshot was not committed.
    assert sum(len(values) - 1 for values in computed.values()) <= 1


def test_service_is_started_again_while_the_coordinator_is_away_and_not_after_an_error(
    tmp_path: Path,
) -> None:
    service = Service(
        "keepstep", "run7", tmp_path, {"PET_STORE": "etcd://127.0.0.1:9", "KEEPSTEP_SCRIPT": "none"}
    )
    try:
        service.start()
        assert not service.restarts(service.wait()), service.output()
        assert "script none does not exist" in service.output()
        script = tmp_path / "train.py"
        script.touch()
        service._variables["KEEPSTEP_SCRIPT"] = str(script)
        service.start()
        assert service.restarts(service.wait()), service.output()
    finally:
        service.close()
