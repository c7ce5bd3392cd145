"""Claims about data through failures; `ops/bench/data.py` plays more schedules, and kills more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ops.bench.data_kinds import KINDS

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(1200)
def test_no_sample_is_lost_or_repeated_and_gradients_of_uneven_shares_are_exact() -> None:
    command = [sys.executable, str(ROOT / "ops" / "bench" / "data.py"), "--json", "--quick"]
    played = subprocess.run(command, capture_output=True, text=True, check=False)
    assert played.returncode == 0, (played.stdout[-2000:], played.stderr[-6000:])
    results = json.loads(played.stdout.splitlines()[-1])
    assert set(results) == set(KINDS)
    assert sum(result["kills"] for result in results.values()) == 2
    for kind, result in results.items():
        assert result["schedules"] == 2
        assert (result["missing"], result["repeated"], result["out_of_order"]) == (0, 0, 0), kind
        assert result["gradient_error"] < 1e-12, kind
