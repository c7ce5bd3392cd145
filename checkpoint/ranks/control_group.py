"""Lets the ranks that save or load together agree, and fail together.

Every rank makes the same calls in the same order, from one thread at a time: `run_on_all_ranks`
(with `run_and_share` and `gather`), `broadcast` and `all_to_all`. An error on one rank is raised on
all ranks before any of them waits for the next message. It names the rank that failed by its number
in the default group.

Messages are bytes in the CPU's memory. They use the given process group if it takes CPU tensors.
Otherwise, as with NCCL alone, they use a gloo group of the same ranks. If a rank dies, the call
raises torch's RuntimeError on the others.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, NoReturn, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from keepstep import torch_internals
from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMissing,
    CheckpointTooNew,
    FormatUnsupported,
    LayoutMismatch,
    RankFailed,
)
from keepstep.checkpoint.format.layout.boxes import Json

Result = TypeVar("Result")

_ERRORS = {
    error.__name__: error
    for error in (
        CheckpointDamaged,
        CheckpointMissing,
        CheckpointTooNew,
        FormatUnsupported,
        LayoutMismatch,
    )
}
"""Errors of the rank that broadcasts that have the same class on all ranks."""

_NOTHING = b"[null]"

_SHORT_NBYTES = 2**16
"""Bytes that a rank sends in one call together with their lengths, which takes one round.

It saves 9 of a load's 19 rounds: of four ranks on two cores 0.05 s, about a quarter for 200 MB.
"""

_GLOO_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome(Generic[Result]):
    """A function's result or error on this rank."""

    result: Result | None
    error: Exception | None

    @classmethod
    def of(cls, act: Callable[[], Result]) -> _Outcome[Result]:
        try:
            return cls(act(), None)
        except Exception as error:  # noqa: BLE001 - other ranks wait for this one's outcome
            return cls(None, error)

    def get(self) -> Result:
        if self.error is not None:
            raise self.error
        return cast(Result, self.result)


