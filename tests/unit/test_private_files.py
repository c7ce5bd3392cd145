"""Claims about files and directories that only this user may use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.private_files import (
    NotPrivate,
    created_directory,
    held_file,
    is_held,
    own_secret,
    read_file,
    read_secret,
    run_directory,
    write_file,
)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    return created_directory(tmp_path / "private")


def test_secret_is_created_once_and_readable_by_its_owner_only(private: Path) -> None:
    path = private / "below" / "secret"
    secret = own_secret(path)
    assert len(secret) == 64
    assert own_secret(path) == secret
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def test_secret_of_a_faster_process_is_kept(private: Path) -> None:
    write_file(private / "secret", b"first" * 8)
    write_file(private / "secret", b"second" * 8, replace=False)
    assert read_secret(private / "secret") == b"first" * 8
    assert len(list(private.iterdir())) == 1


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_file_that_others_may_use_is_refused_with_the_remedy(private: Path, mode: int) -> None:
    path = private / "secret"
    write_file(path, b"x" * 32)
    path.chmod(mode)
    with pytest.raises(NotPrivate, match=f"chmod 600 {path}"):
        read_secret(path)


def test_link_is_followed_only_where_the_user_named_it(private: Path) -> None:
    write_file(private / "target", b"x" * 32)
    link = private / "secret"
    link.symlink_to(private / "target")
    with pytest.raises(NotPrivate, match="is a link"):
        own_secret(link)
    assert read_secret(link, follow_links=True) == b"x" * 32


def test_named_pipe_is_refused_without_waiting_for_a_writer(private: Path) -> None:
    os.mkfifo(private / "secret", 0o600)
    with pytest.raises(NotPrivate, match="no file of this user"):
        read_file(private / "secret")


def test_short_secret_is_refused_with_the_remedy(private: Path) -> None:
    write_file(private / "secret", b"  guess  \n")
    with pytest.raises(NotPrivate, match=r"5 bytes.*openssl rand -hex 32"):
        read_secret(private / "secret")


def test_reading_takes_a_bounded_amount_of_memory(private: Path) -> None:
    with (private / "large").open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.truncate(1 << 30)
    assert len(read_file(private / "large")) == 1 << 16


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_file_or_directory_of_another_user_is_refused(private: Path) -> None:
    write_file(private / "secret", b"x" * 32)
    os.chown(private / "secret", 12345, 12345)
    for follow_links in (False, True):
        with pytest.raises(NotPrivate, match="owner 12345"):
            read_secret(private / "secret", follow_links=follow_links)
    os.chown(private, 12345, 12345)
    with pytest.raises(NotPrivate, match="owner 12345"):
        created_directory(private)


def test_directory_that_others_may_enter_is_refused(private: Path) -> None:
    private.chmod(0o711)
    with pytest.raises(NotPrivate, match="chmod 700"):
        created_directory(private)


def test_file_is_held_while_its_process_lives(private: Path) -> None:
    path = private / "job.json"
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from keepstep.private_files import held_file\n"
        "with held_file(Path(sys.argv[1]), b'{}'):\n"
        "    print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert is_held(path)
        assert read_file(path) == b"{}"
        other.kill()
        other.wait()
    assert path.exists()
    assert not is_held(path)
    with held_file(path, b"own"):
        assert is_held(path)
        assert read_file(path) == b"own"
    assert list(private.iterdir()) == []


def test_run_directory_of_a_killed_process_is_removed_and_that_of_a_living_one_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    code = (
        "from keepstep.private_files import run_directory\n"
        "with run_directory() as path:\n"
        "    (path / 'socket').write_text('')\n"
        "    print(path, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        with run_directory() as own:
            assert theirs.exists()
            assert own.exists()
        assert not own.exists()
        other.kill()
    assert theirs.exists()
    with run_directory() as own:
        assert list(own.parent.iterdir()) == [own]
