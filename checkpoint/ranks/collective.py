"""Messages between the ranks that save or load together, over torch's default process group.

Messages are bytes in tensors, mostly JSON. Every rank must make the same calls in the same order.
Without a process group, the one process is rank 0.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from keepstep import torch_internals
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.live.tensors import LiveTensor, bytes_of

Bytes = npt.NDArray[np.uint8]

_LENGTH_NBYTES = 8
_INLINE_NBYTES = 1024
"""What of a message goes with its length. A collective costs more than these bytes."""

_HEADS_NBYTES = 64 * 2**10
"""What goes with the lengths of a rank's messages to all ranks, of all of them together."""

_LEAST_ROOM_NBYTES = 1024
"""What there has to be room for with a message, for it to be sent from each rank to each."""

_BROADCAST_HEAD_NBYTES = 256 * 2**10
"""What of rank 0's message to all ranks goes with its length."""

_DIGEST_NBYTES = 16

_NUMBER = np.dtype("<i8")


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if _is_collective() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if _is_collective() else 1


def default_store() -> Store | None:
    """Return the store that the process group was made with; None without a process group."""
    return torch_internals.default_store() if _is_collective() else None


def all_gather_json(message: Json) -> list[Json]:
    """Send this rank's message to all ranks, and return all ranks' messages, in order of ranks.

    Messages of up to a kilobyte take one collective, longer ones a second for what is left.
    """
    data = json.dumps(message).encode()
    if not _is_collective():
        return [json.loads(data)]
    return _decoded(data, _all_gather(_head_of(data), _LENGTH_NBYTES + _INLINE_NBYTES))


def room_beside_message() -> int:
    """Return how many bytes for each rank `exchange_beside_json` has room for.

    Nothing if there are many ranks: a message from each to each costs more than to gather one.
    """
    room = _HEADS_NBYTES // world_size()
    return room if room >= _LEAST_ROOM_NBYTES else 0


def exchange_beside_json(
    message: Json, contents: Sequence[memoryview]
) -> tuple[list[Json], list[memoryview]]:
    """Send this rank's message to all ranks, and content i to rank i.

    Messages of up to a kilobyte take one collective together with the contents.

    A rank may send no contents to any; then the others get bytes that mean nothing, as they do
    where there is no room.

    Args:
        message: as for `all_gather_json`.
        contents: of at most `room_beside_message` bytes each; one for each rank, or none at all.

    Returns:
        All ranks' messages, and what they sent to this rank, padded; in order of ranks.
    """
    if not _is_collective() or room_beside_message() == 0:
        return all_gather_json(message), list(contents)
    data = json.dumps(message).encode()
    head = np.frombuffer(_head_of(data), np.uint8)
    begin = _LENGTH_NBYTES + _INLINE_NBYTES
    rows = np.zeros((world_size(), begin + room_beside_message()), np.uint8)
    rows[:, : len(head)] = head
    for row, content in zip(rows[:, begin:], contents, strict=False):
        row[: content.nbytes] = content
    sent = torch.from_numpy(rows).to(_device())
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    got = received.cpu().numpy()
    messages = _decoded(data, [row.tobytes() for row in got[:, :begin]])
    return messages, [row.data for row in got[:, begin:]]


def union_of_all_ranks(texts: Iterable[str]) -> set[str]:
    """Return the texts that any rank has.

    Most ranks have the same ones, as the names of a model, or one of a few lists, as stages have:
    each list is sent once, so that no rank receives as much as all ranks have.
    """
    own_texts = sorted(set(texts))
    if not _is_collective():
        return set(own_texts)
    own = json.dumps(own_texts).encode()
    own_digest = hashlib.blake2b(own, digest_size=_DIGEST_NBYTES).digest()
    heads = _all_gather(
        len(own).to_bytes(_LENGTH_NBYTES, "little") + own_digest, _LENGTH_NBYTES + _DIGEST_NBYTES
    )
    senders: dict[bytes, int] = {}
    for sender, head in enumerate(heads):
        senders.setdefault(head, sender)
    union = set(own_texts)
    if len(senders) == 1:
        return union
    for head, sender in senders.items():
        nbytes = int.from_bytes(head[:_LENGTH_NBYTES], "little")
        sent = own if sender == rank() else bytes(nbytes)
        content = torch.frombuffer(bytearray(sent), dtype=torch.uint8).to(_device())
        dist.broadcast(content, src=sender)
        union.update(json.loads(content.cpu().numpy().tobytes()))
    return union


