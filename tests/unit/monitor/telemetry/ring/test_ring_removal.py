"""Claims about rings of processes that have ended: they are removed, and no others."""

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from keepstep.monitor.node.probes import _is_stopped
from keepstep.monitor.node.ring_source import RingSource
from keepstep.monitor.records import RECORD
from keepstep.monitor.telemetry.ring import (
    MAGIC,
    Ring,
    WorkerIdentity,
    process_started,
)
from keepstep.monitor.telemetry.ring_files import (
    Sweeper,
    base_directory,
    create_ring,
    ring_paths,
)
from keepstep.monitor.telemetry.ring_reader import RingReader
from tests.unit.monitor.telemetry.ring.rings import SMALL, damaged, operate


def dead_ring(rank: int) -> Path:
    """Create a ring whose process does not exist."""
    made = create_ring(WorkerIdentity("job", rank, "node-a"), SMALL)
    damaged(made, 28, struct.pack("<I", 2**31 - 1))
    made.close()
    return made.path


def test_only_rings_of_dead_processes_are_removed_and_only_after_a_time(
    ring: Ring,
) -> None:
    path = dead_ring(0)
    other = ring.path.parent / "notes.txt"
    other.write_text("not a ring")
    sweeper = Sweeper(keep_s=60.0)
    assert sweeper.sweep([ring.path.parent], 1000.0) == []
    assert sweeper.sweep([ring.path.parent], 1059.0) == []
    assert sweeper.sweep([ring.path.parent], 1060.0) == [path]
    assert ring_paths(ring.path.parent) == [ring.path]
    assert other.exists()


def test_directory_is_removed_with_its_last_ring() -> None:
    path = dead_ring(0)
    sweeper = Sweeper(keep_s=0.0)
    assert sweeper.sweep([path.parent], 1.0) == [path]
    assert not path.parent.exists()
    assert base_directory().exists()
    assert sweeper.sweep([path.parent], 2.0) == []


def test_ring_that_a_killed_process_left_unfinished_is_removed(ring: Ring) -> None:
    code = (
        "import os, signal\n"
        "from keepstep.monitor.telemetry.ring import WorkerIdentity\n"
        "from keepstep.monitor.telemetry.ring_files import create_ring\n"
        "os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "create_ring(WorkerIdentity('job', 0, 'a'))\n"
    )
    directory = ring.path.parent
    before = set(directory.iterdir())
    child = subprocess.Popen([sys.executable, "-c", code])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    (unfinished,) = set(directory.iterdir()) - before
    sweeper = Sweeper(keep_s=60.0)
    assert sweeper.sweep([directory], 0.0) == []
    assert sweeper.sweep([directory], 60.0) == [unfinished]
    assert set(directory.iterdir()) == before
    assert child.wait() == -signal.SIGKILL


def test_unfinished_ring_of_an_earlier_process_with_the_same_id_is_removed(ring: Ring) -> None:
    started = process_started(os.getpid()) or 0
    own = ring.path.with_name(f".rank-00000.{os.getpid()}-{started}.1")
    earlier = ring.path.with_name(f".rank-00000.{os.getpid()}-{started - 1}.1")
    own.touch()
    earlier.touch()
    assert Sweeper(keep_s=0.0).sweep([ring.path.parent], 1.0) == [earlier]
    assert own.exists()


def test_ring_that_is_being_created_is_kept(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def sweep_first(source: Path, target: Path) -> None:
        Sweeper(keep_s=0.0).sweep([ring.path.parent], 1.0)
        rename(source, target)

    monkeypatch.setattr(os, "rename", sweep_first)
    made = create_ring(WorkerIdentity("job", 0, "node-a"), SMALL)
    assert made.path in ring_paths(ring.path.parent)
    made.close()


def test_ring_that_a_killed_monitor_left_half_removed_is_removed(ring: Ring) -> None:
    path = dead_ring(0)
    aside = path.with_name(f".removed-{path.name}.4711.1")
    path.rename(aside)
    living = aside.with_name(f".removed-{ring.path.name}.4711.1")
    os.link(ring.path, living)
    assert Sweeper(keep_s=0.0).sweep([path.parent], 1.0) == [aside]
    assert living.exists()


def test_daemon_removes_rings_of_processes_that_died_long_ago(ring: Ring) -> None:
    path = dead_ring(0)
    kept = RingSource(ring.path.parent)
    kept.read()
    assert path.exists()
    kept.close()
    source = RingSource(ring.path.parent, keep_s=0.0)
    source.read()
    assert ring_paths(ring.path.parent) == [ring.path]
    source.close()


def test_ring_that_was_replaced_meanwhile_is_kept_for_its_own_time() -> None:
    path = dead_ring(0)
    sweeper = Sweeper(keep_s=60.0)
    sweeper.sweep([path.parent], 0.0)
    dead_ring(0)
    assert sweeper.sweep([path.parent], 100.0) == []
    assert sweeper.sweep([path.parent], 160.0) == [path]


def test_directory_that_others_may_write_to_is_not_swept(base: Path) -> None:
    path = dead_ring(0)
    base.chmod(0o777)
    sweeper = Sweeper(keep_s=0.0)
    assert sweeper.sweep([path.parent], 1.0) == []
    base.chmod(0o700)
    assert sweeper.sweep([path.parent], 2.0) == [path]


def test_new_workers_ring_survives_a_sweep_of_the_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = dead_ring(0)
    sweeper = Sweeper(keep_s=0.0)
    rename = os.rename
    new_workers = iter([WorkerIdentity("job", 0, "node-a", generation=9)])

    def replace_first(source: Path, target: Path) -> None:
        for identity in new_workers:
            create_ring(identity, SMALL)
        rename(source, target)

    monkeypatch.setattr(os, "rename", replace_first)
    assert sweeper.sweep([path.parent], 1.0) == []
    assert RingReader(path).identity.generation == 9


def test_format_is_as_documented(ring: Ring) -> None:
    operate(ring, 1, ended_s=4.0)
    raw = ring.path.read_bytes()
    assert raw[:16] == MAGIC
    assert struct.unpack_from("<IIIIQiIQd", raw, 16)[:8] == (
        1, 4096, 64, os.getpid(), process_started(os.getpid()), 3, 8, 2,
    )  # fmt: skip
    assert struct.unpack_from("<II", raw, 64) == (0, 1)
    assert struct.unpack_from("<9Q", raw, 72) == (4096, 256, 1, 20480, 256, 0, 36864, 512, 0)
    assert raw[256:259] == b"job"
    assert raw[512:518] == b"node-a"
    assert np.frombuffer(raw, RECORD, 1, 4096)["ended_s"] == 4.0
    assert len(raw) == 36864 + 512


def test_reading_rings_does_not_import_pytorch() -> None:
    names = ("clocks", "flight_recorder", "job_rings", "recorder", "ring_files")
    modules = ", ".join(
        ["keepstep.monitor", *(f"keepstep.monitor.telemetry.{name}" for name in names)]
    )
    subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; sys.exit('torch' in sys.modules)"],
        check=True,
    )


def test_process_may_have_a_name_that_is_no_text() -> None:
    """The kernel cuts names in the middle of a character; such a one made a daemon deaf."""
    code = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, b"abc-\\xe8\\xae", 0, 0, 0)
print(flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert b"\xe8\xae)" in Path(f"/proc/{process.pid}/stat").read_bytes()
        assert process_started(process.pid) is not None
        assert not _is_stopped(process.pid)
        process.communicate()
