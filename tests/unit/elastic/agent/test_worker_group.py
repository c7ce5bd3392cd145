"""Claims about the workers of one node, by real processes that need no PyTorch."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from keepstep.elastic.agent import supervisor, worker_group
from keepstep.elastic.agent.assignments import JobContext, assignments_of
from keepstep.elastic.agent.fork_server_process import ForkServerProcess
from keepstep.elastic.agent.worker_group import WorkerGroup
from keepstep.elastic.errors import JobFailed
from keepstep.elastic.rendezvous.records import FailureKind, Generation, Member
from keepstep.elastic.worker.log_files import VARIABLE, Outputs
from keepstep.elastic.worker.messages import Assignment, Command, CommandKind
from keepstep.elastic.worker.session import EXIT_REPLACE
from tests.adaptive_timeouts import patient

pytestmark = pytest.mark.slow

CONTEXT = JobContext(job="job", secret=b"", server="unix:/none", max_restarts=3)

# What a program can still do with the connection that the bootstrap leaves open.
SEND = """
import os, stat, time
for name in os.listdir("/proc/self/fd"):
    try:
        if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
            os.write(int(name), bytes(64))
    except OSError:
        pass
time.sleep(60)
"""

JOIN = """
import time
from keepstep.elastic.worker.messages import Joined, Ready
from keepstep.elastic.worker.session import current

session = current()
assert session is not None
assignment = session.wait_for_assignment(0)
session.report(
    Joined(
        checkpoint_url=None,
        checkpoint_every=None,
        rank_multiple=1,
        max_ranks=0,
        awaits_abort_order=True,
    )
)
"""


def play(scenario: Coroutine[Any, Any, None]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(patient(60)):
            await scenario

    asyncio.run(in_time())


def program(code: str) -> Command:
    return Command(CommandKind.PROGRAM, sys.executable, ("-c", code))


def places(generation: int, size: int = 2) -> tuple[Assignment, ...]:
    member = Member("a", "h", size, 0, "h:1", "tcp:h:2")
    return assignments_of(Generation(generation, (member,), "h", 1, "start"), member, CONTEXT)


class Group(WorkerGroup):
    """A worker group whose changes can be waited for."""

    def __init__(
        self,
        command: Command,
        size: int,
        environment: Mapping[str, str] = os.environ,
        fork_server: ForkServerProcess | None = None,
    ) -> None:
        self._changed = asyncio.Event()
        super().__init__(command, size, 0, environment, self._changed.set, fork_server)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def fail_to_warm_up(self) -> str:
        """Start processes that end before they are warm; return why the job fails then."""
        for _ in range(3):
            self.warm_up()
            await self.until(lambda: not self._idle)
        with pytest.raises(JobFailed) as failed:
            self.warm_up()
        return str(failed.value)


@asynccontextmanager
async def running(
    command: Command, size: int = 2, environment: Mapping[str, str] = os.environ
) -> AsyncIterator[Group]:
    group = Group(command, size, environment)
    try:
        group.warm_up()
        await group.until(lambda: group.warm)
        await group.enter(places(1, size))
        yield group
    finally:
        await group.stop(0.0)


def test_programs_get_their_ranks_and_success_is_reported(tmp_path: Path) -> None:
    code = f"import os; open(os.path.join({str(tmp_path)!r}, os.environ['RANK']), 'w')"

    async def scenario() -> None:
        async with running(program(code)) as group:
            await group.until(lambda: group.done)
            assert group.failure is None

    play(scenario())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_killed_worker_is_named_with_its_rank_and_signal() -> None:
    async def scenario() -> None:
        async with running(program("import time; time.sleep(60)")) as group:
            os.kill(group.workers[1].pid, signal.SIGKILL)
            await group.until(lambda: group.failure is not None)
            assert group.failure is not None
            assert group.failure.kind == "worker"
            assert group.failure.message == "rank 1 on a was killed by SIGKILL"
            assert group.failure.rank == 1

    play(scenario())


@pytest.mark.parametrize("is_killed", [False, True], ids=["it ends", "the agent kills it"])
def test_last_output_of_a_worker_is_copied_after_its_end(tmp_path: Path, is_killed: bool) -> None:
    """`tee` was killed with the worker's session, and with it what it had not copied yet."""

    # What no descendant of the worker, and none of its session, writes when the worker has ended.
    def wait(name: str) -> str:
        return f"for i in $(seq 3000); do [ -e {name} ] && break; sleep 0.01; done"

    later = f"echo first; touch began; {wait('go')}; echo last; echo late >&2"
    end = "sleep 60" if is_killed else "exit 0"
    command = Command(
        CommandKind.PROGRAM,
        "/bin/sh",
        ("-c", f"cd {tmp_path}; (setsid sh -c '{later}' &); {wait('began')}; {end}"),
    )
    logs = tmp_path / "logs"
    environment = {**os.environ, VARIABLE: Outputs(str(logs), tee="3").encode()}

    async def scenario() -> None:
        async with running(command, 1, environment) as group:
            worker = group.workers[0]
            output = logs / "generation-1-rank-0-stdout.log"
            await until_holds(output, "first\n")
            if is_killed:
                worker.kill("it hangs")
            await group.until(lambda: not worker.is_alive)
            (tmp_path / "go").touch()
            await until_holds(output, "first\nlast\n")
            await until_holds(logs / "generation-1-rank-0-stderr.log", "late\n")

    play(scenario())


