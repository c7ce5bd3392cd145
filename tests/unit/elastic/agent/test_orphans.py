"""Claims about processes that outlive an agent."""

from __future__ import annotations

import subprocess
import sys

import psutil

from keepstep.elastic.agent.orphans import VARIABLE, marked_processes, orphans_ended
from tests.adaptive_timeouts import patient

AGENT = """
import os, subprocess, sys
from keepstep.elastic.agent.orphans import orphans_ended
with orphans_ended() as marked:
    # A fork's child keeps its parent's environment; the shell in between is gone at once.
    child = subprocess.Popen(
        ["sh", "-c", "setsid sleep 600 & echo $!"], env={**os.environ, **marked},
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )
    print(child.stdout.readline().strip(), marked["KEEPSTEP_AGENT_RUN"], flush=True)
    sys.stdin.read()
"""


def started_agent() -> tuple[subprocess.Popen[str], psutil.Process, str]:
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    orphan, mark = agent.stdout.readline().split()
    process = psutil.Process(int(orphan))
    while process.pid not in marked_processes(mark):
        continue  # While a program begins to be executed, it has no environment yet.
    return agent, process, mark


def test_killed_agent_takes_along_what_left_its_sessions() -> None:
    agent, orphan, mark = started_agent()
    with agent:
        agent.kill()
    _, alive = psutil.wait_procs([orphan], timeout=patient(60))
    assert not alive
    assert marked_processes(mark) == []


def test_agent_that_ends_in_good_order_leaves_the_users_processes_alone() -> None:
    agent, orphan, mark = started_agent()
    with agent:
        agent.communicate()
    try:
        assert agent.returncode == 0
        assert orphan.is_running()
        assert marked_processes(mark) == [orphan.pid]
    finally:
        orphan.kill()


def test_processes_of_other_agents_are_not_marked() -> None:
    with orphans_ended() as marked, orphans_ended() as other:
        assert marked[VARIABLE] != other[VARIABLE]
        assert marked_processes(marked[VARIABLE]) == []
