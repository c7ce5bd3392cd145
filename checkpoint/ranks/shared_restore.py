"""Fills the live tensors of all ranks from a stored checkpoint, of which each byte is read once.

A rank reads what the planner (`checkpoint.format.layout.shared_read_plan`) gives it, in batches,
and forwards to the others what they want of it, in rounds. What a rank reads for itself alone goes
directly into its tensors; where each rank wants its own part, nothing is sent. So replicas do not
read the same bytes from storage, and ranks that want small pieces of the same chunk do not send a
request each (MegaScale, arXiv 2402.15627, restores replicas from one reader).

In a round every rank offers pieces to others, accepts what it has room for, and sends what was
accepted; what is small, as norms and biases are, is sent without. So memory is bounded whatever the
layouts are: a batch of `_BATCH_NBYTES`, and `_MESSAGE_NBYTES` each to send and to receive, or the
size of one piece if that is larger. A piece has `UNIT_NBYTES` at most where cells are not larger.

Every rank goes through the same rounds. A rank that fails in one goes on to take part: it says so
in the next one, which is the last, and all ranks raise.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import torch

from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.integers import round_up
from keepstep.checkpoint.format.layout.shared_read_plan import (
    UNIT_NBYTES,
    ReadGroup,
    ReadTask,
    ReadUnit,
    Want,
    assign_readers,
    groups_of,
    planner_of,
    unit_boxes,
)
from keepstep.checkpoint.format.layout.source import BoxRequest
from keepstep.checkpoint.format.stored.chunking import chunks_over
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.urls import parse_url
from keepstep.checkpoint.live.fills import Bytes, Fill, fill
from keepstep.checkpoint.ranks.control_group import ControlGroup

_BATCH_NBYTES = 128 * 2**20
_MESSAGE_NBYTES = 64 * 2**20

_UNASKED_NBYTES = 2**20
"""Bytes that all ranks together may offer in a round that needs no acceptance."""

# Chunks of small tensors that lie in so many bytes of one object have one reader.
_GROUP_NBYTES = 4 * 2**20

# Pieces begin at multiples of this in memory and in messages, as every data type requires.
_ALIGNMENT = 16

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RestoreTraffic:
    """The traffic of a restore, on all ranks together, in bytes.

    Attributes:
        read_nbytes: read from storage, with checksums and the rest of the blocks that large reads
            begin and end in, but without the checkpoint's metadata.
        tensor_nbytes: elements of stored tensors that at least one rank wanted, each counted once.
        sent_nbytes: forwarded from rank to rank.
    """

    read_nbytes: int
    tensor_nbytes: int
    sent_nbytes: int

    @property
    def ratio(self) -> float:
        """Bytes read from storage per byte of distinct tensor data; 1 and a little, ideally."""
        return self.read_nbytes / self.tensor_nbytes if self.tensor_nbytes else 0.0

    def __str__(self) -> str:
        return (
            f"read {self.read_nbytes:,} bytes from storage for {self.tensor_nbytes:,} bytes of "
            f"tensors ({self.ratio:.2f} per byte), sent {self.sent_nbytes:,} between ranks"
        )


def fill_together(
    plan: Callable[[], Sequence[Fill]], source: StoredCheckpoint, group: ControlGroup
) -> RestoreTraffic:
    """Fill live tensors on all ranks from one checkpoint; one rank alone reads all that it wants.

    Args:
        plan: returns what this rank fills. If it raises on one rank, nothing is read on any.
        source: the checkpoint; the same one on all ranks.
        group: the ranks.

    Raises:
        CheckpointDamaged: what a rank read is damaged; on all ranks.
        CheckpointError: a rank could not read, or has failed otherwise; on all ranks.
    """
    if group.size == 1:
        read_before = source.read_nbytes
        fills = plan()
        fill(fills, source)
        wanted_nbytes = sum(item.nbytes for item in fills)
        return RestoreTraffic(source.read_nbytes - read_before, wanted_nbytes, 0)
    return _Participant(source, group).take_part(plan)


def _wants(fills: Sequence[Fill], source: StoredCheckpoint) -> Iterator[Want]:
    """Yield what this rank wants of each unit; a want's number is its position in `fills`."""
    # Only a listing says in which objects packed tensors lie.
    source.locate(
        (item.tensor.key, item.box)
        for item in fills
        if item.box is not None and source.stored_tensors[item.tensor.key].is_packed
    )
    for number, item in enumerate(fills):
        if item.box is None:
            continue
        for unit in _units(item.tensor.key, item.box, source):
            wanted = unit.box.intersect(item.box)
            if wanted is not None:
                yield Want(unit, number, wanted)