@pytest.mark.parametrize("drains", [True, False])
def test_worker_that_cannot_be_killed_ends_its_agent_and_not_the_whole_job(
    monkeypatch: pytest.MonkeyPatch, drains: bool
) -> None:
    """The leader waited for ever for the node to drain, and `keepstep evict` changed nothing."""
    monkeypatch.setattr(supervisor, "_KILL_S", 0.1)

    async def never_drained(group: Group) -> None:
        while not await group.drain(abort=True, limit_s=0.0):
            group._changed.clear()
            await group._changed.wait()

    async def scenario() -> None:
        async with running(program("import time; time.sleep(60)"), 1) as group:
            stuck = group.workers[0]
            with monkeypatch.context() as patched:
                # As in an uninterruptible call of a driver.
                patched.setattr(stuck, "_kill_all", lambda: None)
                patched.setattr(stuck, "signal", lambda _: None)
                with pytest.raises(JobFailed, match=f"process {stuck.pid} cannot be killed"):
                    await (never_drained(group) if drains else group.stop(0.0))
                # The agent ends, and waits no second time.
                patched.setattr(supervisor, "_KILL_S", 1e6)
                if drains:
                    with pytest.raises(JobFailed, match="cannot be killed"):
                        await group.stop(0.0)
            stuck._kill_all()
            await stuck._exited.wait()

    play(scenario())


async def until_holds(path: Path, text: str) -> None:
    def look() -> None:
        until_s = time.monotonic() + patient(5)
        while not path.exists() or path.read_text() != text:
            assert time.monotonic() < until_s, f"{path} holds no {text!r}"
            time.sleep(0.01)

    await asyncio.to_thread(look)


def test_workers_that_have_drained_may_be_drained_again() -> None:
    """The snapshot server may die just after: it is replaced once no worker can write."""

    async def scenario() -> None:
        async with running(program("import time; time.sleep(60)")) as group:
            while not await group.drain(abort=True, limit_s=0.0):
                await group.until(lambda: not any(w.can_write for w in group.workers.values()))
            assert await group.drain(abort=True, limit_s=5.0)
            assert group.drain_until_s is None

    play(scenario())


def test_restart_kills_the_worker_of_a_rank_once_and_gives_the_reason() -> None:
    async def scenario() -> None:
        async with running(program("import time; time.sleep(60)")) as group:
            group.restart(7, "no such rank here")
            assert all(worker.is_alive for worker in group.workers.values())
            group.restart(0, "it hangs")
            group.restart(0, "it hangs still")
            await group.until(lambda: group.failure is not None)
            assert group.failure is not None
            assert group.failure.message == "rank 0 on a was restarted: it hangs"
            assert group.workers[1].is_alive

    play(scenario())


def test_worker_whose_messages_cannot_be_read_is_replaced_alone() -> None:
    async def scenario() -> None:
        async with running(program(SEND), size=1) as group:
            await group.until(lambda: group.failure is not None)
            assert group.failure is not None
            assert group.failure.message.startswith(
                "rank 0 on a was restarted: its agent cannot read what it sends"
            )

    play(scenario())


