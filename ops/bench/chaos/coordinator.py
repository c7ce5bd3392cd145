"""Runs an etcd of some members, each with its own address, that faults stop, kill and cut off."""

from __future__ import annotations

import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from keepstep.elastic.store.embedded import binary

MEMBERS = 3
"""How many members a campaign's etcd has."""


class Coordinator:
    """The members' processes.

    Args:
        directory: their data and logs.
        addresses: HOST:PORT for clients and for peers, for each member.
        prefixes: what each member's command begins with, such as `nsenter`.
        environment: of all members.
    """

    def __init__(
        self,
        directory: Path,
        addresses: Sequence[tuple[str, str]],
        prefixes: Sequence[Sequence[str]],
        environment: dict[str, str],
    ) -> None:
        self.members = range(len(addresses))
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._clients = [client for client, _ in addresses]
        self._peers = [peer for _, peer in addresses]
        self._prefixes = prefixes
        self._environment = environment
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        """The URL for `keepstep run --store`, with all members."""
        return f"etcd://{','.join(self._clients)}"

    def start(self, member: int) -> None:
        """Start a member, with the data that it has."""
        client, peer = f"http://{self._clients[member]}", f"http://{self._peers[member]}"
        cluster = ",".join(f"m{number}=http://{peer}" for number, peer in enumerate(self._peers))
        with (self._directory / f"{member}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen(
                [
                    *self._prefixes[member], binary(), "--name", f"m{member}",
                    "--data-dir", str(self._directory / str(member)),
                    "--log-level", "error", "--unsafe-no-fsync",
                    "--listen-client-urls", client, "--advertise-client-urls", client,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", cluster,
                    # Members elect another leader when a loaded machine starves one of them.
                    "--heartbeat-interval", "200", "--election-timeout", "2000",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=self._environment, start_new_session=True,
            )  # fmt: skip

    def start_missing(self) -> None:
        """Start the members that have no process."""
        for member in self.members:
            if member not in self._processes:
                self.start(member)

    def kill(self, *members: int) -> None:
        """Kill members with SIGKILL, all at once."""
        killed = [self._processes.pop(member) for member in members if member in self._processes]
        for process in killed:
            process.send_signal(signal.SIGKILL)
        for process in killed:
            process.wait()

    def lose(self) -> None:
        """Kill all members and delete their data."""
        self.kill(*self.members)
        for member in self.members:
            shutil.rmtree(self._directory / str(member))

    def stop(self, *members: int) -> None:
        """Suspend members (SIGSTOP)."""
        self._signal(signal.SIGSTOP, members)

    def resume(self, *members: int) -> None:
        """Continue suspended members (SIGCONT)."""
        self._signal(signal.SIGCONT, members)

    def is_healthy(self, member: int) -> bool:
        """Whether a member serves, which takes a majority of all."""
        try:
            url = f"http://{self._clients[member]}/health"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return b'"health":"true"' in answer.read()
        except OSError:
            return False

    def processes(self) -> set[int]:
        """Return the ids of the members' processes."""
        return {process.pid for process in self._processes.values()}

    def close(self) -> None:
        """Kill all members."""
        self.kill(*list(self._processes))

    def _signal(self, number: signal.Signals, members: Sequence[int]) -> None:
        for member in members:
            if member in self._processes:
                self._processes[member].send_signal(number)