class ControlGroup:
    """The ranks that save or load together.

    Args:
        collectives: a process group or back end that takes tensors of the CPU; None for one rank.
        global_ranks: the ranks' numbers in the default group.
    """

    def __init__(self, collectives: Any = None, global_ranks: Sequence[int] = (0,)) -> None:
        self.collectives = collectives
        self.global_ranks = tuple(global_ranks)
        self.size = len(self.global_ranks)
        """The number of ranks."""

    @property
    def rank(self) -> int:
        """This process's number among the ranks."""
        return 0 if self.collectives is None else int(self.collectives.rank())

    def begin_minimum(self, values: torch.Tensor) -> dist.Work | None:
        """Begin to replace values by the least of each over all ranks; wait for the result."""
        if self.collectives is None:
            return None
        options = dist.AllreduceOptions()
        options.reduceOp = cast(Any, dist.ReduceOp.MIN)  # The stubs have another class.
        return cast(dist.Work, self.collectives.allreduce([values], options))

    def run_on_all_ranks(self, act: Callable[[], Result]) -> Result:
        """Run a function on every rank; if it fails on any rank, all ranks raise.

        Raises:
            CheckpointDamaged: the function failed because of damage on some ranks, and did not fail
                otherwise on any. So all ranks agree whether to fall back.
            RankFailed: the function failed on another rank; its message is that of the first such
                rank. A rank that failed in this way itself raises its own error.
        """
        return self.run_and_share(act, lambda _: None)[0]

    def gather(self, message: Json) -> list[Json]:
        """Return the messages of all ranks, in order of ranks."""
        return self.run_and_share(lambda: message, lambda own: own)[1]

    def run_and_share(
        self, act: Callable[[], Result], share: Callable[[Result], Json]
    ) -> tuple[Result, list[Json]]:
        """Run a function on every rank, and gather what `share` returns for each rank's result.

        Returns:
            This rank's result, and what all ranks share, in order of ranks.

        Raises:
            CheckpointError: as `run_on_all_ranks` does.
        """
        own = _Outcome.of(lambda: (result := act(), _encoded(share(result))))
        if own.error is None:
            message = own.get()[1]
        else:
            message = json.dumps(
                [str(own.error), isinstance(own.error, CheckpointDamaged)]
            ).encode()
        messages = [json.loads(data or _NOTHING) for data in self._all_gather(message)]
        failures = {number: sent for number, sent in enumerate(messages) if len(sent) == 2}
        if failures:
            self._raise(own.error, failures)
        return own.get()[0], [shared for (shared,) in messages]

    def broadcast(
        self, read: Callable[[], Sequence[bytes]], *, source: int = 0
    ) -> list[memoryview]:
        """Return on all ranks what a function returns on one of them, where alone it is called.

        Use the result inside `run_on_all_ranks`, since that may fail on one rank.

        Raises:
            CheckpointError: it failed there, or a rank has no memory for it. An error about the
                checkpoint itself has the same class on all ranks.
        """
        is_source = self.rank == source
        own = _Outcome.of(read if is_source else tuple)
        contents = own.get() if own.error is None else ()
        failure = None if own.error is None else [type(own.error).__name__, str(own.error)]
        index = json.dumps([failure, [len(content) for content in contents]]).encode()
        is_short = len(index) + sum(map(len, contents)) <= _SHORT_NBYTES
        first = b"".join((index, *contents)) if is_short else index
        frame = _frame([len(index)], first, _SHORT_NBYTES)
        self._send_to_all(frame, source)
        (end,), short = _parsed(frame, 1)
        if end > _SHORT_NBYTES:
            long = _bytes_tensor(index) if is_source else torch.empty(end, dtype=torch.uint8)
            self._send_to_all(long, source)
            short = long.numpy().data
        failure, sizes = json.loads(bytes(short[:end]))
        if failure is not None:
            if own.error is not None:
                raise own.error
            kind, text = failure
            if kind in _ERRORS:
                raise _ERRORS[kind](text)
            raise RankFailed(f"rank {self.global_ranks[source]}: {text}")
        if end + sum(sizes) <= _SHORT_NBYTES:
            return _split(short[end:], sizes)

        def prepare() -> torch.Tensor:
            with preparing(f"for a message of rank {self.global_ranks[source]}"):
                if is_source:
                    return _bytes_tensor(b"".join(contents))
                return torch.empty(sum(sizes), dtype=torch.uint8)

        whole = self.run_on_all_ranks(prepare)
        self._send_to_all(whole, source)
        return _split(whole.numpy().data, sizes)

    def all_to_all(self, messages: Callable[[], Mapping[int, bytes]]) -> list[memoryview]:
        """Send each rank its message, and return the messages that all ranks sent to this one.

        Use the messages inside `run_on_all_ranks`, since that may fail on one rank.

        Args:
            messages: returns this rank's messages by receiver; receivers left out get nothing.

        Raises:
            CheckpointError: a rank could not make its messages, or has no memory for those to it;
                all ranks raise as `run_on_all_ranks` does.
        """
        own = _Outcome.of(messages)
        outgoing = [b""] * self.size
        for receiver, message in (own.get() if own.error is None else {}).items():
            outgoing[receiver] = message
        nbytes = [len(message) for message in outgoing]
        room = _SHORT_NBYTES // self.size
        facts = max(nbytes), int(own.error is not None)
        frames = [_frame([len(data), *facts], data, room) for data in outgoing]
        rows = [_parsed(row, 3) for row in self._exchange_frames(torch.stack(frames))]
        if any(has_failed for (_, _, has_failed), _ in rows):
            self.run_on_all_ranks(own.get)
        received_nbytes = [count for (count, _, _), _ in rows]
        if max(longest for (_, longest, _), _ in rows) <= room:
            return [short[:count] for (count, _, _), short in rows]

        def prepare() -> tuple[torch.Tensor, torch.Tensor]:
            with preparing("messages between ranks"):
                received = torch.empty(sum(received_nbytes), dtype=torch.uint8)
                return _bytes_tensor(b"".join(outgoing)), received

        sent, received = self.run_on_all_ranks(prepare)
        self.exchange_bytes(sent, nbytes, received, received_nbytes)
        return _split(received.numpy().data, received_nbytes)

    def exchange_numbers(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Send row i to rank i, and return the rows that all ranks sent to this one, in order.

        All rows of all ranks have the same length.
        """
        received = self._exchange_frames(torch.tensor(rows, dtype=torch.int64))
        return [list(map(int, row)) for row in received.tolist()]

    def _exchange_frames(self, sent: torch.Tensor) -> torch.Tensor:
        """Send row i to rank i, and return the rows that all ranks sent to this one."""
        received = torch.empty_like(sent)
        ones = [1] * self.size
        self.exchange_bytes(sent, ones, received, ones)
        return received

    def exchange_bytes(
        self,
        sent: torch.Tensor,
        sent_counts: Sequence[int],
        received: torch.Tensor,
        received_counts: Sequence[int],
    ) -> None:
        """Send to each rank its part of a tensor, and receive the parts for this one.

        It takes no memory. Reserve it in `run_on_all_ranks` first, so that no rank waits for one
        that has none.

        Args:
            sent: the parts for all ranks, one after the other.
            sent_counts: elements of the first dimension for each rank.
            received: where the parts from all ranks go, one after the other.
            received_counts: elements of the first dimension from each rank.
        """
        if self.collectives is None:
            received.copy_(sent)
            return
        counts = list(received_counts), list(sent_counts)
        self.collectives.alltoall_base(received, sent, *counts, dist.AllToAllOptions()).wait()

    def _all_gather(self, data: bytes) -> list[bytes]:
        """Return the data of all ranks."""
        if self.collectives is None:
            return [data]
        room = _SHORT_NBYTES // self.size
        frames = self._gather_tensors(_frame([len(data)], data, room))
        rows = [_parsed(frame, 1) for frame in frames]
        sizes = [nbytes for (nbytes,), _ in rows]
        contents = [short for _, short in rows]
        if max(sizes) > room:
            whole = self._gather_tensors(_bytes_tensor(data.ljust(max(sizes))))
            contents = [gathered.numpy().data for gathered in whole]
        return [bytes(row[:nbytes]) for row, nbytes in zip(contents, sizes, strict=True)]

    def _gather_tensors(self, own: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(own) for _ in self.global_ranks]
        self.collectives.allgather([gathered], [own]).wait()
        return gathered

    def _send_to_all(self, tensor: torch.Tensor, source: int) -> None:
        if self.collectives is not None:
            options = dist.BroadcastOptions()
            options.rootRank = source
            self.collectives.broadcast([tensor], options).wait()

    def _raise(self, own_error: Exception | None, failures: Mapping[int, Json]) -> NoReturn:
        is_damage = all(is_damage for _, is_damage in failures.values())
        if own_error is not None and isinstance(own_error, CheckpointDamaged) == is_damage:
            raise own_error
        failed, text = next(
            (failed, text) for failed, (text, damage) in failures.items() if damage == is_damage
        )
        error_type = CheckpointDamaged if is_damage else RankFailed
        raise error_type(f"rank {self.global_ranks[failed]}: {text}") from own_error


class ControlGroups:
    """Returns the control groups of process groups; each is made once, and goes with its group."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[dist.ProcessGroup, ControlGroup] = WeakKeyDictionary()

    def of(self, process_group: dist.ProcessGroup | None = None) -> ControlGroup:
        """Return the control group of a process group; all its ranks make the call.

        Args:
            process_group: a group that this process is a member of; None for the default group.
                Without any, the one process is rank 0.

        Raises:
            CheckpointError: this process is no member of the group.
        """
        if not dist.is_available() or not dist.is_initialized():
            return ControlGroup()
        group = dist.group.WORLD if process_group is None else process_group
        if not isinstance(group, dist.ProcessGroup):
            raise CheckpointError(
                "this rank is no member of process_group; only members save and load in it"
            )
        names = dist.get_process_group_ranks(group)
        if any(device.type == "cpu" for device in torch_internals.device_types(group)):
            return ControlGroup(group, names)
        control = self._made.get(group)
        if control is None:
            # All ranks arrive at the same number. The store may outlive a group.
            key = f"keepstep/control/{group.group_name}"
            number = torch_internals.default_store().add(f"{key}/{group.rank()}", 1)
            control = separate_group(ControlGroup(group, names), f"{key}/{number}")
            self._made[group] = control
        return control


CONTROL_GROUPS = ControlGroups()
"""The control groups of this process, one registry as torch has one of process groups."""


def separate_group(
    group: ControlGroup, name: str, timeout: timedelta = _GLOO_TIMEOUT
) -> ControlGroup:
    """Make a gloo group of the same ranks, for the messages of another thread.

    torch does not register it: it lasts as long as something refers to it. The default group's
    store is used only while the group is made.

    Args:
        group: the ranks; all of them make the call.
        name: is the same on all ranks, and never used again.
        timeout: how long the ranks wait for each other, here and in messages.
    """
    if group.collectives is None:
        return group
    store = torch_internals.default_store()
    innermost = store
    while isinstance(innermost, PrefixStore):
        innermost = innermost.underlying_store
    # A copy is a client, which does not keep a server of this process alive. torch's type stubs
    # lack `clone`.
    own_store = cast(Any, store).clone() if isinstance(innermost, TCPStore) else store
    gloo = dist.ProcessGroupGloo(
        PrefixStore(name, own_store), group.rank, group.size, timeout=timeout
    )
    return ControlGroup(gloo, group.global_ranks)


@contextmanager
def preparing(what: str) -> Iterator[None]:
    """Raise CheckpointError if what prepares for a message fails, mostly for want of memory.

    For memory of the CPU PyTorch has no error of its own: it raises RuntimeError, as for a device
    that has failed.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise CheckpointError(f"could not prepare {what}: {error or 'no memory'}") from error


def _encoded(shared: Json) -> bytes:
    """Return a message with what a rank shares; for None an empty one, which is not sent."""
    return b"" if shared is None else json.dumps([shared]).encode()


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _frame(numbers: Sequence[int], data: bytes, room: int) -> torch.Tensor:
    """Return numbers, and after them the beginning of a message in a place of this size."""
    head = np.array(numbers, np.int64).tobytes()
    return _bytes_tensor((head + data[:room]).ljust(len(head) + room, b"\0"))


def _parsed(frame: torch.Tensor, count: int) -> tuple[list[int], memoryview]:
    """Return the numbers of a frame, and what follows them."""
    content = frame.numpy()
    head_nbytes = count * np.dtype(np.int64).itemsize
    numbers = np.frombuffer(content[:head_nbytes].tobytes(), np.int64)
    return numbers.tolist(), content[head_nbytes:].data


def _split(content: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    ends = itertools.accumulate(sizes)
    return [content[end - nbytes : end] for end, nbytes in zip(ends, sizes, strict=True)]
