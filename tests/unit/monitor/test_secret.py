"""Claims about the job's secret of a monitor: whose file it is, and who may read it."""

import os
from pathlib import Path

import pytest

from keepstep.monitor.errors import MonitorError
from keepstep.monitor.secret import job_secret


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KEEPSTEP_SECRET", raising=False)
    return tmp_path


def test_each_job_of_a_user_has_a_secret_that_stays(runtime: Path) -> None:
    secret = job_secret("team/run7", None)
    assert job_secret("team/run7", None) == secret
    assert job_secret("run8", None) != secret


def test_file_comes_before_the_variable_and_that_before_the_users_own(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = runtime / "given"
    file.write_bytes(b"secret of the file \n")
    file.chmod(0o400)
    monkeypatch.setenv("KEEPSTEP_SECRET", "secret of the variable")
    assert job_secret("run7", file) == b"secret of the file"
    assert job_secret("run7", None) == b"secret of the variable"
    monkeypatch.setenv("KEEPSTEP_SECRET", "short")
    with pytest.raises(MonitorError, match="5 bytes"):
        job_secret("run7", None)


def test_directory_or_file_that_others_may_use_is_refused(runtime: Path) -> None:
    job_secret("run7", None)
    directory = runtime / "keepstep"
    directory.chmod(0o755)
    with pytest.raises(MonitorError, match="chmod 700"):
        job_secret("run7", None)
    directory.chmod(0o700)
    (directory / "monitor-run7.secret").chmod(0o644)
    with pytest.raises(MonitorError, match="chmod 600"):
        job_secret("run7", None)


def test_link_that_somebody_put_in_the_place_of_the_secret_is_refused(runtime: Path) -> None:
    (runtime / "target").write_bytes(b"known to the attacker")
    (runtime / "target").chmod(0o600)
    (runtime / "keepstep").mkdir(mode=0o700)
    (runtime / "keepstep" / "monitor-run7.secret").symlink_to(runtime / "target")
    with pytest.raises(MonitorError, match="is a link"):
        job_secret("run7", None)


def test_missing_file_is_named(runtime: Path) -> None:
    with pytest.raises(MonitorError, match=r"none\.secret: No such file"):
        job_secret("run7", runtime / "none.secret")


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_directory_of_another_user_is_refused(runtime: Path) -> None:
    (runtime / "keepstep").mkdir(mode=0o700)
    os.chown(runtime / "keepstep", 12345, 12345)
    with pytest.raises(MonitorError, match="owner 12345"):
        job_secret("run7", None)
