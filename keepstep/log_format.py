"""Formats the logs of keepstep's processes: `[keepstep 05:49:58] snapshot server: ...`.

In systemd's journal, which has the time of each line, it is the line's priority instead:
`<4>[keepstep] snapshot server: ...`, so that `journalctl --priority warning` finds it.
"""

from __future__ import annotations

import logging
import os
import time

_TIME = "%H:%M:%S"
# Of sd-daemon(3); the highest level that a message reaches counts.
_PRIORITIES = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6}
_DEBUG = 7


def log_to_stderr(level: int, process: str = "") -> None:
    """Log this process's messages to stderr, and warnings of the libraries that it uses.

    Args:
        level: the least level of `logging` that is shown of keepstep's own messages.
        process: this process's name, shown before each message; "" for one that a user starts.
    """
    logging.basicConfig(level=logging.WARNING, handlers=[_handler(process)])
    logging.getLogger("keepstep").setLevel(level)


def log_to_stderr_unless_configured() -> None:
    """Show keepstep's warnings in a worker, until its script configures logging itself."""
    handler = _handler("")
    handler.setLevel(logging.WARNING)
    handler.addFilter(lambda _: not logging.getLogger().handlers)
    logging.getLogger("keepstep").addHandler(handler)


def log_line(text: str) -> str:
    """Return a text as a line of the log, for a process that can log no more."""
    if _is_journal():
        return _with_priority(f"[keepstep] {text}", logging.WARNING)
    return f"[keepstep {time.strftime(_TIME)}] {text}"


class _JournalFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _with_priority(super().format(record), record.levelno)


def _handler(process: str) -> logging.Handler:
    handler = logging.StreamHandler()
    message = f"{process}: %(message)s" if process else "%(message)s"
    if _is_journal():
        handler.setFormatter(_JournalFormatter(f"[keepstep] {message}"))
    else:
        handler.setFormatter(logging.Formatter(f"[keepstep %(asctime)s] {message}", _TIME))
    return handler


def _is_journal() -> bool:
    """Whether stderr goes to systemd's journal: JOURNAL_STREAM is inherited, stderr may not be."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _with_priority(text: str, level: int) -> str:
    reached = [number for least, number in _PRIORITIES.items() if level >= least]
    prefix = f"<{min(reached, default=_DEBUG)}>"
    return "\n".join(f"{prefix}{line}" for line in text.split("\n"))