def test_scripts_that_do_not_report_are_ended_by_a_drain() -> None:
    async def scenario() -> None:
        async with running(program("import time; time.sleep(60)")) as group:
            assert not await group.drain(abort=True, limit_s=30.0)
            await group.until(lambda: not any(w.is_alive for w in group.workers.values()))
            assert await group.drain(abort=True, limit_s=30.0)
            assert group.drain_until_s is None
            assert group.failure is None

    play(scenario())


def script(directory: Path, code: str) -> Command:
    path = directory / "script.py"
    path.write_text(JOIN + code)
    return Command(CommandKind.SCRIPT, str(path), ())


@pytest.mark.parametrize("status", [0, 3])
def test_script_that_leaves_an_executor_running_ends(tmp_path: Path, status: int) -> None:
    """Its threads wait for work until the interpreter ends, which waits for them."""
    path = tmp_path / "script.py"
    path.write_text(f"""
import sys
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
pool.submit(int).result()

def keeps_the_globals() -> None: ...

sys.exit({status})
""")

    async def scenario() -> None:
        async with running(Command(CommandKind.SCRIPT, str(path), ()), 1) as group:
            await group.until(lambda: not group.workers[0].is_alive)
            assert group.workers[0].code == status
            await group.until(lambda: group.done or group.failure is not None)
            assert group.done == (status == 0)

    play(scenario())


def test_what_a_script_raises_because_it_is_ended_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second change of the members ended a job, as one whose error had come again."""
    monkeypatch.setattr(worker_group, "_TERM_GRACE_S", patient(60))
    began = tmp_path / "began"
    path = tmp_path / "script.py"
    path.write_text(f"""
import signal, time

def stop(*_: object) -> None:
    raise ValueError("asked to stop")

signal.signal(signal.SIGTERM, stop)
open({str(began)!r}, "w")
time.sleep(600)
""")

    async def scenario() -> None:
        async with running(Command(CommandKind.SCRIPT, str(path), ()), 1) as group:
            await until_holds(began, "")
            assert not await group.drain(abort=False, limit_s=30.0)
            await group.until(lambda: not group.workers[0].is_alive)
            assert group.workers[0].code == 1
            assert group.failure is None

    play(scenario())


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[gloo/pair.cc] Connection closed by peer", FailureKind.PEER),
        ("ProcessGroupNCCL is only supported with GPUs, no GPUs found!", FailureKind.WORKER),
    ],
)
def test_script_that_does_not_report_blames_a_peer_only_if_that_is_gone(
    tmp_path: Path, text: str, kind: FailureKind
) -> None:
    path = tmp_path / "script.py"
    path.write_text(f"raise RuntimeError({text!r})")

    async def scenario() -> None:
        async with running(Command(CommandKind.SCRIPT, str(path), ()), 1) as group:
            await group.until(lambda: not group.workers[0].is_alive)
            assert group.failure is not None
            assert group.failure.kind is kind
            assert text in group.failure.message

    play(scenario())


def test_worker_that_has_drained_and_then_failed_goes_on_in_no_other_generation(
    tmp_path: Path,
) -> None:
    """Its exit, which came later, was no failure of that generation, which waited for it."""
    gate = tmp_path / "gate"
    code = f"""
import atexit
from pathlib import Path
from keepstep.elastic.worker.messages import Drained

def wait() -> None:
    while not Path({str(gate)!r}).exists():
        time.sleep(0.01)

atexit.register(wait)
session.report(Drained(generation=1))
raise ValueError("where it waited")
"""

    async def scenario() -> None:
        async with running(script(tmp_path, code), 1) as group:
            failed = group.workers[0]
            await group.until(lambda: failed.has_drained and failed.is_ending)
            await group.enter(places(2, 1))
            assert group.workers[0] is not failed
            await group.until(lambda: not failed.is_alive)
            assert not gate.exists()
            assert group.failure is None

    play(scenario())


def test_worker_that_ends_with_its_generation_is_replaced_by_one_that_waited_for_it(
    tmp_path: Path,
) -> None:
    """Its end is no failure; its successor has imported what the script imports."""
    code = """
session.report(
    Joined(
        checkpoint_url=None,
        checkpoint_every=None,
        restarts_script=True,
        modules=("wave", "no_such_module"),
    )
)
session.report(Ready(generation=assignment.generation, at_s=0.0))
from keepstep.elastic.worker.messages import Stepped
session.report(Stepped(generation=assignment.generation, at_s=0.0))
import sys
if assignment.generation == 2:
    assert "wave" in sys.modules
    time.sleep(600)
