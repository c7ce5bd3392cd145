"""Tests of the messages that ranks gather, in real processes."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from keepstep.checkpoint.ranks.collective import (
    all_gather_json,
    exchange_beside_json,
    room_beside_message,
    union_of_all_ranks,
)
from tests.ranks import run_ranks

# Around the length up to which one collective suffices, with the quotes that JSON adds.
LENGTHS = (0, 1021, 1022, 1023, 5000)


def gather(rank: int, root: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{root}/s", 2), rank=rank, world_size=2)
    for lengths in ((first, second) for first in LENGTHS for second in LENGTHS):
        messages = [str(sender) * length for sender, length in enumerate(lengths)]
        assert all_gather_json(messages[rank]) == messages
        contents = [bytes([10 * rank + peer]) * room_beside_message() for peer in (0, 1)]
        found, received = exchange_beside_json(messages[rank], list(map(memoryview, contents)))
        assert found == messages
        assert [set(content) for content in received] == [{rank}, {10 + rank}]
        assert [len(content) for content in received] == [room_beside_message()] * 2
        found, _ = exchange_beside_json(messages[rank], [])
        assert found == messages
    names = [f"block.{number}" for number in range(100)]
    assert union_of_all_ranks(names) == set(names)
    assert union_of_all_ranks(names[rank * 60 :]) == set(names)
    assert union_of_all_ranks([] if rank else ["é"]) == {"é"}
    dist.barrier()
    os._exit(0)


def test_messages_of_any_length_and_unions_reach_all_ranks(tmp_path: Path) -> None:
    run_ranks(gather, args=(str(tmp_path),), nprocs=2)
