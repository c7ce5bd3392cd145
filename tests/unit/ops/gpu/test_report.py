"""Claims about the table and the JSON of the outcomes."""

import json

from ops.gpu.check import Outcome, Result
from ops.gpu.machine import Machine
from ops.gpu.report import summary, table

MACHINE = Machine(gpus=("GPU one", "GPU two"), torch="2.13.0", cuda="13.0", nccl="2.29.7")
OUTCOMES = (
    Outcome(id="G1", shows="one", result=Result.PASSED, seconds=1.5, figures={"speed": 55.1}),
    Outcome(id="G2", shows="two", result=Result.FAILED, why="does not hold: " + "long " * 40),
    Outcome(id="N1", shows="three", result=Result.NOT_RUN, why="1 GPU, needs 2"),
)


def test_table_names_machine_results_reasons_and_figures() -> None:
    lines = table(MACHINE, OUTCOMES).splitlines()
    assert "NCCL 2.29.7" in lines[0]
    assert "GPU one, GPU two" in lines[0]
    assert [line.split()[:3] for line in lines if line[:1] in ("G", "N")] == [
        ["G1", "passed", "one"],
        ["G2", "failed", "two"],
        ["N1", "not", "run"],
    ]
    assert "figures: speed 55.1, took 1.5 s" in "\n".join(lines)
    assert "why: 1 GPU, needs 2" in "\n".join(lines)
    assert lines[-1] == "1 passed, 1 failed, 1 not run"
    assert max(len(line) for line in lines) <= 100


def test_summary_is_one_line_of_json_with_every_check() -> None:
    text = summary(MACHINE, OUTCOMES)
    assert "\n" not in text
    found = json.loads(text)
    assert (found["passed"], found["failed"], found["not_run"]) == (1, 1, 1)
    assert found["machine"]["gpus"] == ["GPU one", "GPU two"]
    assert [check["result"] for check in found["checks"]] == ["passed", "failed", "not run"]
