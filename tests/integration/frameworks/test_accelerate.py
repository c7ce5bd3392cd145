"""Claims about loops written for Accelerate under keepstep: processes and nodes are lost."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.elastic.errors import UsageError
from tests.integration.frameworks.framework_jobs import check, run_and_kill, run_undisturbed

accelerate = pytest.importorskip("accelerate")

SCRIPT = "accelerate_loop.py"


@pytest.mark.frameworks
@pytest.mark.parametrize(
    "layout", [{}, {"fsdp2": {"cpu_ram_efficient_loading": True}}], ids=["DDP", "FSDP2"]
)
def test_loop_that_loses_a_worker_and_a_node_computes_the_same_losses(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Its learning rate, and what is registered with Accelerate, are restored."""
    undisturbed = run_undisturbed(SCRIPT, tmp_path / "undisturbed", epochs=25, **layout)
    disturbed = run_and_kill(SCRIPT, tmp_path / "disturbed", epochs=25, **layout)
    check(disturbed, undisturbed)
    assert max(undisturbed) == 100
    for step, ranks in disturbed.items():
        for line in ranks.values():
            assert line["rate"] == undisturbed[step][0]["rate"]
            assert line["counted"] == 16 * step


def test_engines_and_other_numbers_of_models_are_refused() -> None:
    import torch

    from keepstep.integrations.accelerate import attach

    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(UsageError, match="has prepared 0 models"):
        attach(accelerator)
    accelerator.prepare(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    with pytest.raises(UsageError, match="has prepared 2 models"):
        attach(accelerator)
    with pytest.raises(UsageError, match="an engine of its own"):
        attach(SimpleNamespace(distributed_type=accelerate.DistributedType.DEEPSPEED))
