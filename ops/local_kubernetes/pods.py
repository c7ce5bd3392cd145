"""Runs pods as Linux namespaces: a network, a sandbox for each pod, and its containers.

A container has a mount namespace of its own: this machine's files, in a layer that is dropped when
it ends, with volumes mounted over them. The "image" is so what is installed here. Everything ends
with the thread that started it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ops.local_kubernetes.manifests import Identity, Manifest, command_line, environment

_PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "mount", "chroot")
_PREFIX = "10.89.0."
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")

_ROOT = """
set -e
base=$1; shift
mount -t tmpfs -o mode=755 layer "$base"
mkdir "$base/upper" "$base/work" "$base/root"
mount -t overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" image "$base/root"
mount --rbind /dev "$base/root/dev"
mount --rbind /sys "$base/root/sys"
mount -t proc proc "$base/root/proc"
while [ "$1" != -- ]; do
    target=$base/root$2
    if [ -d "$1" ]; then mkdir -p "$target"; else mkdir -p "${target%/*}"; touch "$target"; fi
    mount --bind "$1" "$target"
    shift 2
done
shift
exec chroot "$base/root" "$@"
"""


def not_possible() -> str | None:
    """Return why no pods can be run here; None if they can."""
    if os.geteuid() != 0:
        return "pods are namespaces here, which only root may make"
    lacking = [name for name in _PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed"
    trial = (
        "ip link add name b0 type bridge && mount -t tmpfs t /mnt && mkdir /mnt/u /mnt/w /mnt/r && "
        "mount -t overlay -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w o /mnt/r"
    )
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", trial],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces here: {done.stderr.strip()[-200:]}" if done.returncode else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Describes what containers find besides the files of this machine.

    Args:
        variables: of their environment.
        workdir: the folder in which commands start.
        mounts: folders or files of this machine, by their path in the container.
    """

    variables: Mapping[str, str]
    workdir: str
    mounts: Mapping[str, Path]


