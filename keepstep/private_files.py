"""Reads and creates files that only this user may read: secrets, sockets, registrations of jobs.

A directory in /tmp or /dev/shm may have been created by another user first, and a name in it may be
a link. So nothing is used before its owner and mode have been checked: a directory by `lstat`, a
file by `fstat` after it was opened.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MIN_SECRET_NBYTES = 16
_MAX_NBYTES = 1 << 16
_RUN_PREFIX = "node-"


class NotPrivate(Exception):
    """A file or directory does not belong to this user, or others may use it.

    The message names it, and what to do.
    """


def runtime_directory() -> Path:
    """Return the directory of this user's sockets, registrations and secrets; it need not exist."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return (
        Path(base) / "keepstep" if base else Path(tempfile.gettempdir()) / f"keepstep-{os.getuid()}"
    )


def created_directory(path: Path) -> Path:
    """Return a directory that only this user may enter; create it if needed.

    Raises:
        NotPrivate: it is a link, belongs to another user, or others may enter it.
        OSError: it cannot be created.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_directory(path)
    return path


def check_directory(path: Path) -> None:
    """Raise NotPrivate unless this is a directory that only this user may enter.

    Raises:
        NotPrivate: see above.
        FileNotFoundError: it does not exist.
    """
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise NotPrivate(
            f"{path} is no directory of this user (owner {status.st_uid}, mode "
            f"{stat.filemode(status.st_mode)}); remove it, or set XDG_RUNTIME_DIR to a directory "
            f"of your own"
        )
    if status.st_mode & 0o077:
        raise NotPrivate(
            f"{path} may be used by other users (mode {stat.filemode(status.st_mode)}); "
            f"see whether its content is yours, then chmod 700 {path}"
        )


def read_file(path: Path, *, follow_links: bool = False, max_nbytes: int = _MAX_NBYTES) -> bytes:
    """Return the content of a file that only this user may read, up to 64 KiB of it.

    Args:
        path: the file.
        max_nbytes: how much of it to read instead.
        follow_links: accept a link, as for a file that the user named. The file itself must
            belong to this user or to root.

    Raises:
        NotPrivate: it is not a regular file, belongs to another user, or others may use it.
        OSError: it cannot be read.
    """
    # O_NONBLOCK: opening a named pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags if follow_links else flags | os.O_NOFOLLOW)
    except OSError as error:
        if not follow_links and path.is_symlink():
            raise NotPrivate(f"{path} is a link; remove it") from error
        raise
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        owners = (os.getuid(), 0) if follow_links else (os.getuid(),)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in owners:
            raise NotPrivate(
                f"{path} is no file of this user (owner {status.st_uid}, mode "
                f"{stat.filemode(status.st_mode)}); remove it, or name another"
            )
        if status.st_mode & 0o077:
            raise NotPrivate(f"others may use {path}; chmod 600 {path}")
        return file.read(max_nbytes)


def read_secret(path: Path, *, follow_links: bool = False) -> bytes:
    """Return the secret in a file, without white space around it; arguments as for `read_file`.

    Raises:
        NotPrivate: as for `read_file`, or the secret is so short that it could be guessed.
        OSError: it cannot be read.
    """
    secret = read_file(path, follow_links=follow_links).strip()
    if len(secret) < MIN_SECRET_NBYTES:
        raise NotPrivate(
            f"the secret in {path} has {len(secret)} bytes and could be guessed; write a random "
            f"one: openssl rand -hex 32 > {path}"
        )
    return secret


def own_secret(path: Path) -> bytes:
    """Return the secret in a file of this user; create both if there is no such file.

    Raises:
        NotPrivate: the file or its directory is not private.
        OSError: it cannot be read or created.
    """
    created_directory(path.parent)
    if not os.path.lexists(path):
        write_file(path, secrets.token_hex(32).encode(), replace=False)
    return read_secret(path)


def write_file(path: Path, content: bytes, *, replace: bool = True) -> None:
    """Write a file that only this user may read. Readers see it complete or not at all.

    Args:
        path: the file, in a private directory.
        content: the file's content.
        replace: whether it replaces a file of that name; if not, that file stays as it is.

    Raises:
        OSError: it cannot be written.
    """
    # A new file with mode 0600, which follows no link.
    descriptor, unfinished = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        if replace:
            os.replace(unfinished, path)
            return
        try:
            os.link(unfinished, path)
        except FileExistsError:
            pass  # Another process was faster; its file is as good.
    except OSError:
        Path(unfinished).unlink(missing_ok=True)
        raise
    Path(unfinished).unlink()


@contextmanager
def held_file(path: Path, content: bytes) -> Iterator[None]:
    """Write a file as `write_file` does, and hold it while the context lasts; then remove it.

    `is_held` tells other processes so. The kernel releases it however this process ends. A process
    id would be no proof, since another process may have it by then.

    Raises:
        OSError: it cannot be written.
    """
    descriptor, unfinished = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    with open(descriptor, "wb", buffering=0) as file:
        # Before any process can find it.
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            file.write(content)
            os.replace(unfinished, path)
        except OSError:
            Path(unfinished).unlink(missing_ok=True)
            raise
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def is_held(path: Path) -> bool:
    """Return whether a living process holds this file by `held_file`. Needs no permission to write.

    Raises:
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    with open(os.open(path, flags), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def run_directory() -> Iterator[Path]:
    """Create a directory for one process's sockets and files; remove it at the end.

    Directories of processes that were killed are removed first. A process holds a lock on its own,
    which the kernel releases however the process ends.

    Raises:
        NotPrivate: the runtime directory is not private.
        OSError: the directory cannot be created.
    """
    base = created_directory(runtime_directory())
    with locked(base):
        _remove_abandoned(base)
        path = Path(tempfile.mkdtemp(prefix=_RUN_PREFIX, dir=base))
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(base: Path) -> None:
    for path in base.glob(f"{_RUN_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # It has just been removed by its owner.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # Its process lives.
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a directory's lock while the context lasts; wait for it if another process holds it.

    Raises:
        OSError: there is no such directory.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