session.wait_for_closing(1)
session.end_for_successor(1)
"""

    async def scenario() -> None:
        async with running(script(tmp_path, code), 1) as group:
            first = group.workers[0]
            await group.until(lambda: group.running)
            group.start_spares()
            await group.until(lambda: group.warm)
            successor = group._idle[0]
            while not await group.drain(abort=False, limit_s=60.0):
                await group.until(lambda: first.has_drained)
            await group.until(lambda: not first.is_alive)
            assert first.code == EXIT_REPLACE
            assert group.failure is None
            await group.enter(places(2, 1))
            assert group.workers[0] is successor
            await group.until(lambda: group.running)
            assert group.failure is None

    play(scenario())


def test_worker_that_waits_where_no_abort_ends_it_is_killed_before_one_that_aborts(
    tmp_path: Path,
) -> None:
    code = """
if assignment.rank == 0:
    session.report(Ready(generation=1, at_s=0.0))
time.sleep(600)
"""

    async def scenario() -> None:
        async with running(script(tmp_path, code)) as group:
            await group.until(lambda: all(w.has_joined for w in group.workers.values()))
            await group.until(lambda: not group._is_entering(0))
            assert not await group.drain(abort=True, limit_s=0.0)
            await group.until(lambda: not group.workers[1].is_alive)
            assert not await group.drain(abort=True, limit_s=0.0)
            assert group.drain_until_s is not None
            assert group.drain_until_s > time.monotonic() + 5.0
            assert group.workers[0].is_alive

    play(scenario())


def test_worker_that_asks_to_be_replaced_counts_as_no_failure_of_its_own(tmp_path: Path) -> None:
    code = "session.exit_for_replacement('its groups do not end')"

    async def scenario() -> None:
        async with running(script(tmp_path, code), size=1) as group:
            await group.until(lambda: not group.workers[0].is_alive)
            assert group.workers[0].code == EXIT_REPLACE
            assert group.failure is not None
            assert group.failure.kind is FailureKind.PEER
            assert group.failure.message == "rank 0 starts over: its groups do not end"
            assert not group.done

    play(scenario())


def test_worker_whose_script_begins_again_has_not_failed_unless_another_one_has(
    tmp_path: Path,
) -> None:
    code = """
if assignment.rank == 0:
    session.restart_script('the last steps must be computed again')
time.sleep(600)
"""

    async def scenario() -> None:
        async with running(script(tmp_path, code), size=2) as group:
            await group.until(lambda: not group.workers[0].is_alive)
            assert group.workers[0].code == EXIT_REPLACE
            assert group.failure is not None
            assert group.failure.kind is FailureKind.RESTART
            os.kill(group.workers[1].pid, signal.SIGKILL)
            await group.until(lambda: not group.workers[1].is_alive)
            assert group.failure.kind is FailureKind.WORKER

    play(scenario())


@pytest.mark.parametrize(
    ("call", "status", "ending"),
    [
        ("sys.exit(0)", 0, ", by sys.exit at {path}:{line}; the job is not done"),
        ("sys.exit(3)", 3, ", by sys.exit at {path}:{line}"),
        ("sys.exit('a reason')", 1, ", by sys.exit at {path}:{line}"),
        ("os._exit(0)", 0, "; the job is not done"),
        ("os._exit(3)", 3, ""),
    ],
)
def test_worker_that_leaves_before_the_job_is_done_is_named_with_status_and_step(
    tmp_path: Path, call: str, status: int, ending: str
) -> None:
    """A peer's collective was blamed, which broke because this one had left with success."""
    code = f"import os, sys\nsession.progress(assignment.generation, 4)\n{call}"
    command = script(tmp_path, code)
    line = len(Path(command.target).read_text().splitlines())
    expected = f"rank 0 on a exited with status {status} after step 4" + ending

    async def scenario() -> None:
        async with running(command, size=1) as group:
            await group.until(lambda: not group.workers[0].is_alive)
            assert group.failure is not None
            assert group.failure.kind is FailureKind.WORKER
            named = expected.format(path=command.target, line=line)
            assert group.failure.message.startswith(named)
            assert ("in step 5" in group.failure.error) == (call != "os._exit(3)")

    play(scenario())


