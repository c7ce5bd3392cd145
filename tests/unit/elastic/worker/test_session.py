"""Claims about a worker's session with its agent, by a worker process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from keepstep.elastic.worker.messages import (
    PROTOCOL,
    AbortOrdered,
    AgentMessage,
    Assign,
    CloseGeneration,
    Drained,
    Failed,
    SnapshotCommitted,
    Stored,
    Warm,
    WorkerMessage,
)
from keepstep.elastic.worker.session import (
    EXIT_AGENT_GONE,
    EXIT_CUT_OFF,
    EXIT_RECEIVING_FAILED,
    current,
)
from keepstep.monitor.progress import Progress, ProgressBoard
from keepstep.transport import Connection
from tests.adaptive_timeouts import patient
from tests.unit.elastic.worker.places import assignment

DEADLINE_S = 30.0

OPEN = """
import threading
from keepstep.elastic.worker.messages import Drained, Warm
from keepstep.elastic.worker.session import open_session

session = open_session()
session.report(Warm())
"""


@dataclass
class Running:
    """A worker process, and the agent's end of its session."""

    process: subprocess.Popen[str]
    connection: Connection[AgentMessage, WorkerMessage]
    board: ProgressBoard

    def finish(self) -> tuple[int, str]:
        """Return the process's exit status, and what it printed to stderr."""
        _, printed = self.process.communicate(timeout=patient(DEADLINE_S))
        return self.process.returncode, printed


@contextmanager
def worker(script: str) -> Iterator[Running]:
    """Run a script that has opened a session and reported that it is warm."""
    agent_end, worker_end = socket.socketpair()
    board = ProgressBoard.create("test")
    with worker_end:
        process = subprocess.Popen(
            [sys.executable, "-c", OPEN + script],
            env={
                **os.environ,
                "KEEPSTEP_CHANNEL": str(worker_end.fileno()),
                "KEEPSTEP_PROGRESS": str(board.descriptor),
            },
            pass_fds=(worker_end.fileno(), board.descriptor),
            stderr=subprocess.PIPE,
            text=True,
        )
    with process, Connection.over_pair(agent_end, PROTOCOL.server, "the worker") as connection:
        connection.set_idle_limit(patient(DEADLINE_S))
        try:
            assert connection.receive() == Warm()
            yield Running(process, connection, board)
        finally:
            process.kill()
            board.close()


def test_worker_that_awaits_the_order_does_not_abort_before_it() -> None:
    script = """
session.on_abort(lambda: session.report(Drained(generation=7)), awaits_order=True)
session.report(Drained(generation=0))
session.wait_for_abort_order(1)
assert session.is_aborting(1)
session.report(Drained(generation=1))
threading.Event().wait()
"""
    with worker(script) as running:
        assert running.connection.receive() == Drained(generation=0)
        running.connection.send(CloseGeneration(generation=1, aborts=True))
        # An answer to the closing would come before these.
        running.connection.send(AbortOrdered(generation=1))
        received = {running.connection.receive(), running.connection.receive()}
        assert received == {Drained(generation=7), Drained(generation=1)}


def test_worker_whose_abort_callback_raises_reports_it_and_exits() -> None:
    """Otherwise it would compute on without ever receiving anything again."""
    script = """
def abort():
    raise RuntimeError("the communicator is in use")

session.on_abort(abort, awaits_order=False)
session.report(Drained(generation=0))
threading.Event().wait()
"""
    with worker(script) as running:
        assert running.connection.receive() == Drained(generation=0)
        running.connection.send(CloseGeneration(generation=1, aborts=True))
        report = running.connection.receive()
        assert isinstance(report, Failed)
        assert "the communicator is in use" in report.traceback
        assert not report.is_fatal
        code, printed = running.finish()
    assert code == EXIT_RECEIVING_FAILED
    assert "] this worker can no longer receive from its agent" in printed
    assert "RuntimeError: the communicator is in use" in printed


def test_worker_that_cannot_read_a_message_reports_it_and_exits() -> None:
    with worker("threading.Event().wait()") as running:
        # A frame that announces no known message.
        running.connection._socket.send_all([b"KSF\0\0\0\0\2" + bytes(8) + b"{}"])
        assert isinstance(running.connection.receive(), Failed)
        assert running.finish()[0] == EXIT_RECEIVING_FAILED


@pytest.mark.parametrize(
    "script", ["threading.Event().wait()", "while True: session.report(Warm())"]
)
def test_worker_whose_agent_is_gone_exits(script: str) -> None:
    with worker(script) as running:
        running.connection.close()
        assert running.finish() == (EXIT_AGENT_GONE, "")


