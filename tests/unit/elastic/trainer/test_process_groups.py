"""Claims about leaving process groups where there are none."""

import pytest
import torch

from keepstep.elastic.errors import ProcessUnusable
from keepstep.elastic.trainer import process_groups
from keepstep.elastic.trainer.process_groups import ProcessGroups


def test_device_is_checked_also_where_creating_the_groups_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sick device may be why; the process would fail again in the next generation."""

    def refuse(device: torch.device) -> None:
        raise ProcessUnusable(f"{device} has failed", is_fault=True)

    monkeypatch.setattr(process_groups, "check_device", refuse)
    with pytest.raises(ProcessUnusable, match="has failed"):
        ProcessGroups("cpu").leave()


@pytest.mark.parametrize(
    ("backend", "awaits"),
    [(None, False), ("cpu:gloo,cuda:gloo", False), ("nccl", True), ("cpu:gloo,cuda:nccl", True)],
)
def test_abort_is_ordered_wherever_it_may_leave_garbage(backend: str | None, awaits: bool) -> None:
    assert ProcessGroups("cpu", backend).awaits_abort_order is awaits
