"""Measures the processor time that TCP alone takes to move the state of two nodes to each other.

`python ops/bench/loopback_transfer.py BYTES`. Each of two processes sends BYTES bytes of a memfd by
sendfile to one that receives them into a memfd, over the loopback, several times. The last line is
one JSON object: `cpu_s` are the processor seconds of all four processes for one transfer in each
direction, the median of six. Nothing is encoded, checked or authenticated.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import click

NODES, REPEATS = 2, 7
SENT_AT_ONCE_NBYTES, RECEIVED_AT_ONCE_NBYTES = 2**18, 2**22


@click.command()
@click.argument("nbytes", type=int)
def main(nbytes: int) -> None:
    context = multiprocessing.get_context("fork")
    ends, processes = [], []
    for _ in range(NODES):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sending = socket.create_connection(listener.getsockname())
            receiving, _ = listener.accept()
        for act, connection in ((send, sending), (receive, receiving)):
            here, there = context.Pipe()
            arguments = (act, connection, nbytes, there)
            process = context.Process(target=repeat, args=arguments, daemon=True)
            process.start()
            there.close()
            connection.close()
            ends.append(here)
            processes.append(process)
    sums = []
    for _ in range(REPEATS):
        for end in ends:
            end.send(None)
        sums.append(sum(end.recv() for end in ends))
    for process in processes:
        process.join()
    # The first one warms up the connections.
    print(json.dumps({"cpu_s": round(statistics.median(sums[1:]), 4)}))


def repeat(
    act: Callable[[socket.socket, int, mmap.mmap], None],
    connection: socket.socket,
    nbytes: int,
    end: Connection,
) -> None:
    """Act on request, and send the processor seconds that it took."""
    descriptor = os.memfd_create("transferred")
    os.ftruncate(descriptor, nbytes)
    memory = mmap.mmap(descriptor, nbytes)
    for start in range(0, nbytes, mmap.PAGESIZE):
        memory[start] = 1
    for _ in range(REPEATS):
        end.recv()
        began_s = time.process_time()
        act(connection, descriptor, memory)
        end.send(time.process_time() - began_s)


def send(connection: socket.socket, descriptor: int, memory: mmap.mmap) -> None:
    sent = 0
    while sent < len(memory):
        count = min(SENT_AT_ONCE_NBYTES, len(memory) - sent)
        sent += os.sendfile(connection.fileno(), descriptor, sent, count)


def receive(connection: socket.socket, descriptor: int, memory: mmap.mmap) -> None:
    view = memoryview(memory)
    while view.nbytes:
        count = connection.recv_into(view[:RECEIVED_AT_ONCE_NBYTES])
        if not count:
            raise EOFError("the sender ended")
        view = view[count:]


if __name__ == "__main__":
    main()
