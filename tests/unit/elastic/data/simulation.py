"""Reads sources without loader processes, but in as many pieces as there would be processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from keepstep.elastic.data import partition_batches
from keepstep.elastic.data.partition_batches import RankShares, ReadShare


class LoaderInThisProcess:
    """Gives what torch's DataLoader gives for `RankShares`, from as many readers, in turn."""

    def __init__(self, shares: RankShares[Any], *, num_workers: int, **_: Any) -> None:
        self._shares = shares
        self._workers = num_workers

    def __iter__(self) -> Iterator[ReadShare]:
        count = max(1, self._workers)
        pieces = [self._shares.pieces(number, count) for number in range(count)]
        while True:
            for piece in pieces:
                try:
                    yield next(piece)
                except StopIteration:
                    return


@pytest.fixture
def loader_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_batches, "DataLoader", LoaderInThisProcess)
