"""Tests of control groups and of the process groups that ranks save and load in, in processes."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from keepstep import checkpoint
from keepstep.checkpoint.errors import CheckpointError, RankFailed
from keepstep.checkpoint.format.layout.documents import PROVENANCE
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.ranks.control_group import CONTROL_GROUPS, ControlGroup
from tests.adaptive_timeouts import patient
from tests.ranks import run_ranks

LIMIT_S = 60.0


def talk(group: ControlGroup, rank: int) -> None:
    """Send messages of all sizes in all ways."""
    for nbytes in (0, 1, 5000):
        messages = [str(sender) * nbytes for sender in range(group.size)]
        assert group.gather(messages[rank]) == messages
        sent = {peer: bytes([10 * rank + peer]) * nbytes for peer in range(group.size)}
        received = group.all_to_all(lambda sent=sent: sent)
        assert list(map(bytes, received)) == [
            bytes([10 * peer + rank]) * nbytes for peer in range(group.size)
        ]
        (told,) = group.broadcast(lambda size=nbytes: [b"x" * size], source=group.size - 1)
        assert bytes(told) == b"x" * nbytes
    with pytest.raises(RankFailed if rank == 0 else ZeroDivisionError):
        group.run_on_all_ranks(lambda: 1 / (1 - rank))


def talk_in_groups(rank: int, root: str) -> None:
    """Groups exist for a group that takes CPU tensors, one that does not, and the next default."""
    store = dist.FileStore(f"{root}/s", 2)
    for number, backend in enumerate(("gloo", "cuda:gloo", "cuda:gloo")):
        prefixed = dist.PrefixStore(str(number), store)
        dist.init_process_group(backend, store=prefixed, rank=rank, world_size=2)
        group = CONTROL_GROUPS.of()
        talk(group, rank)
        if backend == "cuda:gloo":
            assert CONTROL_GROUPS.of() is group
            control = weakref.ref(group)
            del group
            dist.destroy_process_group()
            gc.collect()
            assert control() is None, "it goes with the group that it was made for"
        else:
            assert group.collectives is dist.group.WORLD
            del group
            dist.destroy_process_group()
    os._exit(0)


def test_ranks_talk_over_their_group_or_over_one_of_gloo_beside_it(tmp_path: Path) -> None:
    run_ranks(talk_in_groups, args=(str(tmp_path),), nprocs=2)


def save_in_subgroup(rank: int, root: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{root}/s", 3), rank=rank, world_size=3)
    members = dist.new_group([0, 2])
    own = {"x": torch.full((300, 200), float(rank)), "of": f"rank {rank}"}
    if rank == 1:
        # Meanwhile this one saves alone, and waits for the others only then.
        alone = dist.new_group([1], use_local_synchronization=True)
        checkpoint.save(f"{root}/alone", own, step=5, process_group=alone)
        with pytest.raises(CheckpointError, match="no member of process_group"):
            checkpoint.save(f"{root}/run", own, step=1, process_group=members)
    else:
        checkpoint.save(f"{root}/run", own, step=1, process_group=members)
        with checkpoint.Saver(process_group=members) as saver:
            for step in (2, 3):
                saver.save(f"{root}/run", own, step=step).wait(patient(LIMIT_S))
        handle = checkpoint.save(f"{root}/run", own, step=4, block=False, process_group=members)
        handle.wait(patient(LIMIT_S))
        filled = {"x": torch.zeros(300, 200), "of": ""}
        assert checkpoint.load(f"{root}/run", filled, process_group=members) == 4
        assert filled["of"] == "rank 2"
        bad = f"{root}/s/run" if rank == 2 else f"{root}/run"
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(bad, own, step=6, process_group=members)
        if rank == 0:
            assert str(caught.value).startswith("rank 2: "), "by its number in the default group"
    dist.barrier()
    loaded = {"x": torch.zeros(300, 200), "of": ""}
    assert checkpoint.load(f"{root}/alone", loaded) == 5
    assert loaded["of"] == "rank 1"
    dist.barrier()
    os._exit(0)


def test_ranks_of_a_subgroup_save_and_load_while_others_do_something_else(tmp_path: Path) -> None:
    run_ranks(save_in_subgroup, args=(str(tmp_path),), nprocs=3)
    assert [stored.step for stored in list_steps(open_storage(f"{tmp_path}/run"))] == [4, 3, 2, 1]
    alone = StoredCheckpoint.open(open_storage(f"{tmp_path}/alone"))
    assert alone.documents[PROVENANCE]["world_size"] == 1
