"""Claims about what torchrun's back end says before the first round."""

from __future__ import annotations

import logging
import sys

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from keepstep.elastic.torchrun.handler import create


def parameters(**options: str) -> RendezvousParameters:
    return RendezvousParameters("keepstep", "h:1", "run7", 1, 2, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "is_known"),
    [
        (["--rdzv-id", "run7", "--nproc-per-node", "2", "train.py"], {}, True),
        (["--epochs", "3"], {"nproc": "2"}, True),
        (["--epochs", "3"], {}, False),
    ],
    ids=["torchrun", "another program with nproc=", "another program"],
)
def test_unknown_number_of_workers_is_said_to_cost_what_is_kept_in_memory(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arguments: list[str],
    options: dict[str, str],
    is_known: bool,
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    with caplog.at_level(logging.WARNING, "keepstep"):
        assert create(parameters(**options)).get_run_id() == "run7"
    assert ("nothing is kept in memory" in caplog.text) == (not is_known)


def test_invalid_option_is_an_error_that_torchrun_shows() -> None:
    with pytest.raises(ValueError, match="parity=many: give a whole number of at least 0"):
        create(parameters(parity="many"))
