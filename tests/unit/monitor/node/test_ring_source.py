"""Claims about incremental reading of rings: few records at a time, and none is missed."""

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.monitor.node.ring_source import RingSource
from keepstep.monitor.records import Communicator, Flag, Kind, Operation, Phase
from keepstep.monitor.telemetry.job_rings import JobRings
from keepstep.monitor.telemetry.ring import Ring, WorkerIdentity
from keepstep.monitor.telemetry.ring_files import Sweeper, create_ring, job_directory


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ring]:
    monkeypatch.setenv("KEEPSTEP_MONITOR_DIR", str(tmp_path / "rings"))
    made = create_ring(WorkerIdentity("run7", 3, "node-a"))
    made.add_communicator(Communicator(7, "world", (0, 3)))
    yield made
    made.close()


def operations(ring: Ring, count: int, first: int = 1, ended: bool = True) -> list[int]:
    now_s = time.monotonic()
    return [
        ring.operations.begin(
            Kind.OPERATION,
            Operation.ALL_REDUCE,
            number=number,
            step=1,
            enqueued_s=now_s,
            communicator=7,
            ended_s=now_s + 1e-6 if ended else 0.0,
        )
        for number in range(first, first + count)
    ]


def numbers(source: RingSource) -> set[int]:
    (reading,) = source.read()
    assert (reading.records.rank, reading.communicators[0].name) == (3, "world")
    return set(
        reading.records.records["number"][
            reading.records.records["kind"] == Kind.OPERATION
        ].tolist()
    )


def test_later_readings_are_small_and_a_burst_is_read_completely(ring: Ring) -> None:
    source = RingSource(job_directory("run7"))
    operations(ring, 3000)
    assert numbers(source) == set(range(1, 3001))
    operations(ring, 10, 3001)
    second_reading = numbers(source)
    assert set(range(3001, 3011)) <= second_reading
    assert len(second_reading) < 500
    # Far more than in the previous reading.
    operations(ring, 5000, 3011)
    assert set(range(3011, 8011)) <= numbers(source)
    source.close()


def test_burst_is_read_completely_though_one_of_its_records_is_being_written(ring: Ring) -> None:
    source = RingSource(job_directory("run7"))
    operations(ring, 3000)
    numbers(source)
    operations(ring, 10, 3001)
    numbers(source)
    (*_, position) = operations(ring, 5000, 3011)
    with open(ring.path, "r+b") as file:
        file.seek(ring.sizes.regions[0].offset + 64 * position)
        file.write(struct.pack("<Q", 2 * position + 1))
    assert set(range(3011, 8010)) <= numbers(source)
    source.close()


def test_new_ring_is_read_once_next_to_a_busy_one(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = RingSource(job_directory("run7"))
    operations(ring, 3000)
    numbers(source)
    counts: list[int] = []
    read = JobRings.read
    monkeypatch.setattr(
        JobRings, "read", lambda rings, count: (counts.append(count), read(rings, count))[1]
    )
    other = create_ring(WorkerIdentity("run7", 4, "node-a"))
    operations(other, 5)
    assert {reading.records.rank for reading in source.read()} == {3, 4}
    assert len(counts) == 1
    other.close()
    source.close()


def test_open_operation_is_read_again_however_far_back_it_lies(ring: Ring) -> None:
    source = RingSource(job_directory("run7"))
    (waiting,) = operations(ring, 1, ended=False)
    for turn in range(6):
        operations(ring, 400, 2 + 400 * turn)
        assert 1 in numbers(source)
    ring.operations.end(waiting, time.monotonic())
    (reading,) = source.read()
    records = reading.records.records
    assert records["ended_s"][records["number"] == 1] > 0
    source.close()


def test_operation_whose_end_cannot_be_seen_is_not_read_again_and_again(ring: Ring) -> None:
    source = RingSource(job_directory("run7"))
    (unseen,) = operations(ring, 1, ended=False)
    ring.operations.end(unseen, 0.0, Flag.UNOBSERVED)
    assert 1 in numbers(source)
    for turn in range(6):
        operations(ring, 400, 2 + 400 * turn)
        last = numbers(source)
    assert 1 not in last
    source.close()


def test_phases_and_a_new_writer_are_read(ring: Ring) -> None:
    source = RingSource(job_directory("run7"))
    operations(ring, 600)
    first = source.read()[0].incarnation
    ring.marks.begin(Kind.PHASE, Phase.FORWARD, number=1, step=1, enqueued_s=time.monotonic())
    records = source.read()[0].records.records
    assert (records["kind"] == Kind.PHASE).sum() == 1
    again = create_ring(WorkerIdentity("run7", 3, "node-a"))
    operations(again, 2)
    (reading,) = source.read()
    assert reading.incarnation != first
    assert len(reading.records.records) == 2
    again.close()
    source.close()


def test_rings_are_read_if_rings_of_dead_processes_cannot_be_removed(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> list[Path]:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Sweeper, "sweep", refuse)
    source = RingSource(job_directory("run7"))
    operations(ring, 3)
    assert numbers(source) == {1, 2, 3}
    source.close()
