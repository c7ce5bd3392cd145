"""Tests of saves that do not block, by several ranks: layouts, failures of one, deaths of one.

The test's process serves the store, as an agent does, so that it outlives any rank.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import TCPStore

from keepstep import checkpoint
from keepstep.checkpoint.errors import CheckpointError, RankFailed
from keepstep.checkpoint.format.content_check import check_content
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.adaptive_timeouts import patient
from tests.integration.checkpoint.test_layout_changes import (
    Block,
    check_equal,
    reference,
    sharded,
    step_once,
)
from tests.ranks import process_of

LIMIT_S = 120.0
PEER_TIMEOUT_S = 3.0

Rank = Callable[[int, Path, Any], None]


def run_rank(act: Rank, rank: int, world: int, port: int, root: Path, pipe: Any) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    act(rank, root, pipe)
    pipe.send("end")
    # Models refer to gloo's groups, whose threads may abort an interpreter that exits normally.
    os._exit(0)


@dataclass(frozen=True)
class Ranks:
    """Processes of ranks, and a pipe to each."""

    processes: list[BaseProcess]
    pipes: list[Connection]

    def receive(self, rank: int) -> Any:
        assert self.pipes[rank].poll(patient(LIMIT_S)), f"rank {rank} says nothing"
        return self.pipes[rank].recv()


@contextmanager
def ranks(act: Rank, world: int, root: Path, port: int | None = None) -> Iterator[Ranks]:
    """Run a function on ranks, and end them; `port` is that of another process's store."""
    store = TCPStore("127.0.0.1", port or 0, is_master=port is None, wait_for_workers=False)
    ends = [mp.Pipe() for _ in range(world)]
    processes = [
        process_of(run_rank, act, rank, world, store.port, root, end)
        for rank, (_, end) in enumerate(ends)
    ]
    try:
        for process in processes:
            process.start()
        yield Ranks(processes, [own for own, _ in ends])
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_all(act: Rank, world: int, root: Path) -> None:
    with ranks(act, world, root) as running:
        for rank in range(world):
            assert running.receive(rank) == "end"


def save_irregular(rank: int, root: Path, pipe: Any) -> None:
    """Save a model whose chunks have pieces of two ranks, twice, with values of each rank."""
    model = sharded("fsdp+tp", reference())
    state = {"model": model, "optimizer": step_once(model), "of": f"rank {rank}"}
    with checkpoint.Saver() as saver:
        saver.save(f"{root}/run", state, step=7).wait(patient(LIMIT_S))
        handle = saver.save(f"{root}/run", state, step=8)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        handle.wait(patient(LIMIT_S))
    checkpoint.save(f"{root}/blocking", state, step=8)


def test_shards_that_form_no_grid_are_saved_as_they_were_at_the_call(tmp_path: Path) -> None:
    run_all(save_irregular, 4, tmp_path)
    model: nn.Module = Block()
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()))
    for step in (7, 8):
        filled = {"model": model, "optimizer": optimizer, "of": ""}
        checkpoint.load(f"{tmp_path}/run", filled, step=step)
        check_equal(model, optimizer)
        source = StoredCheckpoint.open(open_storage(f"{tmp_path}/run"), step)
        assert check_content(source)
    # Documents of ranks that differ are merged as a blocking save merges them.
    blocking = StoredCheckpoint.open(open_storage(f"{tmp_path}/blocking"))
    assert blocking.documents["values"] == source.documents["values"] == {"of": "rank 3"}


def save_on_own_disks(rank: int, root: Path, pipe: Any) -> None:
    state = {"x": torch.ones(700, 600)}
    with pytest.raises(CheckpointError) as blocking:
        checkpoint.save(f"{root}/disk-{rank}", state, step=1)
    with checkpoint.Saver() as saver:
        handle = saver.save(f"{root}/disk-{rank}", state, step=1)
        with pytest.raises(CheckpointError) as background:
            handle.wait(patient(LIMIT_S))
    pipe.send((str(blocking.value), str(background.value)))


def test_parts_on_disks_of_each_rank_are_no_checkpoint(tmp_path: Path) -> None:
    with ranks(save_on_own_disks, 2, tmp_path) as running:
        for rank in range(2):
            for told in running.receive(rank):
                assert "1 of 2 writers have written elsewhere" in told
    assert (
        list_steps(open_storage(f"{tmp_path}/disk-0"))
        == list_steps(open_storage(f"{tmp_path}/disk-1"))
        == ()
    )


def fail_on_rank_1(rank: int, root: Path, pipe: Any) -> None:
    state = {"x": torch.full((700, 600), 1.0), "y": torch.ones(700, 600)}
    (root / "file").touch()
    with checkpoint.Saver() as saver:
        url = f"{root}/file/run" if rank == 1 else f"{root}/run"
        failed = saver.save(url, state, step=1)
        # Training goes on, with collectives.
        dist.all_reduce(state["x"])
        with pytest.raises(CheckpointError) as caught:
            failed.wait(patient(LIMIT_S))
        handle = saver.save(f"{root}/run", state, step=2)
        handle.wait(patient(LIMIT_S))
        is_of_another_rank = isinstance(caught.value, RankFailed)
        pipe.send((is_of_another_rank, str(caught.value), str(handle.previous_error)))


