"""Holds what a doctor measures of its node and of its links. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkResult:
    """The performance of one link.

    Args:
        latency_s: the median time of a message there and back. It includes what both ends compute
            to encode, authenticate and decode the messages, about 0.1 ms on a common machine.
        send_rate: bytes a second from the node that measured to the other one. Computing and
            checking the authentication tags is included; it is much faster than one connection.
        receive_rate: bytes a second the other way.
        clock_offset_s: the other node's wall clock minus that of the node that measured, at the
            quickest message.
        clock_error_s: how far that may be off: half of that message's time.
    """

    latency_s: float
    send_rate: float
    receive_rate: float
    clock_offset_s: float
    clock_error_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulResult:
    """The matrix products of one device.

    Args:
        device: as PyTorch names it.
        flops: operations a second.
        is_right: whether every product was right.
        is_repeatable: whether repeated products had the same bits.
    """

    device: str
    flops: float
    is_right: bool
    is_repeatable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskResult:
    """The performance of a disk.

    Args:
        write_rate: bytes a second, fsync included.
        fsync_s: how long the fsync of one small write takes.
    """

    write_rate: float
    fsync_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeExamination:
    """Everything that one doctor measured.

    Args:
        address: HOST:PORT under which the others reach it.
        name: the name of its node.
        memory_rate: bytes a second.
        disk: None if the directory cannot be written to; then `errors` has the reason.
        matmuls: one for each device.
        loopback: of the node's own network stack; None if that failed.
        links: to the peers that it measured, by address.
        errors: what failed, by what it concerns: a peer's address, "disk" or "loopback".
    """

    address: str
    name: str
    memory_rate: float
    disk: DiskResult | None
    matmuls: tuple[MatmulResult, ...]
    loopback: LinkResult | None
    links: Mapping[str, LinkResult] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
