"""Claims about the telemetry ring: readers get what the writer wrote, whatever happens to it."""

import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.monitor.errors import RingUnwritable
from keepstep.monitor.records import Communicator, Ending, Flag, Kind, Operation, Phase
from keepstep.monitor.telemetry import fences
from keepstep.monitor.telemetry.job_rings import JobRings
from keepstep.monitor.telemetry.ring import (
    Ring,
    RingSizes,
    WorkerIdentity,
    process_started,
    ranks_of,
    runs,
)
from keepstep.monitor.telemetry.ring_files import (
    base_directory,
    create_ring,
    job_directory,
    recorded_jobs,
    running_jobs,
)
from keepstep.monitor.telemetry.ring_reader import LaneReader, RingReader
from tests.unit.monitor.telemetry.ring.rings import IDENTITY, SMALL, damaged, operate


def test_jobs_that_have_rings_are_listed_by_name(base: Path) -> None:
    assert recorded_jobs() == ()
    for name in ("other", "job"):
        create_ring(WorkerIdentity(name, 0, "node-a", generation=1, world_size=1), SMALL).close()
    (base / "empty").mkdir()
    (base / "file").touch()
    assert recorded_jobs() == ("job", "other")


def test_job_whose_processes_have_ended_is_recorded_and_does_not_run(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_ring(WorkerIdentity("job", 0, "node-a", generation=1, world_size=1), SMALL).close()
    assert running_jobs() == ("job",)
    monkeypatch.setattr(RingReader, "is_alive", lambda _: False)
    assert running_jobs() == ()
    assert recorded_jobs() == ("job",)


def test_reader_gets_what_the_writer_wrote(ring: Ring) -> None:
    reader = RingReader(ring.path)
    assert reader.identity == IDENTITY
    assert reader.process == os.getpid()
    assert reader.is_alive()
    assert len(reader.last(10)) == 0
    ring.step = 7
    ring.operations.begin(
        Kind.OPERATION,
        Operation.SEND,
        number=5,
        step=7,
        enqueued_s=1.5,
        ended_s=2.5,
        nbytes=2**40,
        communicator=2**32 - 1,
        dtype=9,
        flags=Flag.ASYNCHRONOUS,
        peer=12,
    )
    (record,) = reader.last(10)
    assert record.tolist() == (2, 1, 10, 9, 1, 2**32 - 1, 5, 2**40, 12, 7, 1.5, 1.5, 2.5)
    assert reader.step == 7


def test_open_operation_is_completed_in_place(ring: Ring) -> None:
    reader = RingReader(ring.path)
    first, second = operate(ring, 1), operate(ring, 2)
    ring.operations.end(first, 1.25)
    ring.operations.end(second, 2.5, Flag.FAILED)
    assert reader.last(10)[["ended_s", "flags"]].tolist() == [(1.25, 0), (2.5, Flag.FAILED)]


def test_operation_that_was_overwritten_is_not_completed(ring: Ring) -> None:
    old = operate(ring, 1)
    for number in range(2, 258):
        operate(ring, number)
    ring.operations.end(old, 9.0)
    records = RingReader(ring.path).last(1000)
    assert records["number"].tolist() == list(range(2, 258))
    assert not records["ended_s"].any()


@given(written=st.integers(0, 1000), wanted=st.integers(0, 600))
def test_last_records_are_oldest_first_though_the_ring_wrapped_around(
    written: int, wanted: int
) -> None:
    made = create_ring(IDENTITY, SMALL)
    for number in range(1, written + 1):
        operate(made, number)
    reader = RingReader(made.path)
    expected = list(range(1, written + 1))[-min(wanted, 256) :] if wanted else []
    assert reader.last(wanted)["number"].tolist() == expected
    reader.close()
    made.close()


def test_many_operations_do_not_overwrite_phases(ring: Ring) -> None:
    ring.marks.begin(Kind.PHASE, Phase.STEP, number=1, step=1, enqueued_s=0.5)
    for number in range(1, 1000):
        operate(ring, number)
    assert RingReader(ring.path).last(10)["kind"].tolist() == [Kind.PHASE] + 10 * [Kind.OPERATION]


def stamp(ring: Ring, slot: int, value: int) -> None:
    with open(ring.path, "r+b") as file:
        file.seek(4096 + 64 * slot)
        file.write(struct.pack("<Q", value))


@pytest.mark.parametrize("torn", [2 * 2 + 1, 0, 2 * (2 - 256) + 2 + 2**64, 2 * (2 + 256) + 2])
def test_record_that_is_being_written_is_not_returned(ring: Ring, torn: int) -> None:
    for number in range(1, 6):
        operate(ring, number)
    stamp(ring, 2, torn % 2**64)
    assert RingReader(ring.path).operations.last(9)["number"].tolist() == [1, 2, 4, 5]


def test_reader_never_returns_a_torn_record_of_a_busy_writer(ring: Ring) -> None:
    """Every record contains the same number in three fields."""
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            ring.operations.begin(
                Kind.OPERATION,
                1,
                number=number,
                step=0,
                enqueued_s=float(number),
                ended_s=float(number),
                nbytes=number,
            )

    writer = threading.Thread(target=write)
    writer.start()
    reader = RingReader(ring.path)
    seen = 0
    while seen < 20_000:
        records = reader.last(256)
        assert (np.diff(records["number"].astype(np.int64)) > 0).all()
        assert (records["nbytes"] == records["number"]).all()
        assert (records["ended_s"] == records["number"]).all()
        seen += len(records)
    stop.set()
    writer.join()


def test_record_that_ends_while_it_is_copied_is_not_read_without_its_flags(ring: Ring) -> None:
    position = ring.marks.begin(Kind.OPERATION, 1, number=1, step=1, enqueued_s=1.0)

    class SlowReader(LaneReader):
        """Copies the beginning of a record, then lets the writer end it, then copies the rest."""

        def _copy(self, field: str | None, first: int, end: int) -> np.ndarray:
            copy = super()._copy(field, first, end)
            if field is None:
                ring.marks.end(position, 2.0, flags=Flag.FAILED)
                copy["ended_s"] = super()._copy("ended_s", first, end)
            return copy

    file, region = RingReader(ring.path)._file, SMALL.regions[1]
    (record,) = SlowReader(file, region).last(1)
    assert (record["ended_s"] > 0) == bool(record["flags"] & Flag.FAILED)
    (record,) = LaneReader(file, region).last(1)
    assert (record["ended_s"], record["flags"]) == (2.0, Flag.FAILED)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="membarrier is Linux's")