def test_worker_that_exits_with_success_once_its_loop_is_over_has_not_failed(
    tmp_path: Path,
) -> None:
    code = """
from keepstep.elastic.worker.messages import Finishing
session.report(Finishing(step=4))
raise SystemExit
"""

    async def scenario() -> None:
        async with running(script(tmp_path, code), size=1) as group:
            await group.until(lambda: not group.workers[0].is_alive)
            assert group.failure is None
            assert group.done

    play(scenario())


def test_worker_whose_device_failed_counts_as_its_failure(tmp_path: Path) -> None:
    code = "session.exit_for_replacement('cuda:0 has failed', is_fault=True)"

    async def scenario() -> None:
        async with running(script(tmp_path, code), size=1) as group:
            await group.until(lambda: not group.workers[0].is_alive)
            assert group.failure is not None
            assert group.failure.kind is FailureKind.WORKER
            assert group.failure.message.strip() == "rank 0 on a: cuda:0 has failed"

    play(scenario())


def test_ranks_that_do_not_enter_their_process_groups_in_time_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running(script(tmp_path, "time.sleep(600)"), size=1) as group:
            assert group.entry_until_s is None
            await group.until(lambda: group.workers[0].has_joined)
            assert group.entry_until_s is not None
            assert group.entry_until_s > time.monotonic() + 500
            group.check_entry()
            assert group.failure is None
            monkeypatch.setattr(worker_group, "_ENTRY_S", -1.0)
            group.check_entry()
            assert group.failure is not None
            assert group.failure.message.startswith("rank 0 has not entered its process groups")

    play(scenario())


def test_next_generation_replaces_workers_that_have_not_drained() -> None:
    async def scenario() -> None:
        async with running(program("import time; time.sleep(60)"), size=1) as group:
            before = group.workers[0].pid
            group.workers[0].kill("it must go")
            await group.until(lambda: group.failure is not None)
            await group.enter(places(2, 1))
            assert group.workers[0].pid != before
            assert group.failure is None
            assert group.generation == 2

    play(scenario())


def test_processes_that_end_while_they_warm_up_fail_the_job() -> None:
    async def scenario() -> None:
        # An interpreter that does not find its library ends at once.
        group = Group(program(""), 1, {"PYTHONHOME": "/none"})
        try:
            assert "Is PyTorch installed" in await group.fail_to_warm_up()
        finally:
            await group.stop(0.0)

    play(scenario())


LATE = (
    """
import time
from pathlib import Path
while not Path(GATE).exists():
    time.sleep(0.01)
"""
    + JOIN.replace("Joined, Ready", "Finishing, Joined, Ready")
    + """
session.wait_for_stored(30, 1)
session.report(Finishing(step=session.stored_step))
time.sleep(600)
"""
)


def test_worker_that_joins_when_the_last_step_is_stored_learns_so(tmp_path: Path) -> None:
    """One that took another's place waited for ever for the end of the job."""
    gate, script = tmp_path / "gate", tmp_path / "script.py"
    script.write_text(f"GATE = {str(gate)!r}\n{LATE}")

    async def scenario() -> None:
        async with running(Command(CommandKind.SCRIPT, str(script), ()), 1) as group:
            await group.tell_stored(30, 1)
            gate.touch()
            await group.until(lambda: group.workers[0].has_joined)
            await group.tell_stored(30, 1)
            await group.until(lambda: group.workers[0].finishing_step == 30)

    play(scenario())


def test_idle_process_that_ends_is_replaced_and_the_node_is_not_warm_until_then() -> None:
    async def scenario() -> None:
        group = Group(program(""), 1, {})
        try:
            for _ in range(4):
                group.warm_up()
                await group.until(lambda: group.warm)
                group._idle[0].kill("out of memory")
                await group.until(lambda: not group._idle)
                assert not group.warm
        finally:
            await group.stop(0.0)

    play(scenario())


def test_script_that_begins_again_because_it_has_not_joined_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = Command(CommandKind.PROGRAM, "/bin/sh", ("-c", "exit 3"))

    async def scenario() -> None:
        async with running(command, 1) as group:
            assert "keepstep.join" not in caplog.text
            await group.until(lambda: group.failure is not None)
            await group.enter(places(2, 1))

    play(scenario())
    assert "/bin/sh has not called keepstep.join: it begins at its start" in caplog.text
