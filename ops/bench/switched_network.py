"""A network of one machine per rank, on one machine: namespaces joined by a switch in user space that delays, throttles, loses and cuts.

What `tc netem` does where the kernel has it. Every rank lives in a network namespace of its own with one TUN device; the switch, a process,
reads packets from all of them and hands each to its receiver when the pair's link says. Links are one way: (sender, receiver).
A link holds back what exceeds its rate as a long queue does, and does not reorder.

Needs root and /dev/net/tun; `is_possible` tells. `Network` owns the namespaces and the process, and takes both away.
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
_LINK = struct.Struct(
    "<dddd"
)  # delay in seconds, bytes a second (0: no limit), share lost, 1 if cut
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000


def is_possible() -> bool:
    return os.geteuid() == 0 and Path("/dev/net/tun").exists() and shutil.which("ip") is not None


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def enter(namespace: str) -> None:
    """Move this thread into a namespace."""
    with open(f"/var/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


class Network:
    """`size` machines and the switch between them."""

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
        """Say what a link does from now on; `rate` in bytes a second."""
        _LINK.pack_into(
            self._links,
            (sender * self.size + receiver) * _LINK.size,
            delay_s,
            rate,
            lost,
            float(cut),
        )

    def _device(self, rank: int) -> int:
        """Return the open TUN device of a rank, made by a child within the namespace: a device stays where it was made."""
        namespace = self.namespaces[rank]
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        try:
            enter(namespace)
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(
                device, _TUNSETIFF, struct.pack("16sH14x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
            )
        finally:
            ctypes.CDLL(None).setns(home, _CLONE_NEWNET)
            os.close(home)
        for told in (
            ["address", "add", f"{address(rank)}/24", "dev", DEVICE],
            ["link", "set", DEVICE, "mtu", str(MTU), "txqueuelen", "10000", "up"],
            ["link", "set", "lo", "up"],
        ):
            subprocess.run(["ip", "-n", namespace, *told], check=True)
        return device


def _serve(devices: list[int], links: mmap.mmap) -> None:
    size = len(devices)
    rank_of = {device: rank for rank, device in enumerate(devices)}
    chance = random.Random(1)
    free_s = [0.0] * (size * size)
    last_s = [0.0] * (size * size)
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    poll = select.poll()
    for device in devices:
        poll.register(device, select.POLLIN)

    def hand_over(receiver: int, packet: bytes) -> None:
        try:
            os.write(devices[receiver], packet)
        except BlockingIOError:
            pass  # Dropped, as a full queue drops.

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
                at = sender * size + receiver
                delay_s, rate, lost, cut = _LINK.unpack_from(links, at * _LINK.size)
                if cut or (lost and chance.random() < lost):
                    continue
                now_s = time.monotonic()
                if not delay_s and not rate and last_s[at] <= now_s:
                    hand_over(receiver, packet)
                    continue
                free_s[at] = max(now_s, free_s[at]) + (len(packet) / rate if rate else 0.0)
                last_s[at] = max(last_s[at], free_s[at] + delay_s)
                count += 1
                heapq.heappush(waiting, (last_s[at], count, receiver, packet))
        now_s = time.monotonic()
        while waiting and waiting[0][0] <= now_s:
            _, _, receiver, packet = heapq.heappop(waiting)
            hand_over(receiver, packet)


if __name__ == "__main__":
    sys.exit("this is a part of diagnosis.py")
