"""Claims about what keeps a process from being forked into workers."""

from __future__ import annotations

import os
import socket
import threading

from keepstep.elastic.worker import fork_server


def test_thread_is_an_obstacle() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert fork_server._other_threads().startswith("an imported module has started")
    finally:
        end.set()
        thread.join()


def test_open_connections_and_devices_are_obstacles_and_files_are_none() -> None:
    own = frozenset(int(name) for name in os.listdir("/proc/self/fd"))
    with open(__file__), open(os.devnull), open("/dev/urandom"):
        assert fork_server._open_resource(own) == ""
        with socket.socket() as connection:
            inode = os.fstat(connection.fileno()).st_ino
            assert fork_server._open_resource(own).endswith(f"has opened socket:[{inode}]")
        assert fork_server._open_resource(own) == ""
        for descriptor in os.openpty():
            assert "has opened /dev/pt" in fork_server._open_resource(own)
            os.close(descriptor)