class Network:
    """A bridge in a network namespace, to which pods are connected; and the names of all pods.

    Args:
        directory: for the table of names.
    """

    def __init__(self, directory: Path) -> None:
        self.hosts = directory / "hosts"
        self.names: dict[str, str] = {}
        self._write()
        setup = "ip link add bridge type bridge && ip link set bridge up && echo && sleep infinity"
        self._holder = subprocess.Popen(
            [
                *_ENDS_WITH_US,
                "unshare",
                "--net",
                "--pid",
                "--fork",
                "--kill-child",
                "sh",
                "-c",
                setup,
            ],
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        self._count = 0

    def connect(self, sandbox: int) -> str:
        """Give the network namespace of a process an address, and return it."""
        self._count += 1
        address, pod_end, bridge_end = f"{_PREFIX}{self._count}", "eth0", f"v{self._count}"
        holder = str(_child(self._holder))
        for command in (
            f"ip link add {bridge_end} type veth peer name {pod_end} netns {sandbox}",
            f"ip link set {bridge_end} master bridge up",
        ):
            _run("nsenter", "-t", holder, "--net", *command.split())
        inside = (
            f"ip addr add {address}/24 dev {pod_end} && ip link set {pod_end} up && "
            "ip link set lo up"
        )
        _run("nsenter", "-t", str(sandbox), "--net", "sh", "-c", inside)
        return address

    def name(self, address: str, *names: str) -> None:
        """Let names lead to an address, and no longer to another one."""
        self.names |= dict.fromkeys(names, address)
        self._write()

    def close(self) -> None:
        """End the network."""
        self._holder.kill()
        self._holder.wait()

    def _write(self) -> None:
        # In place, for containers have the file mounted.
        lines = ["127.0.0.1 localhost", *(f"{ip} {name}" for name, ip in self.names.items())]
        with self.hosts.open("w") as file:
            file.write("\n".join(lines) + "\n")


class Sandbox:
    """The namespaces that the containers of a pod share.

    Args:
        hostname: of the pod.
        network: to which it is connected.
    """

    def __init__(self, hostname: str, network: Network) -> None:
        # The shell waits for orphans of the containers, as a pod's pause process does.
        self._holder = subprocess.Popen(
            [
                *_ENDS_WITH_US, "unshare", "--net", "--ipc", "--uts", "--pid", "--fork",
                "--kill-child", "sh", "-c", f"hostname {hostname}; echo; sleep infinity & wait",
            ],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        self.pid = _child(self._holder)
        self.ip = network.connect(self.pid)

    def close(self) -> None:
        """Kill what is in it."""
        self._holder.kill()
        self._holder.wait()


class Container:
    """One run of a container.

    Args:
        pod: specification of its pod.
        specification: its own.
        identity: of its pod.
        sandbox: of its pod.
        objects: the data of ConfigMaps and Secrets.
        volumes: folders of this machine, by the name of the volume.
        image: what it finds there.
        network: for the table of names.
        directory: empty, for its layer.
        log: file that its output is appended to.
    """

    def __init__(
        self,
        pod: Manifest,
        specification: Manifest,
        identity: Identity,
        sandbox: Sandbox,
        objects: Mapping[tuple[str, str], Mapping[str, str]],
        volumes: Mapping[str, Path],
        image: Image,
        network: Network,
        directory: Path,
        log: Path,
    ) -> None:
        self.name = specification["name"]
        self.variables = {**image.variables, **environment(specification, identity, objects)}
        mounts = {
            "/etc/hosts": network.hosts,
            **image.mounts,
            **{
                it["mountPath"]: volumes[it["name"]] for it in specification.get("volumeMounts", ())
            },
        }
        directory.mkdir(parents=True)
        shares_processes = pod.get("shareProcessNamespace", False)
        self._user = _user(pod["securityContext"])
        self._workdir = image.workdir
        entered = ["nsenter", "-t", str(sandbox.pid), "--net", "--ipc", "--uts"]
        separate = ["unshare", "--mount", "--propagation", "private"]
        if shares_processes:
            entered.append("--pid")
        else:
            separate += ["--pid", "--fork", "--kill-child"]
        command = [
            *_ENDS_WITH_US, *entered, *separate, "sh", "-c", _ROOT, "root", str(directory),
            *(str(part) for path, source in mounts.items() for part in (source, path)), "--",
            *self._as_user(command_line(specification, self.variables)),
        ]  # fmt: skip
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._main = _child(self._process)

    def exit_code(self) -> int | None:
        """Return the exit status, 128 and the signal's number for a signal; None if it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the container's main process."""
        if self._process.poll() is None:
            try:
                os.kill(self._main, number)
            except ProcessLookupError:
                pass  # It has just ended.

    def kill(self) -> None:
        """Kill all processes of the container, which share its mount namespace."""
        if self._process.poll() is not None:
            return
        mounts = _mount_namespace(self._main)
        # Until it has one of its own it is in this machine's, with everything else.
        if mounts in (None, _mount_namespace(os.getpid())):
            self._process.kill()
            self.send(signal.SIGKILL)
        else:
            for process in psutil.process_iter():
                if _mount_namespace(process.pid) == mounts:
                    with suppress(psutil.Error):
                        process.kill()
        self._process.wait()

    def execute(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start another process in the container, as `kubectl exec` does."""
        return subprocess.Popen(
            [
                *_ENDS_WITH_US, "nsenter", "-t", str(self._main), "--mount", "--net", "--ipc",
                "--uts", "--pid", "--root", "--wd", *self._as_user(command),
            ],
            env=self.variables,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )  # fmt: skip

    def _as_user(self, command: Sequence[str]) -> list[str]:
        change = 'cd "$0" && exec "$@"'
        # Once more, for a change of the user takes it back.
        return [*self._user, *_ENDS_WITH_US, "sh", "-c", change, self._workdir, *command]


def _mount_namespace(pid: int) -> int | None:
    """Return the number of a process's mount namespace; None if it has ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/mnt").st_ino
    except OSError:
        return None


def _user(context: Manifest) -> list[str]:
    capabilities = ["--inh-caps=-all", "--bounding-set=-all"]
    if not (_is_open(Path(__file__)) and _is_open(Path(sys.executable))):
        # The tree or Python is in a folder that is closed to other users, which an image's is not.
        capabilities = ["--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"]
    return [
        "setpriv", "--reuid", str(context["runAsUser"]), "--regid", str(context["runAsGroup"]),
        "--groups", str(context["fsGroup"]), "--no-new-privs", *capabilities, "--",
    ]  # fmt: skip


def _is_open(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in path.resolve().parents)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _child(process: subprocess.Popen[Any]) -> int:
    """Return the child of a process that will have one, or the process itself if it ends."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        with suppress(FileNotFoundError):
            if found := children.read_text().split():
                return int(found[0])
        time.sleep(0.002)
    return process.pid