def test_rings_are_read_where_the_processor_keeps_no_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []
    membarrier = fences._membarrier

    def counted(command: int) -> bool:
        calls.append(membarrier(command))
        return calls[-1]

    monkeypatch.setattr(fences, "KEEPS_ORDER", False)
    monkeypatch.setattr(fences, "_membarrier", counted)
    ring = Ring.create(tmp_path / "ring", WorkerIdentity("job", 0, "a"), SMALL)
    ring.marks.begin(Kind.PHASE, 1, number=7, step=1, enqueued_s=1.0, ended_s=2.0)
    assert RingReader(ring.path).last(9)["number"].tolist() == [7]
    # The writer registered, and the reader ordered its loads, which this kernel allows.
    assert len(calls) == 4
    assert all(calls)
    assert caplog.records == []


def test_reader_waits_between_its_loads_where_the_kernel_orders_none(
    monkeypatch: pytest.MonkeyPatch, ring: Ring
) -> None:
    ring.marks.begin(Kind.PHASE, 1, number=7, step=1, enqueued_s=1.0, ended_s=2.0)
    log: list[str] = []
    read = os.pread

    def logged(*arguments: Any) -> bytes:
        log.append("load")
        return read(*arguments)

    monkeypatch.setattr(fences, "KEEPS_ORDER", False)
    monkeypatch.setattr(fences, "_membarrier", lambda command: False)
    monkeypatch.setattr("time.sleep", lambda seconds: log.append("wait"))
    reader = RingReader(ring.path)
    monkeypatch.setattr(os, "pread", logged)
    assert reader.marks.last(9)["number"].tolist() == [7]
    # The position; then stamps, ends, records, and stamps again, each after the one before.
    assert log == ["load", "load", "wait", "load", "wait", "load", "wait", "load"]


