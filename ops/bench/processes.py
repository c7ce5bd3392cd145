"""Runs the processes of a benchmark's job, and kills them with their descendants."""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import psutil

from examples.local_cluster import process_tree


def python_path(*places: Path) -> str:
    """Return the value of PYTHONPATH by which processes import from these places first."""
    known = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, places), *([known] if known else [])])


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants with SIGKILL."""
    for process in process_tree(pid):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


class Processes:
    """The processes of a job by node, until closed.

    Args:
        directory: where the output of each process goes, to a file of its name.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._of_node: dict[int, dict[str, subprocess.Popen[bytes]]] = defaultdict(dict)

    def run(self, node: int, name: str, command: Sequence[str], **environment: str) -> None:
        """Start a process of a node; one of this name that is ending is waited for."""
        predecessor = self._of_node[node].pop(name, None)
        if predecessor is not None:
            predecessor.wait()
        with (self._directory / f"{name}.log").open("ab") as output:
            self._of_node[node][name] = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **environment},
            )  # fmt: skip

    def pid(self, node: int, name: str) -> int:
        """Return the id of a process of a node."""
        return self._of_node[node][name].pid

    def kill(self, node: int) -> None:
        """Kill all processes of a node."""
        for process in self._of_node.pop(node, {}).values():
            kill_tree(process.pid)
            process.wait()

    def ended(self) -> list[tuple[int, str]]:
        """Return the nodes and names of processes that have ended by themselves."""
        return [
            (node, name)
            for node, processes in self._of_node.items()
            for name, process in processes.items()
            if process.poll() is not None
        ]

    @property
    def is_over(self) -> bool:
        """Whether a process has ended, which nobody starts again."""
        return bool(self.ended())

    def output(self) -> str:
        """Return the end of every process's output."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}"
            for path in sorted(self._directory.glob("*.log"))
        )

    def close(self) -> None:
        """Kill all processes."""
        for node in list(self._of_node):
            self.kill(node)