def _units(key: str, box: Box, source: StoredCheckpoint) -> Iterator[ReadUnit]:
    """Yield the units that share elements with a box of a tensor."""
    tensor = source.stored_tensors[key]
    itemsize = numpy_dtype(tensor.dtype).itemsize
    for chunk in chunks_over(key, tensor.shape, tensor.chunk, box):
        if tensor.is_packed:
            name, offset = source.location(chunk)
            group = f"{name} {offset // _GROUP_NBYTES}"
            yield ReadUnit(group, key, chunk.box, tensor.chunk, itemsize)
            continue
        for part in unit_boxes(chunk.box, tensor.cell, itemsize, box, UNIT_NBYTES):
            yield ReadUnit(f"{key} {part.offset}", key, part, tensor.cell, itemsize)


def _small_read_nbytes(url: str) -> int:
    """Return the size of a read that takes about twice as long as one of a byte.

    Ranks that want different cells of a unit read their own from there on.
    """
    return 2**16 if parse_url(url).local_path is not None else 2**20


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box for a rank's request of this number; the last axis of `data` is an element's bytes."""

    number: int
    box: Box
    data: Bytes


@dataclass(frozen=True, slots=True)
class _Read:
    """A unit to read: as the boxes that are wanted of it, or, if these overlap much, as a whole.

    `live` is, for each box, the live memory that it is read into, with the number of the request
    of this rank whose memory it is, or None.
    """

    task: ReadTask
    boxes: tuple[Box, ...]
    live: tuple[tuple[int, Bytes] | None, ...]

    @classmethod
    def of(cls, task: ReadTask, fills: Sequence[Fill], own_rank: int) -> _Read:
        """Return how a task is read by a rank that fills these tensors."""
        unit = task.unit
        # Several requests may be for one box: tied weights, in a module where they are not tied.
        own: dict[Box, tuple[int, Bytes]] = {}
        for item in task.deliveries:
            if item.rank == own_rank:
                memory = fills[item.number].memory(item.box)
                if memory is not None:
                    own[item.box] = item.number, memory
        boxes = tuple(dict.fromkeys(item.box for item in task.deliveries))
        if sum(box.size for box in boxes) > unit.box.size:
            boxes = (unit.box,)
        return cls(task, boxes, tuple(own.get(box) for box in boxes))

    @property
    def staged_nbytes(self) -> int:
        """Size of the buffers that the boxes need."""
        return sum(
            round_up(box.size * self.task.unit.itemsize, _ALIGNMENT)
            for box, live in zip(self.boxes, self.live, strict=True)
            if live is None
        )


class _RoundRow(NamedTuple):
    """A rank's message to another one about a round.

    It has the bytes offered to that one, and to all, whether it has failed, and whether it lacks
    elements that have not arrived. The rest is as in `RestoreTraffic`, of this rank alone.
    """

    offered_nbytes: int
    offered_to_all_nbytes: int
    has_failed: int
    is_lacking: int
    read_nbytes: int
    tensor_nbytes: int
    sent_nbytes: int


class _Memory:
    """Memory for bytes that is used again; page-locked if it is copied to or from CUDA devices."""

    def __init__(self) -> None:
        self.is_pinned = False
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of_size(self, nbytes: int) -> torch.Tensor:
        """Return the memory, cut to this size; the next call may return the same."""
        if self._bytes.numel() < nbytes:
            # The old memory goes first: the two together would exceed the bound.
            self._bytes = torch.empty(0, dtype=torch.uint8)
            self._bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.is_pinned)
        return self._bytes[:nbytes]


class _Participant:
    """One rank's part: it plans, reads its units, sends pieces, and places others' pieces."""

    def __init__(self, source: StoredCheckpoint, group: ControlGroup) -> None:
        self._source = source
        self._group = group
        self._read_before = source.read_nbytes
        self._rank, self._world_size = group.rank, group.size
        self._fills: Sequence[Fill] = ()
        self._batches: deque[list[_Read]] = deque()
        # Elements of each fill that have not arrived yet.
        self._missing: list[int] = []
        # Pieces that were read and not sent yet, by receiver.
        self._unsent: dict[int, deque[_Piece]] = {}
        # Groups that planners before this one have, about.
        self._first_group = 0
        self._error: Exception | None = None
        # Bytes of pieces that this rank has sent.
        self._sent_nbytes = 0
        # Bytes of the tensors' elements that ranks want of the units that this rank plans.
        self._tensor_nbytes = 0
        self._staging, self._sending, self._receiving = _Memory(), _Memory(), _Memory()

    def take_part(self, plan: Callable[[], Sequence[Fill]]) -> RestoreTraffic:
        """Do all that the ranks do together.

        Raises:
            Exception: a rank has failed; then all ranks raise.
        """
        tasks = self._plan_together(plan)
        self._attempt(lambda: self._prepare(tasks), None)
        rounds = (self._take_part_in_round(number) for number in itertools.count())
        rows = next(last_rows for last_rows in rounds if last_rows is not None)
        if any(row.has_failed for row in rows):
            self._group.run_on_all_ranks(self._raise_error)
        # All ranks have the same rows: none is left waiting for one that has raised.
        is_filled = not any(row.is_lacking for row in rows)
        assert is_filled, "every wanted element has a reader, and arrives"
        return RestoreTraffic(
            sum(row.read_nbytes for row in rows),
            sum(row.tensor_nbytes for row in rows),
            sum(row.sent_nbytes for row in rows),
        )

    def _plan_together(self, plan: Callable[[], Sequence[Fill]]) -> list[memoryview]:
        """Return messages with what this rank is to read.

        If a rank fails, all of them raise before anything of tensors is read.
        """

        def want_messages() -> list[bytes]:
            self._fills = plan()
            self._missing = [item.box.size if item.box else 0 for item in self._fills]
            return self._want_messages()

        wants = self._group.all_to_all(lambda: dict(enumerate(want_messages())))
        return self._group.all_to_all(
            lambda: dict(enumerate(self._task_messages(self._groups(wants))))
        )

    def _want_messages(self) -> list[bytes]:
        """Return the messages with what this rank wants, for each planner.

        Before its wants each planner gets the number of this rank's groups that planners before it
        plan.
        """
        wants: list[list[Want]] = [[] for _ in range(self._world_size)]
        for want in _wants(self._fills, self._source):
            wants[planner_of(want.unit.group, self._world_size)].append(want)
        counts = (len({want.unit.group for want in items}) for items in wants)
        firsts = itertools.accumulate(counts, initial=0)
        return [
            msgspec.msgpack.encode((first, items))
            for first, items in zip(firsts, wants, strict=False)
        ]

    def _groups(self, wants: Sequence[memoryview]) -> list[ReadGroup]:
        """Return the groups that this rank plans."""
        messages = [msgspec.msgpack.decode(data, type=tuple[int, list[Want]]) for data in wants]
        self._first_group = max(first for first, _ in messages)
        wants_by_sender = (
            (sender, want) for sender, (_, items) in enumerate(messages) for want in items
        )
        groups = groups_of(wants_by_sender, _small_read_nbytes(self._source.storage.url))
        self._tensor_nbytes = sum(group.nbytes for group in groups)
        return groups

    def _task_messages(self, groups: Sequence[ReadGroup]) -> list[bytes]:
        """Return the messages with what is to be read, for each reader."""
        tasks_by_reader = assign_readers(groups, self._world_size, self._first_group)
        return [msgspec.msgpack.encode(tasks) for tasks in tasks_by_reader]

    def _prepare(self, tasks: Sequence[memoryview]) -> None:
        """Note what this rank reads, and make its tensors and memory ready for it."""
        is_cuda = any(item.tensor.data.is_cuda for item in self._fills)
        self._staging.is_pinned = self._receiving.is_pinned = is_cuda
        reads = (
            _Read.of(task, self._fills, self._rank)
            for message in tasks
            for task in msgspec.msgpack.decode(message, type=list[ReadTask])
        )
        self._batches.extend(_batches(reads))
        for item in self._fills:
            item.zero_rest()
        self._receiving.of_size(_UNASKED_NBYTES)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _take_part_in_round(self, number: int) -> list[_RoundRow] | None:
        """Offer, accept if what is offered is not small, and send once.

        Returns:
            Each rank's row if it was the last round, which is so on all ranks or on none.
        """
        nothing: dict[int, list[_Piece]] = {}
        offers = self._attempt(lambda: self._offer(number), nothing)
        offered_nbytes = [_message_nbytes(offers.get(p, [])) for p in range(self._world_size)]
        numbers = self._group.exchange_numbers(
            [
                _RoundRow(
                    offered_nbytes=nbytes,
                    offered_to_all_nbytes=sum(offered_nbytes),
                    has_failed=self._error is not None,
                    is_lacking=any(self._missing),
                    read_nbytes=self._source.read_nbytes - self._read_before,
                    tensor_nbytes=self._tensor_nbytes,
                    sent_nbytes=self._sent_nbytes,
                )
                for nbytes in offered_nbytes
            ]
        )
        rows = [_RoundRow(*row) for row in numbers]
        # The same on all ranks, as all that is decided by it.
        total_nbytes = sum(row.offered_to_all_nbytes for row in rows)
        if any(row.has_failed for row in rows) or not total_nbytes:
            return rows
        received_nbytes = [row.offered_nbytes for row in rows]
        accepted = offers
        if total_nbytes > _UNASKED_NBYTES:
            received_nbytes = self._attempt(
                lambda: self._accept(number, [row.offered_nbytes for row in rows]),
                [0] * self._world_size,
            )
            answers = self._group.exchange_numbers([[nbytes] for nbytes in received_nbytes])
            accepted = {peer: pieces for peer, pieces in offers.items() if answers[peer][0]}
        sent_nbytes = [_message_nbytes(accepted.get(p, [])) for p in range(self._world_size)]
        sent = self._sending.of_size(sum(sent_nbytes))
        received = self._receiving.of_size(sum(received_nbytes))
        self._attempt(lambda: self._pack(accepted, sent.numpy()), None)
        if self._error is not None:
            # Messages of no pieces: whoever gets them learns of the error in the next round.
            sent.zero_()
        self._group.exchange_bytes(sent, sent_nbytes, received, received_nbytes)
        self._attempt(lambda: self._unpack(received.numpy(), received_nbytes), None)
        return None

    def _attempt(self, act: Callable[[], Result], otherwise: Result) -> Result:
        """Do what may fail, unless something has failed before; then return `otherwise`."""
        if self._error is None:
            try:
                return act()
            except Exception as error:  # noqa: BLE001 - `check` raises it; other ranks wait here
                self._error = error
        return otherwise

    def _offer(self, number: int) -> dict[int, list[_Piece]]:
        """Return the pieces that this rank can send in a round, by receiver; read if necessary.

        In every round each rank begins with another receiver than the others do.
        """
        while not self._unsent and self._batches:
            self._read(self._batches.popleft())
        offers: dict[int, list[_Piece]] = {}
        total = 0
        for peer in sorted(
            self._unsent, key=lambda p: (p - self._rank - 1 - number) % self._world_size
        ):
            room = _MESSAGE_NBYTES - total
            pieces = list(_first_pieces(self._unsent[peer], room, at_least_one=not offers))
            if pieces:
                offers[peer] = pieces
                total += _message_nbytes(pieces)
        # Memory that is lacking is noticed before anybody counts on the message.
        self._sending.of_size(total)
        return offers

    def _accept(self, number: int, offered_nbytes: Sequence[int]) -> list[int]:
        """Return how many bytes this rank receives from each of the others: all or none."""
        accepted = [0] * self._world_size
        total = 0
        for distance in range(self._world_size):
            peer = (self._rank - 1 - number - distance) % self._world_size
            if total == 0 or total + offered_nbytes[peer] <= _MESSAGE_NBYTES:
                accepted[peer] = offered_nbytes[peer]
                total += offered_nbytes[peer]
        self._receiving.of_size(total)
        return accepted

    def _read(self, reads: Sequence[_Read]) -> None:
        """Read a batch; fill what this rank wants of it, and note what others want."""
        staging = self._staging.of_size(sum(read.staged_nbytes for read in reads)).numpy()
        requests: list[BoxRequest] = []
        read_boxes: list[list[Bytes]] = []
        end = 0
        for read in reads:
            unit = read.task.unit
            read_boxes.append([])
            for box, live in zip(read.boxes, read.live, strict=True):
                nbytes = box.size * unit.itemsize
                if live is not None:
                    _, data = live
                else:
                    data = staging[end : end + nbytes].reshape(*box.shape, unit.itemsize)
                    end += round_up(nbytes, _ALIGNMENT)
                read_boxes[-1].append(data)
                requests.append(BoxRequest(unit.key, box, data.reshape(-1).data))
        # No other rank reads the same bytes.
        self._source.read(requests, past_cache=True)
        for read, arrays in zip(reads, read_boxes, strict=True):
            by_box = dict(zip(read.boxes, zip(arrays, read.live, strict=True), strict=True))
            whole = read.task.unit.box
            for item in read.task.deliveries:
                if item.box in by_box:
                    data, live = by_box[item.box]
                else:
                    data, live = by_box[whole][0][item.box.within(whole).slices], None
                piece = _Piece(item.number, item.box, data)
                if item.rank != self._rank:
                    self._unsent.setdefault(item.rank, deque()).append(piece)
                elif live is not None and live[0] == item.number:
                    self._missing[item.number] -= item.box.size
                else:
                    self._place(piece)

    def _place(self, piece: _Piece) -> None:
        self._fills[piece.number].place(piece.box, piece.data)
        self._missing[piece.number] -= piece.box.size

    def _pack(self, accepted: Mapping[int, Sequence[_Piece]], buffer: Bytes) -> None:
        """Write the messages for all receivers, in their order, and forget their pieces.

        A message is a header of integers, the number of pieces and for each its request's number,
        offset and shape, and then the pieces' bytes.
        """
        end = 0
        for peer in sorted(accepted):
            pieces = accepted[peer]
            header = [len(pieces)]
            for piece in pieces:
                header += [piece.number, *piece.box.offset, *piece.box.shape]
            buffer[end : end + 8 * len(header)].view(np.int64)[:] = header
            end += _header_nbytes(pieces)
            for piece in pieces:
                nbytes = piece.data.nbytes
                buffer[end : end + nbytes].reshape(piece.data.shape)[...] = piece.data
                end += round_up(nbytes, _ALIGNMENT)
                self._sent_nbytes += nbytes
            unsent = self._unsent[peer]
            for _ in pieces:
                unsent.popleft()
            if not unsent:
                del self._unsent[peer]

    def _unpack(self, buffer: Bytes, received_nbytes: Sequence[int]) -> None:
        """Place the pieces of all messages received."""
        start = 0
        for nbytes in received_nbytes:
            if nbytes:
                self._unpack_message(buffer[start : start + nbytes])
            start += nbytes

    def _unpack_message(self, message: Bytes) -> None:
        count = int(message[:8].view(np.int64)[0])
        at = 8
        boxes: list[tuple[int, Box]] = []
        for _ in range(count):
            number = int(message[at : at + 8].view(np.int64)[0])
            wanted = self._fills[number].box
            assert wanted is not None, "only what was wanted is sent"
            rank_of_tensor = len(wanted.shape)
            stop = at + 8 * (1 + 2 * rank_of_tensor)
            extents = message[at + 8 : stop].view(np.int64).tolist()
            boxes.append(
                (number, Box(tuple(extents[:rank_of_tensor]), tuple(extents[rank_of_tensor:])))
            )
            at = stop
        at = round_up(at, _ALIGNMENT)
        for number, box in boxes:
            itemsize = self._fills[number].itemsize
            nbytes = box.size * itemsize
            data = message[at : at + nbytes].reshape(*box.shape, itemsize)
            self._place(_Piece(number, box, data))
            at += round_up(nbytes, _ALIGNMENT)


def _first_pieces(pieces: Iterable[_Piece], room: int, *, at_least_one: bool) -> Iterator[_Piece]:
    """Yield the first pieces whose message has `room` bytes at most."""
    # Alignment of the header aside, a message of two pieces has the size of two messages of one.
    nbytes = 0
    for number, piece in enumerate(pieces):
        nbytes += _message_nbytes([piece])
        if nbytes > room and not (at_least_one and number == 0):
            return
        yield piece


def _message_nbytes(pieces: Sequence[_Piece]) -> int:
    """Return the size of a message of these pieces; 0 for none. See `_Participant._pack`."""
    return _header_nbytes(pieces) + sum(round_up(p.data.nbytes, _ALIGNMENT) for p in pieces)


def _header_nbytes(pieces: Sequence[_Piece]) -> int:
    numbers = sum(1 + 2 * len(piece.box.shape) for piece in pieces)
    return round_up(8 * (1 + numbers), _ALIGNMENT) if pieces else 0


def _batches(reads: Iterable[_Read]) -> Iterator[list[_Read]]:
    """Yield the reads in batches whose buffers have about `_BATCH_NBYTES`."""
    batch: list[_Read] = []
    nbytes = 0
    for read in reads:
        if batch and nbytes + read.staged_nbytes > _BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(read)
        nbytes += read.staged_nbytes
    if batch:
        yield batch
