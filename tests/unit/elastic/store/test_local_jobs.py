"""Claims about the registration of jobs on this machine."""

import json
from pathlib import Path

import pytest

from keepstep.elastic.store.local_jobs import local_jobs, registered


def test_a_job_is_listed_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with registered("team/run7", "etcd://127.0.0.1:1"):
        (entry,) = local_jobs()
        assert (entry.job, entry.store) == ("team/run7", "etcd://127.0.0.1:1")
    assert local_jobs() == ()


def test_listing_jobs_needs_no_permission_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert local_jobs() == ()
    # The monitor's systemd unit may only read the user's runtime directory.
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "keepstep" / "jobs").mkdir(parents=True)
    dead = {"job": "dead", "store": "etcd://127.0.0.1:1", "pid": 2**22 + 1}
    (tmp_path / "keepstep" / "jobs" / "dead.json").write_text(json.dumps(dead))

    def refused(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refused)
    assert local_jobs() == ()