def test_a_failure_on_one_rank_is_told_on_all_and_training_goes_on(tmp_path: Path) -> None:
    with ranks(fail_on_rank_1, 2, tmp_path) as running:
        told = [running.receive(rank) for rank in range(2)]
        assert [running.receive(rank) for rank in range(2)] == ["end", "end"]
    assert [is_of_another_rank for is_of_another_rank, *_ in told] == [True, False]
    assert told[0][1].startswith("rank 1: ")
    assert told[0][2].startswith("step 1 was not stored: rank 1: ")
    assert told[0][2] == told[1][2]
    assert [stored.step for stored in list_steps(open_storage(f"{tmp_path}/run"))] == [2]
    x = {"x": torch.zeros(700, 600)}
    checkpoint.load(f"{tmp_path}/run", x, strict=False)
    assert bool((x["x"] == 2.0).all())


def hold_rank_0(rank: int, root: Path, pipe: Any) -> None:
    hold(0, rank, root, pipe)


def hold_rank_1(rank: int, root: Path, pipe: Any) -> None:
    hold(1, rank, root, pipe)


def hold(held: int, rank: int, root: Path, pipe: Any) -> None:
    """Save twice; the second time the writer of one rank is stopped."""
    state = {"x": torch.ones(700, 600), "y": torch.ones(700, 600)}
    saver = checkpoint.Saver(peer_timeout_s=PEER_TIMEOUT_S)
    saver.save(f"{root}/run", state, step=1).wait(patient(LIMIT_S))
    assert saver.writer_pid is not None
    if rank == held:
        os.kill(saver.writer_pid, signal.SIGSTOP)
    handle = saver.save(f"{root}/run", state, step=2)
    pipe.send(saver.writer_pid)
    with pytest.raises(CheckpointError) as caught:
        handle.wait(patient(LIMIT_S))
    pid = saver.writer_pid
    saver.close()
    pipe.send((str(caught.value), pid is not None and psutil.pid_exists(pid)))


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_fails_the_save_of_the_others_and_leaves_nothing(
    tmp_path: Path, dead: int
) -> None:
    with ranks((hold_rank_0, hold_rank_1)[dead], 2, tmp_path) as running:
        writers = [running.receive(rank) for rank in range(2)]
        running.processes[dead].kill()
        error, is_left = running.receive(1 - dead)
        assert f"rank {dead} has ended, or sent no heartbeat for 3 s" in error
        assert not is_left
        for pid in writers:
            if psutil.pid_exists(pid):
                psutil.Process(pid).wait(patient(LIMIT_S))
    assert [stored.step for stored in list_steps(open_storage(f"{tmp_path}/run"))] == [1]


def exit_at_once(rank: int, root: Path, pipe: Any) -> None:
    """Form a group whose store rank 0 serves; save, leave it and exit."""
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if not rank else None
    port: list[Any] = [served.port if served else None]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    store = served or TCPStore("127.0.0.1", port[0], is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    saver = checkpoint.Saver()
    state = {"x": torch.ones(700, 600), "y": torch.ones(700, 600)}
    handle = saver.save(f"{root}/run", state, step=1)
    del store, served
    dist.destroy_process_group()
    saver.close()
    assert handle.error is None, str(handle.error)


def test_ranks_that_leave_their_group_at_once_commit(tmp_path: Path) -> None:
    run_all(exit_at_once, 3, tmp_path)
    assert [stored.step for stored in list_steps(open_storage(f"{tmp_path}/run"))] == [1]


def serve_store(pipe: Any) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@contextmanager
def store_of_another_process() -> Iterator[tuple[int, BaseProcess]]:
    """Yield the port of a store and the process that serves it."""
    own, other = mp.Pipe()
    process = process_of(serve_store, other)
    process.start()
    try:
        assert own.poll(patient(LIMIT_S)), "the store is not served"
        yield own.recv(), process
    finally:
        process.kill()
        process.join()


def save_when_told(rank: int, root: Path, pipe: Any) -> None:
    """Save; save again when told to."""
    state = {"x": torch.ones(700, 600), "y": torch.ones(700, 600)}
    saver = checkpoint.Saver(peer_timeout_s=PEER_TIMEOUT_S)
    saver.save(f"{root}/run", state, step=1).wait(patient(LIMIT_S))
    pipe.send("saved")
    pipe.recv()
    for step in (2, 3):
        saver.save(f"{root}/run", state, step=step).wait(patient(LIMIT_S))
    checkpoint.save(f"{root}/run", state, step=4)
    saver.close()


def test_a_store_that_falls_silent_after_the_first_save_fails_none(tmp_path: Path) -> None:
    with (
        store_of_another_process() as (port, server),
        ranks(save_when_told, 2, tmp_path, port) as running,
    ):
        assert [running.receive(rank) for rank in range(2)] == ["saved", "saved"]
        assert server.pid is not None
        # The connections stay open: as if the host had vanished.
        os.kill(server.pid, signal.SIGSTOP)
        for pipe in running.pipes:
            pipe.send("save")
        assert [running.receive(rank) for rank in range(2)] == ["end", "end"]
    assert [stored.step for stored in list_steps(open_storage(f"{tmp_path}/run"))] == [4, 3, 2, 1]