def test_communicators_are_read_completely_or_not_at_all(ring: Ring) -> None:
    reader = RingReader(ring.path)
    mesh = Communicator(7, "mesh_dp", tuple(range(3, 4096, 8)))
    odd = Communicator(9, "odd", (5, 1, 9, 10, 11))
    assert ring.add_communicator(mesh)
    assert reader.communicators() == {7: mesh}
    assert ring.add_communicator(odd)
    assert reader.communicators() == {7: mesh, 9: odd}
    assert not ring.add_communicator(Communicator(1, "x" * 600, (0,)))
    assert reader.communicators() == {7: mesh, 9: odd}


def test_table_of_communicators_holds_exactly_its_capacity(ring: Ring) -> None:
    reader = RingReader(ring.path)
    line_nbytes = len('{"identity": 1, "name": "", "ranks": [[0, 1, 1]]}\n')
    half = SMALL.table_nbytes // 2
    first, second = (
        Communicator(identity, "x" * (half - line_nbytes), (0,)) for identity in (1, 2)
    )
    longer = Communicator(3, "x" * (half - line_nbytes + 1), (0,))
    assert ring.add_communicator(first)
    # It would fit alone, and is one byte too long next to the first.
    assert not ring.add_communicator(longer)
    assert ring.add_communicator(second)
    assert not ring.add_communicator(Communicator(4, "", (0,)))
    assert reader.communicators() == {1: first, 2: second}


@given(st.lists(st.integers(0, 30), unique=True))
def test_runs_of_ranks_are_lossless(ranks: list[int]) -> None:
    assert ranks_of(runs(ranks)) == tuple(ranks)


