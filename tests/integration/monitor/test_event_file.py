"""Claims about the event file when it cannot be written, or is renamed by another program."""

import asyncio
import errno
import json
import os
import time
from pathlib import Path

import pytest

from keepstep.monitor.daemon.settings import DaemonComponents
from keepstep.monitor.diagnosis.policy import EnforcementPolicy
from keepstep.monitor.errors import MonitorError
from keepstep.monitor.views.events import SERVICE, EventFile, closed_event, opened_event
from keepstep.monitor.watch.verdict_log import VerdictEntry
from tests.integration.monitor.parts import PLAN, FixedDiagnosis, Probe, settings
from tests.integration.monitor.running import get, running, until
from tests.integration.monitor.sample import SampleReader, verdict

ENTRY = VerdictEntry(1, verdict(2), 1.0, 2.0, 3.0)


def names(path: Path) -> list[str]:
    return [json.loads(line)["event_name"] for line in path.read_text().splitlines()]


def test_failure_to_write_events_is_counted_and_the_daemon_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check() -> None:
        diagnosis = FixedDiagnosis(verdict(2, since_s=time.monotonic() - 4))
        parts = DaemonComponents(
            probe=Probe(),
            reader=SampleReader(PLAN, time.monotonic() - 5),
            diagnosis=diagnosis,
            policy=EnforcementPolicy(sustained_s=0.0),
        )
        async with running(settings(events=Path("/dev/full")), parts) as url:

            async def has_tried_all() -> bool:
                overview = await (await get(url, "/v1/overview")).json()
                # The verdict's opening, the action, and its stacks.
                return overview["faults"].get("event file", 0) >= 3 and bool(
                    overview["verdicts"][0]["stacks"]
                )

            await until(has_tried_all)

    asyncio.run(check())
    assert "No space left on device" in caplog.text
    assert "Traceback" not in caplog.text


def test_event_after_a_rename_begins_a_new_file(
    tmp_path: Path,
) -> None:
    path, moved = tmp_path / "events.jsonl", tmp_path / "events.jsonl-20260101"
    events = EventFile(path)
    events.write(opened_event(ENTRY, SERVICE))
    path.rename(moved)
    events.write(closed_event(ENTRY, SERVICE))
    assert (names(moved), names(path)) == (["keepstep.verdict.opened"], ["keepstep.verdict.closed"])
    # Renamed and created again, as logrotate's `create` does.
    path.unlink()
    path.touch()
    events.write(opened_event(ENTRY, SERVICE))
    assert names(path) == ["keepstep.verdict.opened"]
    events.close()


def test_file_that_has_grown_to_its_limit_is_renamed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = EventFile(path, limit_nbytes=1)
    events.write(opened_event(ENTRY, SERVICE))
    events.write(closed_event(ENTRY, SERVICE))
    events.close()
    assert names(tmp_path / "events.jsonl.1") == ["keepstep.verdict.opened"]
    assert names(path) == ["keepstep.verdict.closed"]


def test_event_after_a_torn_line_is_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    events = EventFile(path)
    real, left = os.write, [10]

    def full(descriptor: int, data: bytes) -> int:
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[: left.pop()])

    with monkeypatch.context() as limited:
        limited.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            events.write(opened_event(ENTRY, SERVICE))
    events.write(closed_event(ENTRY, SERVICE))
    events.close()
    assert json.loads(path.read_text().splitlines()[1])["event_name"] == "keepstep.verdict.closed"


@pytest.mark.parametrize("path", ["/tmp", "/proc/none/events.jsonl"])
def test_path_that_cannot_be_opened_is_refused(path: str) -> None:
    with pytest.raises(MonitorError, match=path):
        EventFile(Path(path))
