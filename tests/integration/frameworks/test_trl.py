"""Claims about TRL's trainers under keepstep: processes and nodes are lost.

It was tried with trl 1.16 and datasets 5.2, in an environment of the extra `trl`.
"""

from pathlib import Path

import pytest

from tests.integration.frameworks.framework_jobs import check, run_and_kill, run_undisturbed

pytest.importorskip("trl", reason="TRL is not installed: pip install '.[trl]'")

SCRIPT = "trl_trainer.py"


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_trainer_that_loses_a_worker_and_a_node_computes_the_same_losses(
    tmp_path: Path, trainer: str
) -> None:
    options = {"epochs": 6, "trainer": trainer}
    undisturbed = run_undisturbed(SCRIPT, tmp_path / "undisturbed", **options)
    check(run_and_kill(SCRIPT, tmp_path / "disturbed", **options), undisturbed)