def are_so_on_any_rank(flags: Sequence[bool]) -> list[bool]:
    """Return for each flag whether it is set on any rank."""
    if not _is_collective():
        return list(flags)
    counts = torch.tensor([int(flag) for flag in flags], device=_device())
    dist.all_reduce(counts)
    return [count > 0 for count in counts.tolist()]


@dataclass(frozen=True, slots=True)
class Heads:
    """What all ranks have sent to this one in one collective, in order of ranks.

    `contents` are the messages; None, on all ranks alike, if one of any rank's was too long.
    `nbytes` are their lengths. `has_failed` is whether it is so on any rank.
    """

    contents: list[memoryview] | None
    nbytes: list[int]
    has_failed: bool


def exchange_heads(messages: Sequence[bytes], *, has_failed: bool) -> Heads:
    """Send message i to rank i with its length, if all messages of all ranks are short.

    Args:
        messages: one for each rank.
        has_failed: told to all ranks.
    """
    nbytes = [len(message) for message in messages]
    if not _is_collective():
        return Heads([memoryview(messages[0])], nbytes, has_failed)
    room = _HEADS_NBYTES // len(messages)
    numbers_nbytes = 3 * _NUMBER.itemsize
    rows = np.zeros((len(messages), numbers_nbytes + room), np.uint8)
    rows[:, :numbers_nbytes].view(_NUMBER)[:] = [[n, max(nbytes), has_failed] for n in nbytes]
    if max(nbytes) <= room:
        for row, message in zip(rows[:, numbers_nbytes:], messages, strict=True):
            row[: len(message)] = np.frombuffer(message, np.uint8)
    sent = torch.from_numpy(rows).to(_device())
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    got = received.cpu().numpy()
    numbers = got[:, :numbers_nbytes].view(_NUMBER).tolist()
    contents = None
    if max(longest for _, longest, _ in numbers) <= room:
        contents = [
            row[:count].data
            for row, (count, *_) in zip(got[:, numbers_nbytes:], numbers, strict=True)
        ]
    return Heads(contents, [row[0] for row in numbers], any(row[2] for row in numbers))


def broadcast_head(message: bytes) -> tuple[int, memoryview]:
    """Send the beginning of rank 0's message to all ranks; return its length, and the beginning.

    Args:
        message: on rank 0, the message; anything on the others.
    """
    if not _is_collective():
        return len(message), memoryview(message)
    buffer = np.zeros(_NUMBER.itemsize + _BROADCAST_HEAD_NBYTES, np.uint8)
    if rank() == 0:
        head = message[:_BROADCAST_HEAD_NBYTES]
        buffer[: _NUMBER.itemsize].view(_NUMBER)[0] = len(message)
        buffer[_NUMBER.itemsize :][: len(head)] = np.frombuffer(head, np.uint8)
    on_device = torch.from_numpy(buffer).to(_device())
    dist.broadcast(on_device, src=0)
    got = on_device.cpu().numpy()
    nbytes = int(got[: _NUMBER.itemsize].view(_NUMBER)[0])
    return nbytes, got[_NUMBER.itemsize :][:nbytes].data


