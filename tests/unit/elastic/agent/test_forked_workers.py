"""Claims about workers that a fork server has forked, by real processes that import PyTorch."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch

from keepstep.elastic.agent import fork_server_process
from keepstep.elastic.agent.fork_server_process import ForkingUnavailable, ForkServerProcess
from keepstep.elastic.worker.messages import Command, CommandKind
from keepstep.monitor.progress import ProgressBoard
from tests.unit.elastic.agent.test_worker_group import Group, places, play

pytestmark = pytest.mark.slow

# What a script may depend on. Descriptors are those of the standard streams.
FACTS = """
import json, os, random, signal, sys, threading
from pathlib import Path
import numpy, torch

rank = os.environ["RANK"]
(Path(sys.argv[1]) / rank).write_text(json.dumps({
    "argv": sys.argv,
    "name": __name__,
    "file": __file__,
    "main": sys.modules["__main__"].__file__,
    "path": sys.path,
    "flags": list(sys.flags),
    "directory": os.getcwd(),
    "environment": {name: text for name, text in os.environ.items() if name != "MASTER_PORT"},
    "streams": [os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)],
    "descriptors": sorted(
        os.readlink(f"/proc/self/fd/{name}").partition(":")[0]
        for name in os.listdir("/proc/self/fd") if int(name) > 2
        and os.path.exists(f"/proc/self/fd/{name}")
    ),
    "handlers": [str(signal.getsignal(number)) for number in sorted(signal.Signals)],
    "masked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "threads": sorted(thread.name for thread in threading.enumerate()),
    "limits": [torch.get_num_threads(), torch.is_grad_enabled(), str(torch.get_default_dtype())],
    "leads its session": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "its own": {
        "parent": os.getppid(),
        "drawn": [random.random(), numpy.random.rand(), torch.rand(1).item()],
        "command": Path("/proc/self/cmdline").read_bytes().split(bytes(1))[:2].__repr__(),
    },
}))
if rank == "0":
    sys.exit(3)
os.kill(os.getpid(), signal.SIGSEGV)
"""


@asynccontextmanager
async def group_of(
    command: Command, size: int, environment: Mapping[str, str] = os.environ, *, forks: bool = True
) -> AsyncIterator[Group]:
    fork_server = ForkServerProcess.start(command, environment) if forks else None
    group = Group(command, size, environment, fork_server)
    try:
        group.warm_up()
        await group.until(lambda: group.warm)
        yield group
    finally:
        await group.stop(0.0)
        if fork_server is not None:
            await fork_server.close()


async def facts_of(directory: Path, size: int, *, forks: bool) -> list[dict[str, Any]]:
    """Run the script of facts; return what each rank has written."""
    (directory / "script.py").write_text(FACTS)
    command = Command(CommandKind.SCRIPT, str(directory / "script.py"), (str(directory), "--lr"))
    # The same number of threads, however many workers there are.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    async with group_of(command, size, environment, forks=forks) as group:
        await group.enter(places(1, size))
        await group.until(lambda: not any(worker.is_alive for worker in group.workers.values()))
        codes = [group.workers[rank].code for rank in range(size)]
        assert codes == [3, -signal.SIGSEGV][:size]
    return [json.loads((directory / str(rank)).read_text()) for rank in range(size)]


def test_forked_worker_is_to_its_script_what_one_that_was_started_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        (started,) = await facts_of(tmp_path, 1, forks=False)
        forked, other = await facts_of(tmp_path, 2, forks=True)
        own, others_own = forked.pop("its own"), other.pop("its own")
        started.pop("its own")
        for of in (started, forked):
            of["environment"] = {
                name: text for name, text in of["environment"].items() if "WORLD_SIZE" not in name
            }
        assert forked == started
        assert own["parent"] == others_own["parent"] == os.getpid()
        assert all(a != b for a, b in zip(own["drawn"], others_own["drawn"], strict=True))
        assert "rank " in own["command"]
        assert "keepstep.elastic.worker.bootstrap" in own["command"]

    play(scenario())


PRELOADED = """
import sys
from pathlib import Path

is_early = "heavy" in sys.modules
import heavy

Path(sys.argv[1]).write_text(f"{is_early} {heavy.KNOWN_RANK} {sys.path.count(sys.path[0])}")
"""


@pytest.mark.parametrize("forks", [True, False])
def test_modules_that_the_user_names_are_imported_before_the_worker_has_a_place(
    tmp_path: Path, forks: bool
) -> None:
    """Also modules in the script's folder: their import took most of a replacement's time."""
    (tmp_path / "heavy.py").write_text('import os; KNOWN_RANK = os.environ.get("RANK")')
    (tmp_path / "script.py").write_text(PRELOADED)
    found = tmp_path / "found"
    command = Command(
        CommandKind.SCRIPT, str(tmp_path / "script.py"), (str(found),), preload=("heavy",)
    )

    async def scenario() -> None:
        async with group_of(command, 1, forks=forks) as group:
            await group.enter(places(1, 1))
            await group.until(lambda: group.done)
        assert found.read_text() == "True None 1"

    play(scenario())


SEEDED = """
import random, sys
import numpy, torch

