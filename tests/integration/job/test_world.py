"""Claims about entering and leaving process groups, with real processes over gloo."""

import multiprocessing
import os
import socket
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from keepstep.elastic.trainer.process_groups import ProcessGroups
from keepstep.elastic.worker.messages import Assignment


def assignment(generation: int, rank: int, port: int) -> Assignment:
    return Assignment(
        generation=generation,
        node="a",
        rank=rank,
        world_size=2,
        local_rank=rank,
        local_world_size=2,
        node_rank=0,
        node_count=1,
        store_host="127.0.0.1",
        store_port=port,
        server="",
        secret="",
        job="job",
        max_restarts=0,
    )


def serve() -> tuple[TCPStore, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def survivor(connection: Connection) -> None:
    groups = ProcessGroups("cpu")
    connection.send("connecting")
    try:
        groups.enter(assignment(1, 0, connection.recv()), {"dp": -1})
    except RuntimeError:
        groups.leave()
        connection.send("failed")
    newcomer(connection, groups, 0)


def newcomer(connection: Connection, groups: ProcessGroups | None = None, rank: int = 1) -> None:
    groups = groups or ProcessGroups("cpu")
    groups.enter(assignment(2, rank, connection.recv()), {"dp": -1})
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    connection.send(int(total))
    # gloo's threads may abort the process during the interpreter's exit.
    os._exit(0)


def split_in_both_generations(connection: Connection) -> None:
    groups, (store, port) = ProcessGroups("cpu"), serve()
    for generation in (1, 2):
        groups.enter(replace(assignment(generation, 0, port), world_size=1), {"dp": -1})
        group = dist.group.WORLD
        assert group is not None
        # What a mesh of several dimensions does on GPUs.
        child = group.split_group([0], timeout=timedelta(seconds=30), group_name=f"{generation}")
        total = torch.tensor([generation])
        child.allreduce([total]).wait()
        connection.send(int(total))
        del group, child
        groups.leave()
    del store
    os._exit(0)


def test_groups_of_a_process_that_has_had_others_before_can_be_split() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=split_in_both_generations, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        # PyTorch ends the process in the second one: `EOFError`.
        assert [here.recv(), here.recv()] == [1, 2]
    finally:
        process.kill()
        process.join()


def test_rank_that_failed_to_connect_reaches_a_new_peer_in_the_next_generation() -> None:
    context = multiprocessing.get_context("spawn")
    connections, processes = [], []
    for target in (survivor, newcomer):
        test_end, process_end = context.Pipe()
        process = context.Process(target=target, args=(process_end,), daemon=True)
        process.start()
        connections.append(test_end)
        processes.append(process)
    try:
        first, port = serve()
        assert connections[0].recv() == "connecting"
        connections[0].send(port)
        while first.num_keys() == 0:
            assert not connections[0].poll(0.01)
        # The rank has published its address and waits for its peer.
        del first
        assert connections[0].recv() == "failed"
        second, port = serve()
        for connection in connections:
            connection.send(port)
        for connection in connections:
            assert connection.poll(20), "the ranks do not connect"
            assert connection.recv() == 3
        del second
    finally:
        for process in processes:
            process.kill()
            process.join()
