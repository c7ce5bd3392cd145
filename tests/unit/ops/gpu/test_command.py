"""Claims about the command, with checks that need no GPU; each runs as it does for a user.

The command is a process of its own, since it kills whatever is below it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.adaptive_timeouts import patient

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
SCRIPT = """
import sys
from ops.gpu.check import Check
from ops.gpu.command import main
from ops.gpu.machine import Machine

machine = Machine(gpus=("a GPU",), kernel=sys.argv[1])
checks = [
    Check(id=f"G{number}", shows=name, module="tests.unit.ops.gpu.tiny_checks", function=name,
          limit_s=float(sys.argv[2]))
    for number, name in enumerate(sys.argv[4:])
]
checks.append(Check(id="N1", shows="several", module="nowhere", gpus=2))
sys.exit(main(["--json", *sys.argv[3].split()], checks, machine))
"""


def run(command: list[str], *, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    places = [str(ROOT), *([] if path is None else [str(path)])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(reversed(places)),
        # These tests are of machines without a GPU, wherever they run.
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, check=False
    )


def summary_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_tiny(
    *functions: str, options: str = "", written: Path = Path("/unused"), limit_s: float = 60.0
) -> tuple[int, list[dict[str, Any]], str]:
    """Run tiny checks; return the exit status, the outcomes and what was shown to a person."""
    done = run(["-c", SCRIPT, str(written), str(limit_s), options, *functions])
    return done.returncode, summary_of(done)["checks"], done.stderr


def test_without_a_gpu_nothing_is_run_and_nothing_has_failed() -> None:
    done = run(["-m", "ops.gpu", "--json"])
    assert done.returncode == 0, done.stderr
    summary = summary_of(done)
    assert (summary["passed"], summary["failed"], summary["not_run"]) == (0, 0, 22)
    assert {check["result"] for check in summary["checks"]} == {"not run"}
    assert {check["why"] for check in summary["checks"]} == {"no GPU"}
    assert all(f"\n{check['id']} " in done.stderr for check in summary["checks"])


def test_without_pytorch_nothing_is_run_and_nothing_has_failed(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('none here')")
    done = run(["-m", "ops.gpu", "--json"], path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {check["why"] for check in summary_of(done)["checks"]} == {"no PyTorch: none here"}


def test_checks_that_pass_and_that_cannot_be_run_make_no_failure() -> None:
    status, outcomes, shown = run_tiny("hold", "lack_something")
    assert status == 0
    assert [(outcome["result"], outcome["why"]) for outcome in outcomes] == [
        ("passed", ""),
        ("not run", "no compiler"),
        ("not run", "1 GPU, needs 2"),
    ]
    assert outcomes[0]["figures"] == {"gpus": 1}
    assert "1 passed, 0 failed, 2 not run" in shown


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("break_claim", "does not hold: this holds"),
        ("raise_error", "RuntimeError: the device is on fire"),
        ("missing", "AttributeError"),
    ],
)
def test_check_that_fails_fails_the_command_and_says_why(function: str, why: str) -> None:
    status, outcomes, shown = run_tiny(function, "hold")
    assert status == 1
    assert outcomes[0]["result"] == "failed"
    assert outcomes[0]["why"].startswith(why)
    assert why in shown
    assert outcomes[1]["result"] == "passed"


def test_failed_check_reports_figures_and_output() -> None:
    _, outcomes, _ = run_tiny("break_claim", "raise_error")
    assert outcomes[0]["figures"] == {"measured": 7}
    assert "printed before it was raised" in outcomes[1]["output"]


def test_hung_check_is_killed_with_its_descendants(tmp_path: Path) -> None:
    written = tmp_path / "orphan"
    status, outcomes, _ = run_tiny("hang", "hold", written=written, limit_s=patient(8.0))
    assert status == 1
    assert outcomes[0]["why"].startswith("not done within")
    assert outcomes[1]["result"] == "passed"
    with pytest.raises(ProcessLookupError):
        os.kill(int(written.read_text()), 0)


def test_check_that_cannot_end_in_time_is_not_begun() -> None:
    status, outcomes, _ = run_tiny("hold", options="--limit-s 59", limit_s=60.0)
    assert status == 0
    assert outcomes[0]["result"] == "not run"
    assert "--only G0" in outcomes[0]["why"]


def test_only_the_named_checks_are_run() -> None:
    _, outcomes, _ = run_tiny("raise_error", "hold", options="--only g1")
    assert [outcome["id"] for outcome in outcomes] == ["G1"]


def test_unknown_check_is_refused() -> None:
    done = run(["-m", "ops.gpu", "--only", "G99"])
    assert done.returncode == 2
    assert "no check G99" in done.stderr


RECORDED = """
from ops.gpu import runner
from ops.gpu.check import Check
from ops.gpu.machine import Machine

runner.build_recorder = lambda limit_s: print("built within", limit_s <= 90.0)
checks = [
    Check(id=f"G{number}", shows="holds", module="tests.unit.ops.gpu.tiny_checks", function="hold",
          recorder=number > 0)
    for number in range(3)
]
machine = Machine(gpus=("a GPU",))
for outcome in runner.run_checks(checks, machine, limit_s=90.0):
    print(outcome.id, outcome.result)
"""


def test_recorder_is_built_once_before_the_first_check_that_needs_it() -> None:
    done = run(["-c", RECORDED])
    assert done.stdout.splitlines() == [
        "G0 passed", "built within True", "G1 passed", "G2 passed"
    ]  # fmt: skip