for seed in (random.seed, numpy.random.seed, torch.manual_seed):
    seed(7)
ARGUMENTS = sys.argv
"""
DRAWS = """
import json, os, random, sys
from pathlib import Path
import heavy, numpy, torch

drawn = [random.random(), numpy.random.rand(), torch.rand(1).item()]
(Path(sys.argv[1]) / os.environ["RANK"]).write_text(json.dumps([drawn, heavy.ARGUMENTS]))
"""


@pytest.mark.parametrize("forks", [True, False])
def test_what_a_module_has_seeded_and_read_of_the_arguments_is_as_if_the_script_had_imported_it(
    tmp_path: Path, forks: bool
) -> None:
    """Ranks that count on equal weights would begin with others."""
    (tmp_path / "heavy.py").write_text(SEEDED)
    script = tmp_path / "script.py"
    script.write_text(DRAWS)
    command = Command(CommandKind.SCRIPT, str(script), (str(tmp_path),), preload=("heavy",))

    async def scenario() -> None:
        async with group_of(command, 2, forks=forks) as group:
            await group.enter(places(1, 2))
            await group.until(lambda: group.done)

    play(scenario())
    generator = torch.Generator().manual_seed(7)
    expected = [
        random.Random(7).random(),
        numpy.random.RandomState(7).rand(),
        torch.rand(1, generator=generator).item(),
    ]
    for rank in (0, 1):
        drawn, arguments = json.loads((tmp_path / str(rank)).read_text())
        assert drawn == expected
        assert arguments == [str(script), str(tmp_path)]


def test_module_that_cannot_be_imported_ends_the_job_and_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = Command(CommandKind.SCRIPT, str(tmp_path / "script.py"), preload=("heavy",))

    async def scenario() -> None:
        fork_server = ForkServerProcess.start(command, os.environ)
        group = Group(command, 1, os.environ, fork_server)
        try:
            assert "every module of --preload" in await group.fail_to_warm_up()
        finally:
            await group.stop(0.0)
            await fork_server.close()

    play(scenario())
    assert "No module named 'heavy'" in capfd.readouterr().err


def test_worker_that_nobody_waits_for_is_killed_and_the_end_of_the_server_ends_no_other(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(600)")
    command = Command(CommandKind.SCRIPT, str(script))

    async def scenario() -> None:
        channel, worker_end = socket.socketpair()
        board = ProgressBoard.create("worker")
        server = ForkServerProcess.start(command, os.environ)
        try:
            with channel, worker_end:
                descriptors = worker_end.fileno(), board.descriptor
                kept = asyncio.create_task(server.fork(*descriptors))
                dropped = asyncio.create_task(server.fork(*descriptors))
                await asyncio.sleep(0)
                assert len(server._requests) == 2
                dropped.cancel()
                pid = await kept
                await asyncio.wait([dropped])
                if server._requests:
                    await asyncio.wait(server._requests)
                worker, process = psutil.Process(pid), psutil.Process(server._process.pid)
                assert {worker, process} == set(psutil.Process().children()) - before
                process.kill()
                with pytest.raises(ForkingUnavailable):
                    await server.fork(*descriptors)
                assert worker.is_running()
                assert worker.ppid() == os.getpid()
                os.kill(pid, signal.SIGKILL)
                await asyncio.to_thread(os.waitpid, pid, 0)
        finally:
            await server.close()
            board.close()

    before = set(psutil.Process().children())
    play(scenario())
    assert set(psutil.Process().children()) == before


def test_forked_process_that_the_agent_does_not_take_ends_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker gets its connection, of which two would read."""
    (tmp_path / "script.py").write_text("import time; time.sleep(600)")
    forked: list[psutil.Process] = []

    def is_own_child(process: int) -> bool:
        forked.append(psutil.Process(process))
        return False

    async def scenario() -> None:
        channel, worker_end = socket.socketpair()
        board = ProgressBoard.create("worker")
        command = Command(CommandKind.SCRIPT, str(tmp_path / "script.py"))
        server = ForkServerProcess.start(command, os.environ)
        try:
            with channel:
                with worker_end, pytest.raises(ForkingUnavailable):
                    await server.fork(worker_end.fileno(), board.descriptor)
                assert await asyncio.to_thread(channel.recv, 1) == b""
        finally:
            await server.close()
            board.close()

    monkeypatch.setattr(fork_server_process, "_is_own_child", is_own_child)
    play(scenario())
    (process,) = forked
    assert os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1]) == 0


def test_workers_are_started_one_by_one_where_what_is_imported_starts_threads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    )
    (tmp_path / "script.py").write_text("import threading; assert threading.active_count() > 2")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }

    async def scenario() -> None:
        command = Command(CommandKind.SCRIPT, str(tmp_path / "script.py"))
        async with group_of(command, 1, environment) as group:
            await group.enter(places(1, 1))
            await group.until(lambda: group.done or group.failure is not None)
            assert group.failure is None

    play(scenario())
    assert caplog.messages == [
        "workers are started one by one, which takes longer: "
        "an imported module has started threads (1)"
    ]
