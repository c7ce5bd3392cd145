"""Threads that play ranks: collectives go by memory, everything above them is real."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.ranks.control_group import ControlGroup, ControlGroups
from tests.adaptive_timeouts import patient

# A rank that waits so long waits for ever.
PATIENCE_S = 60.0


class Done:
    """A collective that has ended."""

    def wait(self) -> None:
        pass


class Received:
    """A message that comes."""

    def __init__(self, into: torch.Tensor, box: queue.Queue[torch.Tensor]) -> None:
        self._into = into
        self._box = box

    def wait(self, timeout: timedelta = timedelta(seconds=PATIENCE_S)) -> None:
        try:
            self._into.copy_(self._box.get(timeout=timeout.total_seconds()))
        except queue.Empty:
            raise RuntimeError("timed out") from None


class ThreadRanks:
    """Takes the place of a process group for threads, each of which is a rank of `group`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.group = ControlGroup(self, range(count))
        self._own = threading.local()
        self._barrier = threading.Barrier(count, timeout=patient(PATIENCE_S))
        self._sent: list[Any] = [None] * count
        self._boxes: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {
            (sender, receiver): queue.Queue()
            for sender in range(count)
            for receiver in range(count)
        }
        self.collectives: list[str] = []
        """The names of all calls of collectives, of all ranks."""

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make these ranks the default group."""
        monkeypatch.setattr(ControlGroups, "of", lambda *_: self.group)

    def run(self, act: Callable[[int], Any]) -> list[Any]:
        """Run a function on all ranks; return the result of each, or its error."""

        def play(number: int) -> Any:
            self._own.rank = number
            try:
                return act(number)
            except (CheckpointError, MemoryError) as error:
                return error
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(play, range(self.count)))

    def rank(self) -> int:
        return int(self._own.rank)

    def allgather(
        self, gathered: Sequence[Sequence[torch.Tensor]], sent: Sequence[torch.Tensor]
    ) -> Done:
        self.collectives.append("allgather")
        for buffer, data in zip(gathered[0], self._gather(sent[0]), strict=True):
            buffer.copy_(data)
        return Done()

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> Done:
        self.collectives.append("broadcast")
        tensors[0].copy_(self._gather(tensors[0].clone())[options.rootRank])
        return Done()

    def alltoall_base(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_counts: Sequence[int],
        sent_counts: Sequence[int],
        _: Any,
    ) -> Done:
        self.collectives.append("alltoall_base")
        gathered = self._gather([part.clone() for part in sent.split(list(sent_counts))])
        parts = [parts_of_rank[self.rank()] for parts_of_rank in gathered]
        assert [len(part) for part in parts] == list(received_counts)
        torch.cat(parts, out=received)
        return Done()

    def send(self, tensors: Sequence[torch.Tensor], peer: int, _: int) -> Done:
        self._boxes[self.rank(), peer].put(tensors[0].clone())
        return Done()

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, _: int) -> Received:
        return Received(tensors[0], self._boxes[peer, self.rank()])

    def _gather(self, message: Any) -> list[Any]:
        self._sent[self.rank()] = message
        self._barrier.wait()
        gathered = list(self._sent)
        self._barrier.wait()
        return gathered
