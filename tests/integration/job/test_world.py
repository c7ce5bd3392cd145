"""Entering and leaving process groups, by real processes over gloo."""

import multiprocessing
import os
import socket
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from keepstep.elastic.trainer.process_groups import ProcessGroups
from keepstep.elastic.worker.session import Assignment


def assignment(generation: int, rank: int, port: int) -> Assignment:
    return Assignment(generation, "a", rank, 2, rank, 2, 0, 1, "127.0.0.1", port, "", "", "job", 0)


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


def survivor(line: Connection) -> None:
    groups = ProcessGroups()
    line.send("connecting")
    try:
        groups.enter(assignment(1, 0, line.recv()), {"dp": -1})
    except RuntimeError:
        groups.leave()
        line.send("failed")
    newcomer(line, groups, 0)


def newcomer(line: Connection, groups: ProcessGroups | None = None, rank: int = 1) -> None:
    groups = groups or ProcessGroups()
    groups.enter(assignment(2, rank, line.recv()), {"dp": -1})
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    line.send(int(total))
    # gloo's threads may abort the interpreter's exit.
    os._exit(0)


def test_who_failed_to_connect_finds_a_fresh_peer_in_the_next_generation() -> None:
    context = multiprocessing.get_context("spawn")
    lines, processes = [], []
    for target in (survivor, newcomer):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs,), daemon=True)
        process.start()
        lines.append(ours)
        processes.append(process)
    try:
        first, port = serve()
        assert lines[0].recv() == "connecting"
        lines[0].send(port)
        while first.num_keys() == 0:
            assert not lines[0].poll(0.01)
        # It has said where it is, and waits for its peer.
        del first
        assert lines[0].recv() == "failed"
        second, port = serve()
        for line in lines:
            line.send(port)
        for line in lines:
            assert line.poll(20), "the two do not find each other"
            assert line.recv() == 3
        del second
    finally:
        for process in processes:
            process.kill()
            process.join()
