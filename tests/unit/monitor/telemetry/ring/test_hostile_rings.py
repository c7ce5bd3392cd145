"""Claims about rings that are damaged, or that others could have made: they are refused."""

import os
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.monitor.errors import RingUnreadable, RingUnwritable
from keepstep.monitor.node.ring_source import RingSource
from keepstep.monitor.records import Communicator, Ending
from keepstep.monitor.telemetry.job_rings import JobRings
from keepstep.monitor.telemetry.ring import (
    Ring,
)
from keepstep.monitor.telemetry.ring_files import (
    create_ring,
    recorded_jobs,
)
from keepstep.monitor.telemetry.ring_reader import RingReader
from tests.unit.monitor.telemetry.ring.rings import IDENTITY, SMALL, damaged, operate


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        (0, b"\x7fELF", "no telemetry ring"),
        (16, struct.pack("<I", 2), "version 2, this monitor reads 1: upgrade the monitor"),
        (16, struct.pack("<I", 0), "restart the worker"),
        (24, struct.pack("<I", 128), "damaged"),
        (80, struct.pack("<Q", 300), "power of two"),
        (80, struct.pack("<Q", 2**40), "damaged or truncated"),
        (96, struct.pack("<Q", 12), "damaged"),
    ],
)
def test_unreadable_ring_is_refused_with_the_reason(
    ring: Ring, at: int, data: bytes, message: str
) -> None:
    damaged(ring, at, data)
    with pytest.raises(RingUnreadable, match=message):
        RingReader(ring.path)


@pytest.mark.parametrize("nbytes", [0, 100, 4096, 37_000])
def test_truncated_ring_is_refused(ring: Ring, nbytes: int) -> None:
    os.truncate(ring.path, nbytes)
    with pytest.raises(RingUnreadable, match="truncated"):
        RingReader(ring.path)


def test_invalid_ring_does_not_prevent_reading_the_others(
    ring: Ring, caplog: pytest.LogCaptureFixture
) -> None:
    (ring.path.parent / "rank-00004.ring").write_bytes(b"what is this" * 1000)
    rings = JobRings(ring.path.parent)
    assert set(rings.read(1).ranks) == {3}
    rings.read(1)
    assert len(caplog.records) == 1


def test_ring_that_cannot_be_opened_does_not_prevent_reading_the_others(
    ring: Ring, caplog: pytest.LogCaptureFixture
) -> None:
    place = ring.path.parent
    (place / "rank-00004.ring").mkdir()
    (place / "rank-00005.ring").symlink_to(ring.path)
    (place / "rank-00006.ring").symlink_to(place / "nowhere")
    rings = JobRings(place)
    assert set(rings.read(1).ranks) == {3}
    rings.read(1)
    assert [message.partition(" cannot")[0][-10:] for message in caplog.messages] == [
        "00004.ring",
        "00005.ring",
        "00006.ring",
    ]
    # The obstacle is removed.
    (place / "rank-00004.ring").rmdir()
    create_ring(replace(IDENTITY, rank=4), SMALL).close()
    assert set(rings.read(1).ranks) == {3, 4}


def test_ring_that_is_truncated_while_it_is_read_ends_neither_the_reader_nor_the_others(
    ring: Ring, caplog: pytest.LogCaptureFixture
) -> None:
    create_ring(replace(IDENTITY, rank=4), SMALL).close()
    for number in range(1, 300):
        operate(ring, number)
    rings = JobRings(ring.path.parent)
    assert set(rings.read(1000).ranks) == {3, 4}
    reader = RingReader(ring.path)
    os.truncate(ring.path, 4096)
    with pytest.raises(RingUnreadable, match="was truncated"):
        reader.last(1000)
    assert set(rings.read(1000).ranks) == {4}
    rings.read(1000)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("at", "data"),
    [
        (40, struct.pack("<i", -1)),
        (56, struct.pack("<d", float("nan"))),
        (68, struct.pack("<I", 77)),
        (88, struct.pack("<Q", 2**63)),
        (136, struct.pack("<Q", 2**40)),
    ],
)
def test_ring_whose_content_makes_no_sense_is_refused(ring: Ring, at: int, data: bytes) -> None:
    damaged(ring, at, data)
    with pytest.raises(RingUnreadable, match="damaged"):
        read_all(ring.path)


