"""Claims about the registration of jobs on this machine."""

import json
import os
from pathlib import Path

import pytest

from keepstep.elastic.errors import UsageError
from keepstep.elastic.store.address import Access, Address
from keepstep.elastic.store.local_jobs import local_jobs, registered
from keepstep.private_files import held_file, write_file

ALIVE = {"job": "run7", "store": "keepstep://127.0.0.1:1", "pid": os.getpid()}


def directory_of_jobs(base: Path) -> Path:
    for path in (base / "keepstep", base / "keepstep" / "jobs"):
        path.mkdir(mode=0o700)
    return base / "keepstep" / "jobs"


def test_a_job_is_listed_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    address = Address(("127.0.0.1:1",), Access.SECRET, tmp_path / "secret")
    with registered("team/run7", address):
        (entry,) = local_jobs()
        assert (entry.job, entry.address) == ("team/run7", address)
    assert local_jobs() == ()


def test_listing_jobs_needs_no_permission_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert local_jobs() == ()
    # The monitor's systemd unit may only read the user's runtime directory.
    assert list(tmp_path.iterdir()) == []
    jobs = directory_of_jobs(tmp_path)
    dead = {"job": "dead", "store": "etcd://127.0.0.1:1", "pid": 2**22 + 1}
    write_file(jobs / "dead.json", json.dumps(dead).encode())

    def refused(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refused)
    assert local_jobs() == ()


@pytest.mark.parametrize("place", ["keepstep", "keepstep/jobs"])
def test_directory_that_others_may_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory_of_jobs(tmp_path)
    (tmp_path / place).chmod(0o777)
    with pytest.raises(UsageError, match="chmod 700"):
        local_jobs()
    address = Address(("127.0.0.1:1",), Access.SECRET)
    with pytest.raises(UsageError, match="chmod 700"), registered("run7", address):
        pass


def test_directory_that_is_a_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    directory_of_jobs(tmp_path / "elsewhere")
    (tmp_path / "keepstep").symlink_to(tmp_path / "elsewhere" / "keepstep")
    with pytest.raises(UsageError, match="no directory of this user"):
        local_jobs()


def test_registration_that_others_could_write_or_that_is_a_link_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    jobs = directory_of_jobs(tmp_path)
    alive = json.dumps(ALIVE).encode()
    with held_file(jobs / "own.json", alive), held_file(tmp_path / "target", alive):
        assert [entry.job for entry in local_jobs()] == ["run7"]
        (jobs / "own.json").chmod(0o666)
        (jobs / "link.json").symlink_to(tmp_path / "target")
        write_file(jobs / "damaged.json", b"{}")
        assert local_jobs() == ()


def test_registration_of_an_agent_that_was_killed_is_removed_though_its_process_id_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container that is started again, the agent has the process id that it had before."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    jobs = directory_of_jobs(tmp_path)
    write_file(jobs / "run7.json", json.dumps(ALIVE).encode())
    address = Address(("127.0.0.1:1",), Access.SECRET)
    with registered("run7", address):
        assert [entry.job for entry in local_jobs()] == ["run7"]
        assert not (jobs / "run7.json").exists()
        with pytest.raises(UsageError, match="already runs"), registered("run7", address):
            pass
    assert local_jobs() == ()