def test_waiting_worker_receives_its_assignment_and_reports_progress() -> None:
    script = """
place = session.wait_for_assignment(1)
session.progress(place.generation, place.rank)
session.report(Drained(generation=place.generation))
"""
    with worker(script) as running:
        for generation in (1, 2):
            place = assignment(generation, rank=3, world_size=4)
            running.connection.send(Assign(assignment=place, serves_store=False))
        assert running.connection.receive() == Drained(generation=2)
        progress = running.board.read()
    assert progress is not None
    assert progress == Progress(2, 3, progress.at_s)


WAITS = {
    "commit": "session.wait_for_commit(5, 2)",
    "commit while closing": "session.wait_for_commit(5, 2, also_closing=True)",
    "stored": "session.wait_for_stored(5, 2)",
}


@pytest.mark.parametrize(
    ("wait", "messages", "is_done"),
    [
        (
            "commit",
            [SnapshotCommitted(step=4), SnapshotCommitted(step=5)],
            True,
        ),
        ("commit", [CloseGeneration(generation=2, aborts=False)], False),
        (
            "commit while closing",
            [CloseGeneration(generation=2, aborts=False), SnapshotCommitted(step=6)],
            True,
        ),
        ("commit while closing", [CloseGeneration(generation=2, aborts=True)], False),
        ("stored", [SnapshotCommitted(step=9), Stored(step=5, generation=1)], True),
        ("stored", [CloseGeneration(generation=3, aborts=False)], False),
    ],
)
def test_wait_ends_with_its_event_or_its_generation(
    wait: str, messages: list[AgentMessage], is_done: bool
) -> None:
    script = f"session.report(Drained(generation=int({WAITS[wait]})))"
    with worker(script) as running:
        for message in messages:
            running.connection.send(message)
        assert running.connection.receive() == Drained(generation=int(is_done))


def test_new_assignment_forgets_what_was_stored_until_that_is_reported_again() -> None:
    """A checkpoint of an older generation may have been found damaged."""
    script = """
session.wait_for_assignment(0)
session.report(Drained(generation=int(session.wait_for_stored(9, 1))))
session.wait_for_assignment(1)
session.report(Drained(generation=session.stored_step))
session.report(Drained(generation=int(session.wait_for_stored(9, 2))))
"""
    with worker(script) as running:
        running.connection.send(Assign(assignment=assignment(1), serves_store=False))
        running.connection.send(Stored(step=9, generation=1))
        assert running.connection.receive() == Drained(generation=1)
        running.connection.send(Assign(assignment=assignment(2), serves_store=False))
        assert running.connection.receive() == Drained(generation=-1)
        running.connection.send(Stored(step=9, generation=1))
        assert running.connection.receive() == Drained(generation=1)


def test_checkpoint_that_was_undone_does_not_count_as_stored() -> None:
    """The leader may not know yet that the job has rolled back."""
    script = """
session.wait_for_assignment(0)
session.roll_back(2, 90)
session.report(Drained(generation=int(session.wait_for_stored(94, 2))))
session.report(Drained(generation=session.stored_step))
"""
    with worker(script) as running:
        running.connection.send(Assign(assignment=assignment(2), serves_store=False))
        running.connection.send(Stored(step=100, generation=1))
        running.connection.send(Stored(step=90, generation=0))
        running.connection.send(Stored(step=95, generation=2))
        assert running.connection.receive() == Drained(generation=1)
        assert running.connection.receive() == Drained(generation=95)


def test_new_assignment_forgets_what_an_older_generation_committed() -> None:
    script = """
session.report(Drained(generation=int(session.wait_for_commit(9, 1))))
session.wait_for_assignment(1)
session.report(Drained(generation=int(session.is_committed(9))))
"""
    with worker(script) as running:
        running.connection.send(SnapshotCommitted(step=9))
        assert running.connection.receive() == Drained(generation=1)
        running.connection.send(Assign(assignment=assignment(2), serves_store=False))
        assert running.connection.receive() == Drained(generation=0)


def test_process_without_an_agent_has_no_session() -> None:
    assert current() is None


_CLOSES = """
import os
from keepstep.elastic.worker.messages import Failed

os.closerange(3, 65536)
"""


def test_worker_that_has_closed_its_connection_tells_why_its_script_failed() -> None:
    script = _CLOSES + 'session.report(Failed(error="the reason", traceback="its lines"))'
    with worker(script) as running:
        assert running.finish()[0] == 0
        report = PROTOCOL.requests.decode(running.board.note(), "the worker")
    assert report == Failed(error="the reason", traceback="its lines")


def test_worker_that_needs_the_connection_it_has_closed_ends_and_tells_why() -> None:
    # Something else is open under its number: what is sent must not go there.
    other = "opened = [os.open('/dev/null', os.O_RDWR) for _ in range(9)]\n"
    with worker(_CLOSES + other + "session.report(Warm())") as running:
        assert running.finish()[0] == EXIT_CUT_OFF
        report = PROTOCOL.requests.decode(running.board.note(), "the worker")
    assert isinstance(report, Failed)
    assert "os.closerange" in report.error