@pytest.mark.parametrize(
    "line",
    [
        b'{"identity": 1, "name": "x", "ranks": [[0, 1000000000000, 1]]}',
        b'{"identity": 1, "name": "x", "ranks": [[0, 2, 2147483648]]}',
        b'{"identity": 1, "name": "x", "ranks": [["0", 1, 1]]}',
        b'{"identity": -1, "name": "x", "ranks": []}',
        b'{"name": "x"}',
        b"7",
        b"[" * 500,
    ],
)
def test_table_whose_lines_are_no_process_groups_is_refused(ring: Ring, line: bytes) -> None:
    damaged(ring, 36864, line + b"\n")
    damaged(ring, 136, struct.pack("<Q", len(line) + 1))
    with pytest.raises(RingUnreadable, match="table of process groups"):
        read_all(ring.path)


def read_all(path: Path) -> None:
    """Read whatever a reader reads of a ring."""
    reader = RingReader(path)
    try:
        reader.is_alive()
        reader.last(10_000)
        reader.communicators()
        assert reader.ending in Ending
    finally:
        reader.close()


@given(
    st.lists(st.tuples(st.integers(0, 36864 + 512), st.binary(min_size=1, max_size=40)), max_size=4)
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ring_with_arbitrary_bytes_in_any_place_is_read_or_refused(
    base: Path, writes: list[tuple[int, bytes]]
) -> None:
    made = create_ring(IDENTITY, SMALL)
    made.add_communicator(Communicator.of("world", range(8)))
    for number in range(1, 5):
        operate(made, number)
    made.close()
    for at, data in writes:
        damaged(made, at, data)
    tracemalloc.start()
    try:
        read_all(made.path)
    except RingUnreadable:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**20


@given(st.binary(max_size=200), st.integers(0, 8192))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arbitrary_files_are_no_rings(base: Path, content: bytes, nbytes: int) -> None:
    base.mkdir(mode=0o700, exist_ok=True)
    path = base / "rank-00000.ring"
    path.write_bytes(content.ljust(nbytes, b"x"))
    with pytest.raises(RingUnreadable):
        RingReader(path)


def test_records_that_no_worker_writes_are_not_returned(ring: Ring) -> None:
    for number in range(1, 6):
        operate(ring, number)
    lane = 4096
    damaged(ring, lane + 8, b"\x09")  # The kind of the first, the code of the second,
    damaged(ring, lane + 64 + 9, b"\xff")
    damaged(ring, lane + 2 * 64 + 10, b"\xff")  # the data type of the third, a time.
    damaged(ring, lane + 3 * 64 + 56, struct.pack("<d", float("inf")))
    assert RingReader(ring.path).last(10)["number"].tolist() == [5]


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_ring_that_others_could_write_is_not_read(ring: Ring, mode: int) -> None:
    ring.path.chmod(mode)
    with pytest.raises(RingUnreadable, match="others could have written it"):
        RingReader(ring.path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_rings_of_another_user_are_not_read(ring: Ring, caplog: pytest.LogCaptureFixture) -> None:
    os.chown(ring.path, 12345, 12345)
    with pytest.raises(RingUnreadable, match="owner 12345"):
        RingReader(ring.path)
    os.chown(ring.path, 0, 0)
    os.chown(ring.path.parent, 12345, 12345)
    assert JobRings(ring.path.parent).read(1).ranks == {}
    assert "owner 12345" in caplog.text
    assert recorded_jobs() == ()


def test_directory_that_others_may_write_to_is_not_read_and_said_once(
    ring: Ring, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = RingSource(ring.path.parent, keep_s=0.0)
    base.chmod(0o777)
    assert (source.read(), source.read()) == ([], [])
    assert len(caplog.records) == 1
    base.chmod(0o700)
    assert len(source.read()) == 1


def test_named_pipe_in_the_place_of_a_ring_is_refused_without_waiting(ring: Ring) -> None:
    os.mkfifo(ring.path.with_name("rank-00009.ring"), 0o600)
    with pytest.raises(RingUnreadable, match="no regular file"):
        RingReader(ring.path.with_name("rank-00009.ring"))


def test_only_this_user_may_read_or_write(ring: Ring, base: Path) -> None:
    assert ring.path.stat().st_mode & 0o777 == 0o600
    assert ring.path.parent.stat().st_mode & 0o777 == 0o700
    assert base.stat().st_mode & 0o777 == 0o700


def test_directory_that_others_may_write_to_is_refused(base: Path) -> None:
    base.mkdir(mode=0o700)
    base.chmod(0o777)
    with pytest.raises(RingUnwritable, match="only this user"):
        create_ring(IDENTITY, SMALL)


def test_symbolic_link_instead_of_the_directory_is_refused(base: Path, tmp_path: Path) -> None:
    base.symlink_to(tmp_path)
    with pytest.raises(RingUnwritable, match="only this user"):
        create_ring(IDENTITY, SMALL)
