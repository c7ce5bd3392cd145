"""Claims about what a checkpoint says of itself: where it comes from, and its configuration."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, timedelta, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from keepstep import checkpoint
from keepstep.checkpoint.cli.ckpt import ckpt
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.live.provenance import provenance
from keepstep.checkpoint.live.tensors import LiveState
from keepstep.checkpoint.ranks import collective_plan
from keepstep.checkpoint.ranks.collective_plan import PlanCache, agree_on_save
from tests.adaptive_timeouts import patient
from tests.unit.checkpoint.thread_ranks import ThreadRanks

STATE = {"w": torch.arange(3.0)}
CONFIG = {
    "hidden": 64,
    "rope": {"theta": 1e4, "scaling": None},
    "tied": True,
    "limit": float("inf"),
}


def show(url: str, *options: str) -> str:
    done = CliRunner().invoke(ckpt, ["show", url, *options], catch_exceptions=False)
    return done.output


def test_provenance_has_versions_ranks_and_the_time_in_utc() -> None:
    now = datetime(2026, 11, 23, 7, 0, 5, 400, tzinfo=timezone(timedelta(hours=2)))
    assert provenance([torch.zeros(1)], world_size=8, now=now) == {
        "keepstep": version("keepstep"),
        "torch": torch.__version__,
        "world_size": 8,
        "saved_at": "2026-11-23T05:00:05+00:00",
    }


def test_rank_0_alone_says_where_a_state_comes_from() -> None:
    """So that the ranks agree, and its time is in no digest that they compare."""
    ranks = ThreadRanks(2)
    agreed = ranks.run(
        lambda rank: agree_on_save(
            lambda: LiveState((), {f"rank/{rank}": {}}), None, PlanCache(), ranks.group
        )
    )
    assert [set(own.documents) for own in agreed] == [{"rank/0", "provenance"}, {"rank/1"}]


@pytest.mark.parametrize("block", [True, False])
def test_configuration_and_provenance_are_stored_and_shown(tmp_path: Path, block: bool) -> None:
    url = str(tmp_path)
    before = datetime.now(UTC).replace(microsecond=0)
    with checkpoint.Saver() as saver:
        if block:
            checkpoint.save(url, STATE, step=1, config=CONFIG)
        else:
            saver.save(url, STATE, step=1, config=CONFIG).wait(timeout_s=patient(60))
    shown = json.loads(show(url, "--json"))
    assert shown["config"] == {**CONFIG, "limit": {"__float__": "Infinity"}}
    assert StoredCheckpoint.open(open_storage(url)).documents["config"] == CONFIG
    assert shown["provenance"]["world_size"] == 1
    assert before <= datetime.fromisoformat(shown["provenance"]["saved_at"]) <= datetime.now(UTC)
    text = show(url)
    assert '"theta": 10000.0' in text
    assert torch.__version__ in text


def test_without_a_configuration_there_is_no_such_document(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path), STATE, step=1)
    assert "config" not in StoredCheckpoint.open(open_storage(str(tmp_path))).documents
    assert json.loads(show(str(tmp_path), "--json"))["config"] is None
    assert "config" not in show(str(tmp_path))


@pytest.mark.parametrize("config", [object(), {1: 2}, {"dtype": torch.float32}, [{1, 2}]])
def test_a_configuration_that_is_not_json_is_refused(config: Any) -> None:
    with pytest.raises(LayoutMismatch, match=r"config: a .* cannot be stored"):
        checkpoint.save(f"memory://{uuid.uuid4().hex}", STATE, step=1, config=config)


def test_equal_states_do_not_differ_by_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        monkeypatch.setattr(collective_plan, "provenance", lambda *_, name=name, **__: {"by": name})
        checkpoint.save(str(tmp_path / name), STATE, step=1)
    done = CliRunner().invoke(ckpt, ["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert (done.exit_code, done.output[:6]) == (0, "equal:")
