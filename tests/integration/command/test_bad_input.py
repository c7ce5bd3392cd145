"""Claims about invalid commands: one line with the remedy, an exit status, nothing left behind."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from keepstep.elastic.store.embedded import EmbeddedEtcd
from tests.adaptive_timeouts import patient

ROOT = Path(__file__).parents[3]


def keepstep(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "keepstep", *arguments],
        capture_output=True,
        text=True,
        timeout=patient(timeout_s),
        cwd=ROOT,
    )


def script(directory: Path, text: str) -> str:
    path = directory / "script.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--no-such-flag", "x.py"], "No such option"),
        (["run", "--nnodes", "4:2", "elastic/cli/main.py"], "the first number is the least"),
        (["run", "--nnodes", "many", "elastic/cli/main.py"], "such as 1:4"),
        (["run", "--nproc-per-node", "0", "elastic/cli/main.py"], "at least 1"),
        (["run", "no-such-script.py"], "does not exist"),
        (["run", "--storage-limit", "fast", "elastic/cli/main.py"], "such as 500MB or 2GB"),
        (["run", "--keep-state", "5", "elastic/cli/main.py"], "such as 90s, 30m or 2h, or 0"),
        (["run", "--store", "redis://h:1", "elastic/cli/main.py"], "HOST:PORT"),
        (["run", "--store", "http://h:2379", "elastic/cli/main.py"], "give etcd://HOST:PORT"),
        (["status", "--store", "redis://h:1", "--job", "a"], "keepstep://HOST:PORT for one that"),
        (["run", "--nnodes", "2", "elastic/cli/main.py"], "--rdzv-endpoint HOST:PORT"),
        (
            ["run", "--rdzv-endpoint", "192.0.2.1:2379", "elastic/cli/main.py"],
            "--secret-file FILE",
        ),
        (["run", "--store", "etcd://127.0.0.1:9", "elastic/cli/main.py"], "no answer from etcd"),
        (["run", "--local-addr", "192.0.2.1", "elastic/cli/main.py"], "address of this host"),
        (["run", "-r", "4", "elastic/cli/main.py"], "give 0, 1, 2 or 3"),
        (["status", "--job", "no-such-job"], "no job named"),
        (["pause", "no-such-job"], "by --store URL\n"),
        (["monitor", "--port", "99999"], "0<=x<=65535"),
        (["monitor", "--every", "0"], "0.05<=x<=60"),
        (["monitor", "--every", "nan"], "no number"),
        (["monitor", "--job", ""], "a name is wanted"),
        (["monitor", "--node", ""], "a name is wanted"),
        (["monitor", "--child", "nonsense"], "http://HOST:PORT"),
        (["monitor", "--store", "redis://h:1"], "HOST:PORT"),
        (["monitor", "--events", "/tmp"], "name another file"),
        (["monitor", "--relay", "--act", "restart"], "give no --relay"),
        (["top", "--url", "127.0.0.1:9"], "http://HOST:PORT"),
        (
            ["top", "--url", "http://127.0.0.1:9", "--once"],
            "127.0.0.1:9: nothing listens there; start `keepstep monitor` there\n",
        ),
        (["top", "--url", "http://127.0.0.1:9/#token=abc"], "list of processes"),
        (["doctor", "--patience", "-1"], "1<=x<=86400"),
    ],
)
def test_invalid_command_ends_with_one_line_that_names_the_remedy(
    arguments: list[str], message: str
) -> None:
    completed = keepstep(*arguments)
    assert completed.returncode != 0
    assert message in completed.stderr
    assert "Traceback" not in completed.stderr


def test_error_names_a_port_that_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        completed = keepstep("run", "--rdzv-endpoint", endpoint, "elastic/cli/main.py")
    assert completed.returncode != 0
    assert "in use" in completed.stderr
    assert "Traceback" not in completed.stderr


def test_second_monitor_on_a_node_has_to_take_another_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        completed = keepstep("monitor", "--port", str(listener.getsockname()[1]))
    assert completed.returncode != 0
    assert "another --port" in completed.stderr
    assert "Traceback" not in completed.stderr


def test_script_that_fails_again_at_the_same_line_ends_the_job_with_its_traceback(
    tmp_path: Path,
) -> None:
    failing = script(
        tmp_path,
        "import os\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "    import no_such_module\n",
    )
    completed = keepstep("run", "--nproc-per-node", "2", "--max-restarts", "3", failing)
    assert completed.returncode == 1
    assert completed.stdout == "attempt 0\nattempt 1\n"
    message = completed.stderr[completed.stderr.index("keepstep: ") :]
    assert message.splitlines()[0].startswith("keepstep: rank 1 on ")
    assert f"(twice: ModuleNotFoundError at {failing}:4, before the first step;" in message
    assert message.splitlines()[1] == "Traceback (most recent call last):"
    assert "no_such_module" in completed.stderr
    assert "elastic/" not in completed.stderr


def test_first_failure_is_shown_at_once_by_the_scripts_own_hook_with_its_cause(
    tmp_path: Path,
) -> None:
    failing = script(
        tmp_path,
        "import atexit, os, sys, traceback\n"
        "def hook(*error):\n"
        # One write: the agent writes to the terminal as well.
        "    sys.stderr.write('HOOK ' + ''.join(traceback.format_exception(*error)))\n"
        "sys.excepthook = hook\n"
        "atexit.register(lambda: print('AT EXIT', os.path.isabs(__file__)))\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    try:\n"
        "        {}['wanted']\n"
        "    except KeyError as error:\n"
        "        raise ValueError('mine') from error\n",
    )
    logs = tmp_path / "logs"
    completed = keepstep(
        "run", "-t", "3", "-r", "3", "--log-dir", str(logs), os.path.relpath(failing, ROOT)
    )
    # The second attempt succeeds: what went wrong in the first is shown all the same.
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr.count("HOOK Traceback") == 1
    assert "KeyError: 'wanted'" in completed.stderr
    assert ": ValueError: mine" in completed.stderr
    assert completed.stdout == "AT EXIT True\n" * 2
    kept = [path.read_text() for path in logs.glob("*-stderr.log")]
    assert sum("KeyError: 'wanted'" in text and "HOOK Traceback" in text for text in kept) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "nosuchmodule"], "No module named nosuchmodule"),
        (["tests/integration/command/broken.txt"], "SyntaxError"),
    ],
)
def test_script_that_cannot_begin_is_tried_once(arguments: list[str], message: str) -> None:
    completed = keepstep("run", *arguments)
    assert completed.returncode == 1
    assert message in completed.stderr
    assert "generation 2" not in completed.stderr


def test_script_without_keepstep_gets_the_environment_of_torchrun_and_is_restarted(
    tmp_path: Path,
) -> None:
    plain = script(
        tmp_path,
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1); dist.all_reduce(total)\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "if attempt == 0 and os.environ['LOCAL_RANK'] == '1': sys.exit(3)\n"
        "dist.barrier()\n"
        "line = f\"total {int(total.item())} of {os.environ['WORLD_SIZE']} attempt {attempt}\"\n"
        # One write, because the ranks share the terminal.
        "sys.stdout.write(line + chr(10))\n",
    )
    completed = keepstep("run", "--nproc-per-node", "2", plain)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("total 2 of 2 attempt 1") == 2


def test_no_python_runs_a_program(tmp_path: Path) -> None:
    completed = keepstep("run", "--no-python", "sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout == "rank 0 of 1\n"


def test_checkpoint_location_that_cannot_be_written_ends_the_job_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    completed = keepstep(
        "run", "examples/train.py", "--steps", "3", "--checkpoint", str(tmp_path / "file" / "below")
    )
    assert completed.returncode == 1
    assert str(tmp_path / "file") in completed.stderr
    assert "generation 2" not in completed.stderr
    # The line of the script, and no frame of keepstep's own.
    assert "examples/train.py" in completed.stderr
    assert "snapshot_manager.py" not in completed.stderr


def test_second_job_with_the_same_name_is_rejected(
    tmp_path: Path, etcd_server: EmbeddedEtcd
) -> None:
    waiting = script(tmp_path, "import signal\nsignal.pause()\n")
    common = ["--store", etcd_server.url, "--job", "same", "--nnodes", "2:2"]
    first = subprocess.Popen(
        [sys.executable, "-P", "-m", "keepstep", "run", *common, waiting],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert first.stderr is not None
        assert "waiting for nodes" in "".join(first.stderr.readline() for _ in range(2))
        completed = keepstep("run", *common, "examples/train.py")
        assert completed.returncode != 0
        assert "choose another --job" in completed.stderr
        first.send_signal(signal.SIGINT)
        assert first.wait(patient(30)) == 128 + signal.SIGINT
    finally:
        first.kill()
        first.wait()
        if first.stderr is not None:
            first.stderr.close()


def test_two_interrupts_leave_no_process_and_no_file(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    agent = subprocess.Popen(
        [
            sys.executable, "-P", "-m", "keepstep", "run", "--nproc-per-node", "2",
            "examples/train.py", "--steps", "100000",
        ],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert agent.stdout is not None
        assert "step 10" in agent.stdout.readline()
        processes = psutil.Process(agent.pid).children(recursive=True)
        agent.send_signal(signal.SIGINT)
        agent.send_signal(signal.SIGINT)
        assert agent.wait(patient(30)) == 128 + signal.SIGINT
        _, alive = psutil.wait_procs(processes, timeout=patient(10))
        assert not alive
        # Only the user's secret is kept, for the next job.
        assert [
            path.name
            for path in (tmp_path / "keepstep").rglob("*")
            if path.is_file() or path.is_socket()
        ] == ["coordinator.secret"]
    finally:
        agent.kill()
        agent.wait()
        if agent.stdout is not None:
            agent.stdout.close()
