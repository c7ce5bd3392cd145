"""Claims about signals that announce a node's end: whom they end, and whom they do not."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from keepstep.elastic.store.embedded import binary
from keepstep.notices import NOTICES, notices_blocked
from keepstep.processes import module_command
from tests.adaptive_timeouts import patient

_WAIT = "print('begun', flush=True); import sys; sys.stdin.readline()"
_PARENT = """
import os, signal, sys
from keepstep import notices
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.close(writer)
    notices.obey_owner_alone(os.getppid())
    os.write(1, b"%d\\n" % os.getpid())
    os.read(reader, 1)
    os._exit(7)
if "end" in sys.stdin.readline():
    os.kill(child, signal.SIGTERM)
else:
    os.close(writer)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextmanager
def started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a command that reads its input, and end it."""
    with (
        notices_blocked(),
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def test_process_that_starts_with_them_blocked_and_leaves_them_is_ended_by_none() -> None:
    code = f"from keepstep.notices import leave_notices; leave_notices(); {_WAIT}"
    with started([sys.executable, "-c", code]) as process:
        for number in NOTICES:
            process.send_signal(number)
        assert process.communicate("\n", timeout=patient(60)) == ("begun\n", None)
        assert process.returncode == 0


@pytest.mark.parametrize("number", NOTICES)
def test_restored_notice_ends_a_process(number: signal.Signals) -> None:
    code = (
        "from keepstep.notices import leave_notices, restore_notices; "
        f"leave_notices(); restore_notices(); {_WAIT}"
    )
    with started([sys.executable, "-c", code]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        assert process.wait(patient(60)) == -number


def test_program_that_installs_its_own_handlers_is_ended_by_none(tmp_path: Path) -> None:
    """etcd does: without its coordinator a node hands nothing over."""
    ports = "http://127.0.0.1:0"
    command = module_command(
        "keepstep.processes", str(os.getpid()), binary(), "--data-dir", str(tmp_path / "data"),
        "--listen-client-urls", ports, "--advertise-client-urls", ports,
        "--listen-peer-urls", ports, "--log-outputs", "stdout",
    )  # fmt: skip
    with started(command) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "ready to serve client requests" in line:
                break
        for number in NOTICES:
            process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)


@pytest.mark.parametrize("from_parent", [True, False])
def test_worker_of_a_loader_is_ended_by_its_parent_alone(from_parent: bool) -> None:
    with started([sys.executable, "-c", _PARENT]) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        if not from_parent:
            for number in NOTICES:
                os.kill(child, number)
        output, _ = process.communicate("end it\n" if from_parent else "\n", patient(60))
        assert output == ("0\n" if from_parent else "7\n")
