"""A cluster for tests, whose waits are patient, and which shows what waits when they end."""

import asyncio
import json
import signal
import subprocess
from collections.abc import Callable

import psutil

from examples.local_cluster import LocalCluster, process_tree
from keepstep.elastic.rendezvous.view import View
from keepstep.monitor.node.stacks import dump
from tests.adaptive_timeouts import patient


class PatientCluster(LocalCluster):
    """A cluster whose limits of waits grow with the machine's load."""

    def wait(self, node: str, timeout_s: float) -> int:
        """See `LocalCluster.wait`."""
        try:
            return super().wait(node, patient(timeout_s))
        except subprocess.TimeoutExpired as error:
            error.add_note(f"{self._stacks()}\n{self.output()}")
            raise

    def wait_until(self, condition: Callable[[View], bool], timeout_s: float) -> View:
        """See `LocalCluster.wait_until`."""
        try:
            return super().wait_until(condition, patient(timeout_s))
        except TimeoutError as error:
            error.add_note(self._stacks())
            raise

    def terminate_all(self, node: str) -> None:
        """Send SIGTERM to every process of a node at once, as service managers do."""
        for process in process_tree(self.agents[node].pid):
            process.send_signal(signal.SIGTERM)

    def _stacks(self) -> str:
        """Return what each process waits in; agents print their tasks to their output."""
        processes = [it for agent in self.agents.values() for it in process_tree(agent.pid)]
        return "\n".join(_stacks_of(process) for process in processes)


def _stacks_of(process: psutil.Process) -> str:
    try:
        command = process.cmdline()
        if "run" in command and "keepstep" in command:
            process.send_signal(signal.SIGUSR2)
    except psutil.Error as error:
        return f"--- {error}"
    stacks = asyncio.run(dump(process.pid, patient(20)))
    return f"--- {process.pid} {' '.join(command)[:200]}\n{json.dumps(stacks, indent=1)}"
