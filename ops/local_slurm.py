"""Runs Slurm's own daemons on this machine, as several nodes; tests and a benchmark submit jobs.

No service of the system is used: the daemons run as this user, with ports and folders of their own,
and end with the context. Nothing protects this cluster from other users of the machine.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from examples.local_cluster import process_tree

DAEMONS = ("slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun", "scontrol", "scancel", "sinfo")
PACKAGE = "slurm-wlm"
_SYSTEM_PATHS = ("/usr/sbin", "/usr/local/sbin")
_PAUSE_S = 0.1

_CONFIGURATION = """\
ClusterName=local
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
# A job that is requeued starts after this time.
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=1
SlurmdTimeout={node_timeout_s}
KillWait=30
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def not_installed() -> str | None:
    """Return why no cluster can be started here; None if all programs are here."""
    lacking = [name for name in (*DAEMONS, *CLIENTS) if program(name) is None]
    if lacking:
        return f"{', '.join(lacking)} of Slurm not installed: apt-get install {PACKAGE}"
    return None


def program(name: str) -> str | None:
    """Return the path of a program of Slurm, which an ordinary user's PATH may not show."""
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *_SYSTEM_PATHS)))


class LocalSlurm:
    """A Slurm cluster, from the beginning of the context to its end; that kills all of its jobs.

    Args:
        directory: for configuration, logs and state.
        nodes: names of the nodes, which all are this machine.
        node_timeout_s: seconds after which a node whose daemon does not answer is down.
    """

    def __init__(
        self, directory: Path, nodes: tuple[str, ...] = ("n1", "n2"), *, node_timeout_s: int = 10
    ) -> None:
        self.directory = directory
        self.nodes = nodes
        self._node_timeout_s = node_timeout_s
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def configuration(self) -> Path:
        """The path that SLURM_CONF names."""
        return self.directory / "slurm.conf"

    def __enter__(self) -> Self:
        controller_port, *ports = _free_ports(1 + len(self.nodes))
        lines = (
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=1"
            for node, port in zip(self.nodes, ports, strict=True)
        )
        (self.directory / "state").mkdir(parents=True, exist_ok=True)
        self.configuration.write_text(
            _CONFIGURATION.format(
                user=getpass.getuser(),
                directory=self.directory,
                controller_port=controller_port,
                node_timeout_s=self._node_timeout_s,
                nodes="\n".join(lines),
            )
        )
        try:
            self._start("slurmctld")
            for node in self.nodes:
                self.start_node(node)
            self.wait_until(lambda: self.idle_nodes() == set(self.nodes), 60.0, "idle nodes")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        (self.directory / f"spool-{node}").mkdir(exist_ok=True)
        self._start("slurmd", node)

    def _start(self, name: str, node: str | None = None) -> None:
        path = program(name)
        assert path is not None, not_installed()
        of_node = [] if node is None else ["-N", node]
        with (self.directory / f"{node or name}.out").open("ab") as output:
            self._daemons[node or name] = subprocess.Popen(
                [path, "-D", "-f", self.configuration, *of_node],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def call(self, name: str, *arguments: str | Path, **environment: str) -> str:
        """Run a command of Slurm and return what it prints.

        Raises:
            subprocess.CalledProcessError: it failed; its notes have the command's messages.
        """
        path = program(name)
        assert path is not None, not_installed()
        try:
            return subprocess.run(
                [path, *arguments],
                env={**os.environ, "SLURM_CONF": str(self.configuration), **environment},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr)
            raise

    def submit(self, *arguments: str | Path, **environment: str) -> str:
        """Submit a batch job by sbatch's arguments; return its id."""
        return self.call("sbatch", "--parsable", *arguments, **environment).strip()

    def job(self, job: str) -> dict[str, str]:
        """Return what `scontrol show job` shows of a job, such as `JobState`."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def idle_nodes(self) -> set[str]:
        """Return the nodes that are up and run nothing; none while the controller is starting."""
        try:
            lines = self.call("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        except subprocess.CalledProcessError:
            return set()
        return {node for node, state in map(str.split, lines) if state == "idle"}

    def processes_of(self, node: str | None = None) -> list[psutil.Process]:
        """Return the processes of jobs on a node, or on all of them, and the daemons of steps."""
        variable = f"SLURM_CONF={self.configuration}".encode()
        processes = {it: _variables_of(it) for it in psutil.process_iter()}
        of_cluster = {it for it, variables in processes.items() if variable in variables}
        if node is None:
            return list(of_cluster)
        # What a node's daemon has started has the node's name, but for the daemons of steps.
        variable = f"SLURMD_NODENAME={node}".encode()
        of_node = {it for it in of_cluster if variable in processes[it]}
        return list(of_node | {it for it in map(_parent_of, of_node) if it in of_cluster})

    def lose_node(self, node: str) -> float:
        """Kill everything on a node at once, its daemon included, as if its power failed.

        Returns the time in monotonic seconds.
        """
        daemon = self._daemons.pop(node)
        at_s = time.monotonic()
        for process in [*process_tree(daemon.pid), *self.processes_of(node)]:
            _kill(process)
        daemon.wait()
        return at_s

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait for a condition.

        Raises:
            TimeoutError: it did not hold in time; the message has the end of the daemons' logs.
        """
        until_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > until_s:
                raise TimeoutError(f"no {what} within {timeout_s:.0f} s:\n{self.logs()}")
            time.sleep(_PAUSE_S)

    def logs(self) -> str:
        """Return the end of every daemon's log."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for pattern in ("*.log", "*.out")
            for path in sorted(self.directory.glob(pattern))
        )

    def close(self) -> None:
        """Kill all jobs and daemons."""
        for daemon in self._daemons.values():
            for process in process_tree(daemon.pid):
                _kill(process)
            daemon.wait()
        self._daemons.clear()
        # Until nothing is left: one of them may have started another meanwhile.
        while processes := self.processes_of():
            for process in processes:
                _kill(process)
            psutil.wait_procs(processes, timeout=1.0)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for it in sockets:
            it.bind(("127.0.0.1", 0))
        return [it.getsockname()[1] for it in sockets]


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass  # It has ended meanwhile.


def _variables_of(process: psutil.Process) -> list[bytes]:
    # psutil would stop at the title that a step's daemon has written over its first variables.
    try:
        return Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # It has ended, or is another user's.


def _parent_of(process: psutil.Process) -> psutil.Process | None:
    try:
        return process.parent()
    except psutil.NoSuchProcess:
        return None
