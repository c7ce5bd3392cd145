"""Connects network namespaces by a switch in user space that delays, throttles, drops and cuts.

It replaces `tc netem` where the kernel lacks it. Every rank has a network namespace with one TUN
device. The switch, a process, reads packets from all of them and delivers each to its receiver
according to the pair's link. Links have one direction: (sender, receiver). A link queues what
exceeds its rate, without a limit, and does not reorder.

It needs root and /dev/net/tun; see `is_possible`. `Network` owns the namespaces and the process,
and removes both at its end.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import mmap
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

DEVICE = "switched"
MTU = 9000
# Delay in seconds, bytes per second (0: no limit), share of packets lost, 1 if cut.
_LINK = struct.Struct("<dddd")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000


def is_possible() -> bool:
    """Whether this machine and user can have a `Network`."""
    return os.geteuid() == 0 and Path("/dev/net/tun").exists() and shutil.which("ip") is not None


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def enter(namespace: str) -> None:
    """Move this thread into a namespace."""
    with open(f"/var/run/netns/{namespace}") as file:
        enter_open(file.fileno())


def enter_open(namespace: int) -> None:
    """Move this thread into a namespace, given as an open file."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")


class Network:
    """A network namespace for each of `size` ranks, and the switch between them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.namespaces = [f"keepstep-{os.getpid()}-{rank}" for rank in range(size)]
        self._links = mmap.mmap(-1, size * size * _LINK.size)
        self._switch = 0

    def __enter__(self) -> Network:
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "add", namespace], check=True)
        devices = [self._device(rank) for rank in range(self.size)]
        self._switch = os.fork()
        if self._switch == 0:
            try:
                _serve(devices, self._links)
            finally:
                os._exit(1)
        for device in devices:
            os.close(device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._switch:
            os.kill(self._switch, 9)
            os.waitpid(self._switch, 0)
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False)

    def link(
        self,
        sender: int,
        receiver: int,
        *,
        delay_s: float = 0.0,
        rate: float = 0.0,
        lost: float = 0.0,
        cut: bool = False,
    ) -> None:
        """Set a link's properties from now on; `rate` in bytes per second, 0: no limit."""
        _LINK.pack_into(
            self._links,
            (sender * self.size + receiver) * _LINK.size,
            delay_s,
            rate,
            lost,
            float(cut),
        )

    def _device(self, rank: int) -> int:
        """Return the open TUN device of a rank, created in its namespace, where it stays."""
        namespace = self.namespaces[rank]
        own_namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
        try:
            enter(namespace)
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(
                device, _TUNSETIFF, struct.pack("16sH14x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
            )
        finally:
            enter_open(own_namespace)
            os.close(own_namespace)
        for command in (
            ["address", "add", f"{address(rank)}/24", "dev", DEVICE],
            ["link", "set", DEVICE, "mtu", str(MTU), "txqueuelen", "10000", "up"],
            ["link", "set", "lo", "up"],
        ):
            subprocess.run(["ip", "-n", namespace, *command], check=True)
        return device


def _serve(devices: list[int], links: mmap.mmap) -> None:
    size = len(devices)
    rank_of = {device: rank for rank, device in enumerate(devices)}
    rng = random.Random(1)
    free_s = [0.0] * (size * size)
    last_s = [0.0] * (size * size)
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    poll = select.poll()
    for device in devices:
        poll.register(device, select.POLLIN)

    def deliver(receiver: int, packet: bytes) -> None:
        try:
            os.write(devices[receiver], packet)
        except BlockingIOError:
            pass  # The packet is dropped: the receiver's queue is full.

    while True:
        timeout_ms = None if not waiting else max(0.0, 1e3 * (waiting[0][0] - time.monotonic()))
        for device, _ in poll.poll(timeout_ms):
            sender = rank_of[device]
            for _ in range(64):
                try:
                    packet = os.read(device, 65536)
                except BlockingIOError:
                    break
                receiver = packet[19] - 1 if packet[0] >> 4 == 4 else -1
                if not 0 <= receiver < size:
                    continue
                link = sender * size + receiver
                delay_s, rate, lost, cut = _LINK.unpack_from(links, link * _LINK.size)
                if cut or (lost and rng.random() < lost):
                    continue
                now_s = time.monotonic()
                if not delay_s and not rate and last_s[link] <= now_s:
                    deliver(receiver, packet)
                    continue
                free_s[link] = max(now_s, free_s[link]) + (len(packet) / rate if rate else 0.0)
                last_s[link] = max(last_s[link], free_s[link] + delay_s)
                count += 1
                heapq.heappush(waiting, (last_s[link], count, receiver, packet))
        now_s = time.monotonic()
        while waiting and waiting[0][0] <= now_s:
            _, _, receiver, packet = heapq.heappop(waiting)
            deliver(receiver, packet)


if __name__ == "__main__":
    sys.exit("this is a part of diagnosis.py")
