"""Claims about the form of what keepstep's processes log."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from keepstep.log_format import log_line

WORKER = "log_to_stderr_unless_configured()"


@pytest.mark.parametrize(
    ("setup", "shown"),
    [
        ("log_to_stderr(logging.INFO)", ["status", "alert"]),
        ("log_to_stderr(logging.WARNING, 'snapshot server')", ["snapshot server: alert"]),
        (WORKER, ["alert"]),
    ],
)
def test_each_line_has_the_time_and_keepstep(setup: str, shown: list[str]) -> None:
    lines = logged(setup)
    assert [re.sub(r"^\[keepstep \d\d:\d\d:\d\d\] ", "@", line) for line in lines] == [
        f"@{text}" for text in shown
    ]


def test_a_script_that_configures_logging_gets_each_message_once_in_its_own_form() -> None:
    lines = logged(f"{WORKER}; logging.basicConfig(format='mine: %(message)s')")
    assert lines == ["mine: alert"]


def test_what_is_printed_has_the_same_form() -> None:
    assert re.fullmatch(r"\[keepstep \d\d:\d\d:\d\d\] lost", log_line("lost"))


def test_lines_in_systemds_journal_have_a_priority_instead_of_the_time() -> None:
    setup = "log_to_stderr(logging.INFO, 'server')"
    assert logged(setup, "here") == ["<6>[keepstep] server: status", "<4>[keepstep] server: alert"]
    assert logged(WORKER, "here") == ["<4>[keepstep] alert"]
    lines = logged(f"{WORKER}; print(log_line('lost'), file=sys.stderr)", "here")
    assert lines[0] == "<4>[keepstep] lost"
    assert logged(WORKER, "elsewhere")[0].startswith("[keepstep ")
    several = "log_to_stderr(logging.ERROR); logging.getLogger('keepstep').error('a\\nb')"
    assert logged(several, "here") == ["<3>[keepstep] a", "<3>b"]


def logged(setup: str, journal: str = "") -> list[str]:
    """Return the lines of a process that is set up so and logs two messages.

    Args:
        setup: code.
        journal: whether JOURNAL_STREAM names its stderr, `here` or `elsewhere`; "": it is not set.
    """
    code = f"""
import logging, os, sys
if {journal!r}:
    status = os.fstat(2)
    number = status.st_ino + ({journal!r} == "elsewhere")
    os.environ["JOURNAL_STREAM"] = f"{{status.st_dev}}:{{number}}"
from keepstep.log_format import *
{setup}
log = logging.getLogger("keepstep.monitor")
log.info("status")
log.warning("alert")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()
