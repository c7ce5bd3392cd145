"""Threads that play ranks: torch's collectives go by memory, everything above them is real."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.ranks import collective
from tests.adaptive_timeouts import patient

# A rank that waits so long waits for ever.
PATIENCE_S = 60.0


class ThreadRanks:
    """Takes the place of `torch.distributed` for threads, each of which is a rank."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._own = threading.local()
        self._barrier = threading.Barrier(count, timeout=patient(PATIENCE_S))
        self._sent: list[Any] = [None] * count
        self.collectives: list[str] = []
        """The names of all calls of collectives, of all ranks."""

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(collective, "dist", self)

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

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "gloo"

    def get_rank(self) -> int:
        return int(self._own.rank)

    def get_world_size(self) -> int:
        return self.count

    def all_gather(self, gathered: Sequence[torch.Tensor], sent: torch.Tensor) -> None:
        self.collectives.append("all_gather")
        for buffer, data in zip(gathered, self._gather(sent), strict=True):
            buffer.copy_(data)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.collectives.append("all_reduce")
        tensor.copy_(torch.stack(self._gather(tensor.clone())).sum(0))

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.collectives.append("broadcast")
        tensor.copy_(self._gather(tensor.clone())[src])

    def all_to_all_single(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_counts: Sequence[int] | None = None,
        sent_counts: Sequence[int] | None = None,
    ) -> None:
        self.collectives.append("all_to_all_single")
        ones = [1] * self.count
        gathered = self._gather([part.clone() for part in sent.split(list(sent_counts or ones))])
        parts = [parts_of_rank[self.get_rank()] for parts_of_rank in gathered]
        assert [len(part) for part in parts] == list(received_counts or ones)
        torch.cat(parts, out=received)

    def _gather(self, message: Any) -> list[Any]:
        self._sent[self.get_rank()] = message
        self._barrier.wait()
        gathered = list(self._sent)
        self._barrier.wait()
        return gathered
