"""Claims about a real job under a short schedule of faults; `ops/bench/chaos.py` has long ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KINDS = ("worker_kill", "node_kill", "member_kill", "objects_torn")


# On a loaded machine the job takes minutes; what is too slow is decided by the campaign itself.
@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_job_survives_a_schedule_of_faults_with_every_sample_and_loss(tmp_path: Path) -> None:
    options = [f"--kind={kind}" for kind in KINDS]
    command = [
        sys.executable, str(ROOT / "ops" / "bench" / "chaos.py"), "--json", "--seed", "5",
        "--faults", str(len(KINDS)), "--lease-ttl", "15", "--keep", str(tmp_path), *options,
    ]  # fmt: skip
    campaign = subprocess.run(command, capture_output=True, text=True, check=False)
    assert campaign.returncode == 0, (campaign.stdout[-4000:], campaign.stderr[-8000:])
    outcome = json.loads(campaign.stdout.splitlines()[-1])
    assert outcome["failed"] == 0
    (seed,) = outcome["seeds"]
    assert seed["recoveries"] == len(KINDS)
    assert set(seed["faults"]) == set(KINDS)
    # Seed 5 has a job of one world size, so every loss is compared bit by bit.
    assert seed["losses"]["bit_equal"] > 0
    assert seed["losses"]["close"] == 0