def on_group_device(content: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor of bytes where the back end takes it from: itself, or a copy.

    `broadcast_bytes` needs it. So that memory is lacking is known before anybody waits for it.
    """
    if not _is_collective() or _device() == "cpu":
        return content
    return content.to(_device())


def broadcast_bytes(content: torch.Tensor, on_device: torch.Tensor) -> None:
    """Fill a CPU tensor of bytes on all ranks with rank 0's.

    Args:
        content: the tensor.
        on_device: what `on_group_device` has returned for it; it is overwritten.
    """
    if not _is_collective():
        return
    dist.broadcast(on_device, src=0)
    if on_device is not content:
        content.copy_(on_device)


def exchange_numbers(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Send row i to rank i, and return the rows that all ranks sent to this one, in their order.

    All rows of all ranks have the same length.
    """
    if not _is_collective():
        return [list(rows[0])]
    sent = torch.tensor(rows, dtype=torch.int64, device=_device())
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return [list(map(int, row)) for row in received.tolist()]


class ByteExchange:
    """Exchanges bytes between all ranks, with memory that `reserve` takes beforehand.

    So that memory is lacking is known before anybody waits for the exchange. Only for back ends
    that do not take the bytes from the CPU is any memory needed.
    """

    def __init__(self) -> None:
        self._sent = self._received = torch.empty(0, dtype=torch.uint8)

    def reserve(self, *, sent_nbytes: int = 0, received_nbytes: int = 0) -> None:
        """Take memory for `run` to send and to receive so many bytes in all."""
        if not _is_collective() or _device() == "cpu":
            return
        if self._sent.numel() < sent_nbytes:
            self._sent = torch.empty(sent_nbytes, dtype=torch.uint8, device=_device())
        if self._received.numel() < received_nbytes:
            self._received = torch.empty(received_nbytes, dtype=torch.uint8, device=_device())

    def run(
        self,
        sent: torch.Tensor,
        sent_nbytes: Sequence[int],
        received: torch.Tensor,
        received_nbytes: Sequence[int],
    ) -> None:
        """Send to each rank its part of a CPU tensor of bytes, and receive the parts for this one.

        Args:
            sent: the parts for all ranks, one after the other.
            sent_nbytes: size of the part for each rank.
            received: where the parts from all ranks go, one after the other.
            received_nbytes: size of the part from each rank.
        """
        if not _is_collective():
            received.copy_(sent)
            return
        if _device() == "cpu":
            dist.all_to_all_single(received, sent, list(received_nbytes), list(sent_nbytes))
            return
        outgoing, incoming = self._sent[: sent.numel()], self._received[: received.numel()]
        outgoing.copy_(sent)
        dist.all_to_all_single(incoming, outgoing, list(received_nbytes), list(sent_nbytes))
        received.copy_(incoming)


def box_of(tensor: LiveTensor, box: Box) -> Bytes:
    """Return the bytes of a box within this rank's shard.

    The array has the box's shape plus a last axis of an element's bytes.
    """
    part = tensor.data[box.slices_in(tensor.box)]
    return bytes_of(part).numpy().reshape(*box.shape, part.element_size())


def _head_of(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_NBYTES, "little") + data[:_INLINE_NBYTES]


def _decoded(data: bytes, heads: Sequence[bytes]) -> list[Json]:
    """Return all ranks' messages: those whose beginnings are `heads`; `data` is this rank's."""
    nbytes = [int.from_bytes(head[:_LENGTH_NBYTES], "little") for head in heads]
    rest_nbytes = max(nbytes) - _INLINE_NBYTES
    rests = [b""] * len(heads)
    if rest_nbytes > 0:
        rests = _all_gather(data[_INLINE_NBYTES:], rest_nbytes)
    return [
        json.loads((head[_LENGTH_NBYTES:] + rest)[:count])
        for head, rest, count in zip(heads, rests, nbytes, strict=True)
    ]


def _all_gather(data: bytes, nbytes: int) -> list[bytes]:
    """Return all ranks' data, each padded to `nbytes`."""
    padded = torch.frombuffer(bytearray(data.ljust(nbytes)), dtype=torch.uint8).to(_device())
    gathered = torch.empty(world_size(), nbytes, dtype=torch.uint8, device=_device())
    dist.all_gather(list(gathered.unbind()), padded)
    return [row.tobytes() for row in gathered.cpu().numpy()]


def _is_collective() -> bool:
    return dist.is_available() and dist.is_initialized()


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
