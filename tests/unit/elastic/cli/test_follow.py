"""Claims about how `keepstep status` and its like find a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.elastic.agent.node_name import own_node_name
from keepstep.elastic.cli.follow import JobAddress, find_job
from keepstep.elastic.errors import UsageError
from keepstep.elastic.store.address import parse_address
from keepstep.elastic.store.local_jobs import registered


def test_job_whose_coordinator_is_away_is_not_called_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    address = parse_address("keepstep://127.0.0.1:29400")
    with own_node_name("run"):
        with registered("run", address):
            assert find_job(None, "run") == JobAddress(address, "run")
        with pytest.raises(UsageError, match="not the one that serves its coordinator: run that"):
            find_job(None, "run")
        with pytest.raises(UsageError, match="no job named 'other'"):
            find_job(None, "other")
    with pytest.raises(UsageError, match="no job named 'run'"):
        find_job(None, "run")
