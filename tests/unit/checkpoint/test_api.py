"""Claims about loads: what a checkpoint's names mean does not depend on the rank."""

from __future__ import annotations

import uuid

import pytest
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint import api
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.layout.boxes import Json


def test_names_of_other_stages_count_for_what_a_checkpoints_names_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(url, {"model": nn.ModuleDict({"module": nn.Linear(1, 1)})}, step=1)
    checkpoint.load(url, {"model": nn.Linear(1, 1)})

    def gathered(message: Json) -> list[Json]:
        return [message, ["module.weight", "module.bias"]]

    monkeypatch.setattr(api, "all_gather_json", gathered)
    with pytest.raises(LayoutMismatch, match="weight: missing in the source"):
        checkpoint.load(url, {"model": nn.Linear(1, 1)})
