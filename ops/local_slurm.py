"""Runs Slurm's own daemons on this machine, as several nodes; tests and a benchmark submit jobs.

Each node has a network namespace with an address of its own behind a bridge, and a name by which
the others find it. No service of the system is used: the daemons have folders of their own, and end
with the context. It needs root, for the namespaces. Nothing protects the cluster from other users
of the machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from examples.local_cluster import process_tree

DAEMONS = ("slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun", "scontrol", "scancel", "sinfo")
NETWORK = ("ip", "nsenter", "unshare")
PACKAGE = "slurm-wlm"
_SYSTEM_PATHS = ("/usr/sbin", "/usr/local/sbin")
_PAUSE_S = 0.1

_CONFIGURATION = """\
ClusterName=local
SlurmctldHost=localhost({controller})
SlurmctldPort={port}
# Jobs of several clusters on this machine differ, as those of one do.
FirstJobId={first_job}
SlurmUser=root
AuthType=auth/none
# A job that is requeued starts after this time, by default 120 s.
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=1
SlurmdTimeout={node_timeout_s}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def not_installed() -> str | None:
    """Return why no cluster can be started here; None if all programs are here."""
    lacking = [name for name in (*DAEMONS, *CLIENTS) if program(name) is None]
    if lacking:
        return f"{', '.join(lacking)} of Slurm not installed: apt-get install {PACKAGE}"
    if os.geteuid() != 0:
        return "Slurm's nodes on one machine need namespaces, which root may make"
    lacking = [name for name in NETWORK if program(name) is None]
    return (
        f"{', '.join(lacking)} not installed: apt-get install iproute2 util-linux"
        if lacking
        else None
    )


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
        # Of this process alone, for others may run a cluster at the same time.
        self._bridge = f"ks{os.getpid()}"
        self._subnet = f"10.78.{os.getpid() % 250}"
        self._controller = f"{self._subnet}.254"

    @property
    def configuration(self) -> Path:
        """The path that SLURM_CONF names."""
        return self.directory / "slurm.conf"

    def __enter__(self) -> Self:
        (self.directory / "state").mkdir(parents=True, exist_ok=True)
        names = (f"{self.address(node)} {node}\n" for node in self.nodes)
        (self.directory / "hosts").write_text(f"127.0.0.1 localhost\n{''.join(names)}")
        lines = (f"NodeName={node} NodeAddr={self.address(node)} CPUs=1" for node in self.nodes)
        self.configuration.write_text(
            _CONFIGURATION.format(
                directory=self.directory,
                controller=self._controller,
                port=_free_port(),
                first_job=1000 * (os.getpid() % 60000),
                node_timeout_s=self._node_timeout_s,
                nodes="\n".join(lines),
            )
        )
        try:
            self._connect()
            self._start("slurmctld", [])
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

    def address(self, node: str) -> str:
        """Return the address of a node."""
        return f"{self._subnet}.{self.nodes.index(node) + 1}"

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        (self.directory / f"spool-{node}").mkdir(exist_ok=True)
        # `ip netns exec` would take /sys/fs/cgroup away, which slurmd wants to see.
        network = f"--net=/run/netns/{self._namespace(node)}"
        named = f'mount --bind {self.directory}/hosts /etc/hosts && hostname {node} && exec "$@"'
        within = ["nsenter", network, "unshare", "--mount", "--uts", "sh", "-c", named, "sh"]
        self._start("slurmd", within, node)

    def _start(self, name: str, within: list[str], node: str | None = None) -> None:
        path = program(name)
        assert path is not None, not_installed()
        of_node = [] if node is None else ["-N", node]
        with (self.directory / f"{node or name}.out").open("ab") as output:
            self._daemons[node or name] = subprocess.Popen(
                [*within, path, "-D", "-f", self.configuration, *of_node],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _namespace(self, node: str) -> str:
        return f"{self._bridge}-{node}"

    def _connect(self) -> None:
        """Give every node a network namespace, and connect them by a bridge of this machine."""
        ip("link", "add", self._bridge, "type", "bridge")
        ip("address", "add", f"{self._controller}/24", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")
        for node in self.nodes:
            namespace, port = self._namespace(node), f"{self._bridge}{node}"
            ip("netns", "add", namespace)
            ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("link", "set", port, "master", self._bridge, "up")
            ip("-n", namespace, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
            ip("-n", namespace, "link", "set", "lo", "up")

    def _disconnect(self) -> None:
        for node in self.nodes:
            ip("netns", "delete", self._namespace(node), check=False)
        ip("link", "delete", self._bridge, check=False)

    def on_node(self, node: str, *command: str) -> list[str]:
        """Return a command line that runs a command on a node, outside of any job."""
        target = f"--target={self._daemons[node].pid}"
        return ["nsenter", target, "--mount", "--uts", "--net", "--", *command]

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
        self._disconnect()


def ip(*arguments: str, check: bool = True) -> None:
    """Run ip(8)."""
    path = program("ip")
    assert path is not None, not_installed()
    subprocess.run([path, *arguments], check=check, stderr=None if check else subprocess.DEVNULL)


def _free_port() -> int:
    # slurmctld listens on all addresses of this machine, and another cluster's may, too.
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


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
