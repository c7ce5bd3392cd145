"""Describes an exception that ended the user's script, and shows it as Python would."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from types import TracebackType

import keepstep
from keepstep.checkpoint.errors import (
    CheckpointError,
    ProcessEnded,
    RankFailed,
    SnapshotUnavailable,
)
from keepstep.elastic.errors import ElasticError, ReplicasDiverged, StepRejected, UsageError
from keepstep.elastic.worker.messages import Failed, sendable
from keepstep.elastic.worker.peer_failure import is_lost_peer, is_peer_failure, text_of
from keepstep.log_format import log_line

_BOOTSTRAP = str(Path(__file__).with_name("bootstrap.py"))
# Keepstep, and modules that it calls on the way to its errors, such as contextlib. A dataclass
# makes code.
_NOT_THE_USERS = (
    "<string>",
    str(Path(keepstep.__file__).parent) + "/",
    sysconfig.get_path("stdlib") + "/",
    # The libraries through which keepstep reaches storages.
    *(
        f"{sysconfig.get_path('purelib')}/{name}/"
        for name in ("adlfs", "aiohttp", "azure", "botocore", "fsspec", "urllib3")
    ),
)


def without_launcher(error: BaseException) -> BaseException:
    """Return the exception with the frames of the user's script and below alone.

    Errors that keepstep raises on purpose explain themselves: their frames in the script stay,
    those in keepstep do not, nor do the exceptions that keepstep caught there.
    """
    entries: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        name = entry.tb_frame.f_code.co_filename
        if name != _BOOTSTRAP and not name.startswith("<frozen runpy"):
            entries.append(entry)
        entry = entry.tb_next
    if isinstance(error, CheckpointError | ElasticError):
        entries = [
            entry
            for entry in entries
            if not entry.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS)
        ]
        if error.__cause__ is not None and not any(map(_is_the_users, _causes_of(error))):
            # `_chain_of` finds it still.
            error.__context__, error.__cause__ = error.__cause__, None
    shown: TracebackType | None = None
    for entry in reversed(entries):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return error.with_traceback(shown)


def _is_the_users(error: BaseException) -> bool:
    """Return whether code outside keepstep has a part in an exception."""
    return any(
        not frame.f_code.co_filename.startswith(_NOT_THE_USERS)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _causes_of(error: BaseException) -> Iterator[BaseException]:
    chain = _chain_of(error)
    next(chain)
    return chain


def summary_of(error: BaseException) -> str:
    """Return an exception's type and message in one line, without its notes."""
    shown = traceback.TracebackException.from_exception(error)
    shown.__notes__ = None
    return list(shown.format_exception_only())[-1].strip()


def traceback_of(error: BaseException) -> str:
    """Return an exception as Python shows it, with its causes."""
    return "".join(traceback.format_exception(error))


def show(error: BaseException) -> None:
    """Show an exception on standard error, by the hook that the script may have set."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as hook_error:  # noqa: BLE001 - the user's; both are shown, as Python does
        # The script may have closed its standard error, or set another one.
        with suppress(Exception):
            print("Error in sys.excepthook:", traceback_of(hook_error), file=sys.stderr)
            print("Original exception was:", traceback_of(error), file=sys.stderr)
    flush_output()


def flush_output() -> bool:
    """Flush Python's output buffers; return whether nothing is lost.

    As at the interpreter's end, an output that the script has closed or removed does not count.
    """
    is_complete = True
    for stream in (sys.stdout, sys.stderr):
        if stream is None or getattr(stream, "closed", False):
            continue
        try:
            stream.flush()
        except Exception as error:  # noqa: BLE001 - the script's own stream may raise anything
            is_complete = False
            with suppress(OSError):
                os.write(2, f"{log_line(f'output is lost: {error!r}')}\n".encode())
    return is_complete


def failure_of(error: BaseException) -> Failed:
    """Return the report to the agent about an exception that ended the script.

    One line suffices for an error that explains itself: the message, and the line of the script.

    Args:
        error: as `without_launcher` returned it.
    """
    summary, shown = summary_of(error), traceback_of(error)
    if isinstance(error, CheckpointError | ElasticError) and not _has_more_to_show(error):
        line = line_of(error)
        summary, shown = (f"{summary} ({line})" if line else summary), ""
    return Failed(
        error=sendable(summary),
        traceback=sendable(shown),
        is_fatal=is_fatal(error),
        place=sendable(place_of(error)),
        is_peer=is_lost_peer(error),
    )


def _has_more_to_show(error: BaseException) -> bool:
    has_context = error.__context__ is not None and not error.__suppress_context__
    return error.__cause__ is not None or has_context or bool(getattr(error, "__notes__", ()))


def place_of(error: BaseException) -> str:
    """Return an exception's type and the line that raised it, as "ValueError at train.py:17".

    "" for an exception that the network, a disk, a device or a peer may have caused: it may not
    happen again.

    Args:
        error: as `without_launcher` returned it.
    """
    if not isinstance(error, Exception) or isinstance(error, _of_the_surroundings()):
        return ""
    if is_peer_failure(error) or any(map(_is_of_an_ended_process, _chain_of(error))):
        return ""
    line = line_of(error)
    return f"{type(error).__name__} at {line}" if line else type(error).__name__


def line_of(error: BaseException) -> str:
    """Return the line that raised an exception, as "train.py:17"; "" if nothing has run."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _is_of_an_ended_process(error: BaseException) -> bool:
    """Return whether it says that a process of the script was ended, for instance for its memory.

    A peer's end, read from a pipe, is an EOFError. The rest have no class of their own.
    """
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode < 0
    if isinstance(error, EOFError | BrokenExecutor):
        return True
    return isinstance(error, RuntimeError) and "DataLoader worker (pid" in text_of(error)


def _chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, each once."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        following = following.__cause__ or following.__context__


def _of_the_surroundings() -> tuple[type[BaseException], ...]:
    torch = sys.modules.get("torch")
    # A device's memory may be another process's for a moment, such as of one that is ending.
    names = ("AcceleratorError", "OutOfMemoryError")
    error_types = (attrgetter(name)(torch) for name in names if torch is not None)
    return (OSError, MemoryError, CheckpointError, ElasticError, *error_types)


def is_fatal(error: BaseException) -> bool:
    """Return whether the user's input is wrong, so that another attempt would end the same way.

    Args:
        error: as `without_launcher` returned it.
    """
    if isinstance(error, UsageError | ReplicasDiverged | StepRejected):
        return True
    if isinstance(error, Exception) and error.__traceback__ is None:
        # Nothing of the script has run: it does not exist, or cannot be compiled.
        return not isinstance(error, CheckpointError | ElasticError)
    # A rank that failed itself reports whether that is for good.
    is_anothers = isinstance(error, SnapshotUnavailable | RankFailed | ProcessEnded)
    return isinstance(error, CheckpointError) and not is_anothers
