"""Claims about what a script, and what it starts, do on signals that announce a node's end."""

import signal
import subprocess
import sys

import pytest

from keepstep.notices import NOTICES

_JOINED = """
import os, signal, subprocess, sys, threading
from keepstep.elastic.worker import script_signals
{before}
script_signals.leave_notices_to_agent()
{after}
for number in {numbers}:
    os.kill(os.getpid(), number)
{then}
print("lives")
"""


def run(before: str = "", after: str = "", then: str = "") -> tuple[str, int]:
    """Run a script that joins and sends itself every notice; return its output and its status."""
    code = _JOINED.format(before=before, after=after, then=then, numbers=[int(n) for n in NOTICES])
    completed = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False
    )
    return completed.stdout, completed.returncode


def test_script_without_handlers_leaves_them_to_its_agent() -> None:
    assert run() == ("lives\n", 0)


_HANDLED = "signal.signal(signal.SIGTERM, lambda *_: print('stored'))"


@pytest.mark.parametrize("when", ["before", "after"])
def test_own_handler_of_a_script_is_called(when: str) -> None:
    assert run(**{when: _HANDLED}) == ("stored\nlives\n", 0)


def test_agent_ends_a_script_without_a_handler_while_its_main_thread_is_busy() -> None:
    then = "threading.Thread(target=script_signals.end_unless_handled).start(); signal.pause()"
    assert run(then=then) == ("", 128 + signal.SIGTERM)


def test_agent_leaves_the_end_to_the_handler_of_a_script() -> None:
    then = "script_signals.end_unless_handled()"
    assert run(before=_HANDLED, then=then) == ("stored\nlives\n", 0)


_FORKED = """
child = os.fork()
if child == 0:
    signal.pause()
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
_STARTED = """
child = subprocess.Popen(["sleep", "600"])
child.terminate()
print(child.wait())
"""


@pytest.mark.parametrize("start", [_FORKED, _STARTED])
def test_script_ends_what_it_has_started_as_ever(start: str) -> None:
    assert run(then=start) == (f"{-signal.SIGTERM}\nlives\n", 0)
