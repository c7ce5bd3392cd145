"""Formats the logs of keepstep's processes: `[keepstep 05:49:58] snapshot server: ...`."""

from __future__ import annotations

import logging
import time

_FORMAT = "[keepstep %(asctime)s] {}%(message)s"
_TIME = "%H:%M:%S"


def log_to_stderr(level: int, process: str = "") -> None:
    """Log this process's messages to stderr, and warnings of the libraries that it uses.

    Args:
        level: the least level of `logging` that is shown of keepstep's own messages.
        process: this process's name, shown before each message; "" for one that a user starts.
    """
    logging.basicConfig(level=logging.WARNING, format=_format(process), datefmt=_TIME)
    logging.getLogger("keepstep").setLevel(level)


def log_to_stderr_unless_configured() -> None:
    """Show keepstep's warnings in a worker, until its script configures logging itself."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter(_format(""), _TIME))
    handler.addFilter(lambda _: not logging.getLogger().handlers)
    logging.getLogger("keepstep").addHandler(handler)


def log_line(text: str) -> str:
    """Return a text as a line of the log, for a process that can log no more."""
    return f"[keepstep {time.strftime(_TIME)}] {text}"


def _format(process: str) -> str:
    return _FORMAT.format(f"{process}: " if process else "")