def test_ring_of_a_killed_process_is_readable_and_its_process_is_dead() -> None:
    code = (
        "import os, signal\n"
        "from keepstep.monitor.telemetry.ring import WorkerIdentity\n"
        "from keepstep.monitor.telemetry.ring_files import create_ring\n"
        "ring = create_ring(WorkerIdentity('job', 0, 'a'))\n"
        "ring.operations.begin(1, 1, number=41, step=1, enqueued_s=1.0, ended_s=2.0)\n"
        "ring.operations.begin(1, 9, number=42, step=1, enqueued_s=3.0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    # The process is a zombie now, which does not count as alive.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    rank = JobRings(job_directory("job")).read(10).ranks[0]
    assert rank.records[["number", "ended_s"]].tolist() == [(41, 2.0), (42, 0.0)]
    assert not rank.is_alive
    assert rank.ending == Ending.NONE
    assert child.wait() == -signal.SIGKILL


def test_later_process_with_the_same_id_is_not_the_writer(ring: Ring) -> None:
    with open(ring.path, "r+b") as file:
        file.seek(32)
        file.write(struct.pack("<Q", (process_started(os.getpid()) or 0) - 1))
    assert not RingReader(ring.path).is_alive()


def test_stopped_process_is_alive_and_a_finished_one_is_recorded_as_such(ring: Ring) -> None:
    reader = RingReader(ring.path)
    ring.finish()
    assert reader.ending == Ending.FINISHED
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert process_started(child.pid)
    child.kill()
    child.join()
    assert process_started(child.pid) is None


def test_new_worker_replaces_the_ring_and_readers_keep_the_old_one(ring: Ring) -> None:
    operate(ring, 41)
    old = RingReader(ring.path)
    rings = JobRings(ring.path.parent)
    assert rings.read(5).ranks[3].records["number"].tolist() == [41]
    new = create_ring(WorkerIdentity("job", 3, "node-a", generation=3), SMALL)
    assert new.path == ring.path
    operate(ring, 42)
    operate(new, 1)
    assert old.last(5)["number"].tolist() == [41, 42]
    assert rings.read(5).ranks[3].records["number"].tolist() == [1]
    assert os.listdir(ring.path.parent) == ["rank-00003.ring"]


def test_ranks_of_an_earlier_generation_are_not_read(ring: Ring) -> None:
    for rank in (0, 1):
        operate(create_ring(WorkerIdentity("job", rank, "node-a", generation=3), SMALL), 1)
    rings = JobRings(ring.path.parent)
    assert set(rings.read(5).ranks) == {0, 1}
    assert set(rings.processes()) == {0, 1}


def launched(
    rank: int, generation: int, world_size: int, before_s: float = 0.0, *, dead: bool = False
) -> None:
    """Create a ring, as of `before_s` before this process started; by default as of now."""
    made = create_ring(WorkerIdentity("job", rank, "node-a", generation, world_size), SMALL)
    if before_s:
        damaged(made, 56, struct.pack("<d", RingReader(made.path).process_started_s - before_s))
    if dead:
        damaged(made, 28, struct.pack("<I", 2**31 - 1))
    made.close()


def test_ranks_of_an_earlier_launch_are_not_read_and_those_that_died_since_are() -> None:
    launched(5, 9, 8, before_s=50.0, dead=True)  # That launch was restarted more often.
    launched(4, 1, 8, before_s=50.0, dead=True)
    launched(3, 1, 2, before_s=50.0, dead=True)  # Its ranks were placed differently.
    launched(2, 1, 8, before_s=50.0)  # Its process is still alive.
    for rank in (0, 1):
        launched(rank, 1, 2, dead=rank == 1)
    rings = JobRings(job_directory("job"))
    alive = {rank: records.is_alive for rank, records in rings.read(5).ranks.items()}
    assert alive == {0: True, 1: False}
    assert set(rings.processes()) == set(rings.incarnations()) == {0, 1}
    assert (rings.generation(), rings.world_size()) == (1, 2)
    launched(0, 1, 2, dead=True)
    assert set(rings.read(5).ranks) == {0, 1}


def test_rank_that_was_killed_before_the_last_ring_was_created_is_read() -> None:
    launched(0, 1, 2, dead=True)
    launched(1, 1, 2)
    assert set(JobRings(job_directory("job")).read(5).ranks) == {0, 1}


def test_rings_from_before_a_reboot_do_not_hide_current_ranks() -> None:
    launched(0, 1, 2)
    launched(1, 4, 2, before_s=-1e6, dead=True)
    assert set(JobRings(job_directory("job")).read(5).ranks) == {0}


@pytest.mark.parametrize(
    ("process", "generation", "warns"),
    [
        (os.getppid(), 2, True),
        (os.getppid(), 1, False),
        (os.getpid(), 2, False),
        (2**31 - 1, 2, False),
    ],
    ids=["another job", "an earlier generation", "reopened", "dead"],
)
def test_replacing_the_ring_of_another_running_job_is_logged(
    process: int, generation: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    other = create_ring(replace(IDENTITY, generation=generation), SMALL)
    damaged(other, 28, struct.pack("<I", process))
    damaged(other, 32, struct.pack("<Q", process_started(process) or 0))
    create_ring(IDENTITY, SMALL).close()
    assert [
        f"process {process}" in message and "KEEPSTEP_JOB" in message for message in caplog.messages
    ] == [True] * warns


def test_full_memory_gives_an_error_with_the_remedy_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RingUnwritable, match="KEEPSTEP_MONITOR_DIR"):
        create_ring(IDENTITY, RingSizes(operations=2**45))
    assert os.listdir(job_directory("job")) == []


@pytest.mark.parametrize("job", ["../../etc", "..", "a/b", "", "x" * 500])
def test_directory_of_any_job_is_inside_the_base_directory(job: str) -> None:
    assert job_directory(job).parent == base_directory()
    assert job_directory(job).name not in ("", ".", "..")


def test_no_two_jobs_share_a_directory() -> None:
    jobs = ["a/b", "a_b", "a b", "", "_", ".", "..", "x" * 128, "x" * 129, "x" * 130]
    assert len({job_directory(job) for job in jobs}) == len(jobs)
    assert job_directory("run7.a-b_c") == base_directory() / "run7.a-b_c"
