"""Implements `keepstep monitor trace`: collects steps of all ranks, and writes them as a trace.

Past steps are read from the rings of all nodes, which hold the newest minutes of a job. Steps to
come are waited for, and read every second as they end, so a range may be longer than a ring.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from keepstep.monitor.cli.options import StepRange
from keepstep.monitor.cli.step_recording import StepRecording, lost_text, unix_offsets
from keepstep.monitor.errors import MonitorError
from keepstep.monitor.telemetry.clocks import ClockOffset
from keepstep.monitor.tree.children import ask_clocks, ask_steps
from keepstep.monitor.tree.monitor_client import MonitorClient
from keepstep.monitor.tree.summary import Summary
from keepstep.monitor.views.chrome_trace import TracedRank, base_time_s, trace_events, trace_text

Recorded = tuple[StepRecording, Mapping[str, ClockOffset]]
"""The steps of all ranks, and the offset of each node's clock."""

_EVERY_S = 1.0
_NEWEST_STEPS = 10
_HTA_STEP = "ProfilerStep#{}"
"""The name that HTA knows steps by; torch.profiler gives it, too."""
_NO_STEP = (1 << 32) - 1
"""A step that no job reaches: an answer about it only shows how far the ranks are."""


def write_trace(
    url: str,
    job: str,
    secret: bytes,
    steps: StepRange | None,
    output: Path,
    *,
    is_per_rank: bool,
) -> None:
    """Write steps of all ranks as a trace, or as a trace of each rank.

    Args:
        url: of the daemon.
        job: its name.
        secret: the job's.
        steps: None for the newest that have ended.
        output: the file, or with `is_per_rank` the directory.
        is_per_rank: whether each rank gets a file.

    Raises:
        MonitorUnreachable: the daemon does not answer, or refuses.
        MonitorError: none of the steps can be had, or the file cannot be written.
    """
    write(asyncio.run(_record_until_interrupted(url, job, secret, steps)), job, output, is_per_rank)


async def record(
    url: str, job: str, secret: bytes, steps: StepRange | None, stopped: asyncio.Event
) -> Recorded:
    """Return the steps and the nodes' clocks, once all ranks have ended them or `stopped` is set.

    Arguments and errors as `write_trace`.
    """
    client = MonitorClient(secret)
    try:
        wanted = steps or await _newest_steps(client, url, job)
        recording = await _collect(client, url, wanted, job, stopped)
        return recording, await ask_clocks(client, url)
    finally:
        await client.close()


def write(recorded: Recorded, job: str, output: Path, is_per_rank: bool) -> None:
    """Write what was recorded, and say what it lacks; arguments and errors as `write_trace`."""
    recording, clocks = recorded
    to_unix_s, unaligned = unix_offsets(recording.nodes, clocks)
    traced = recording.traced(to_unix_s)
    _check(recording, traced, job)
    for sentence in _notes(recording, traced, unaligned):
        click.echo(f"keepstep: {sentence}", err=True)
    base_s = base_time_s(time.time())
    about = {"traceName": str(output), "job": job, "steps": str(recording.steps)}
    try:
        if is_per_rank:
            events = _write_ranks(output, recording, traced, base_s, about)
        else:
            text = trace_events(traced, recording.communicators, base_s)
            events = _write(output, _Counted(text), base_s, about, {})
    except OSError as error:
        raise MonitorError(f"{output} cannot be written: {error}") from error
    ranks = len({rank.state.rank for rank in traced})
    click.echo(f"{output}: {recording.steps} of {ranks} ranks, {events} events")


async def _record_until_interrupted(
    url: str, job: str, secret: bytes, steps: StepRange | None
) -> Recorded:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stopped.set)
    return await record(url, job, secret, steps, stopped)


async def _newest_steps(client: MonitorClient, url: str, job: str) -> StepRange:
    """Return the newest steps that every rank has ended and that all rings hold."""
    now = StepRecording(StepRange(1, _NO_STEP))
    now.add(await _ask(client, url, job, StepRange(_NO_STEP, _NO_STEP)))
    if now.complete < 1:
        raise MonitorError(f"no step of job {job} has ended yet")
    first = max(1, now.held_from, now.complete - _NEWEST_STEPS + 1)
    return StepRange(min(now.complete, first), now.complete)


async def _ask(client: MonitorClient, url: str, job: str, steps: StepRange) -> Summary:
    answer = await ask_steps(client, url, steps.first, steps.last)
    if not answer.ranks:
        reasons = "".join(f"; {at}: {reason}" for at, reason in answer.missing.items())
        raise MonitorError(f"the monitor at {url} knows no rank of job {job}{reasons}")
    return answer


async def _collect(
    client: MonitorClient, url: str, steps: StepRange, job: str, stopped: asyncio.Event
) -> StepRecording:
    """Return the records of the steps, once all ranks have ended them or the user stops."""
    recording = StepRecording(steps)
    is_announced = is_settled = False
    while True:
        # The last step again: operations of it may have ended since.
        first = max(steps.first, recording.complete)
        recording.add(await _ask(client, url, job, StepRange(first, steps.last)))
        has_ended = recording.is_over or recording.complete >= steps.last
        if stopped.is_set() or (has_ended and (is_settled or not recording.has_open_records)):
            return recording
        is_settled = has_ended
        if not has_ended and not is_announced:
            is_announced = True
            click.echo(
                f"job {job} is in step {recording.newest}: waiting until all ranks have ended "
                f"{steps}; Ctrl-C writes what there is",
                err=True,
            )
        try:
            await asyncio.wait_for(stopped.wait(), _EVERY_S)
        except TimeoutError:
            pass  # The next second.


def _check(recording: StepRecording, traced: Sequence[TracedRank], job: str) -> None:
    """Refuse to write a trace without events.

    Raises:
        MonitorError: there are none; says why.
    """
    if traced:
        return
    steps, newest = recording.steps, recording.newest
    if recording.lost:
        raise MonitorError(
            f"{steps} of job {job} {'is' if steps.first == steps.last else 'are'} no longer held: "
            f"the ranks' rings hold all from step {recording.held_from} on, and the job is in step "
            f"{newest}; ask for those, or for steps to come"
        )
    state = "ended" if recording.is_over else "is"
    raise MonitorError(f"job {job} {state} in step {newest}: {steps} did not come")


def _notes(
    recording: StepRecording, traced: Sequence[TracedRank], unaligned: frozenset[str]
) -> Iterable[str]:
    """Yield what the trace lacks."""
    for lost in lost_text(recording.lost):
        yield f"{lost} are no longer held, or only in part"
    if recording.complete < recording.steps.last:
        state = "has ended" if recording.is_over else "goes on"
        yield f"the job {state} in step {recording.newest}: not all of {recording.steps} is there"
    for url, reason in recording.missing.items():
        yield f"ranks below {url} are missing: {reason}"
    nodes = {rank.state.node for rank in traced}
    if len(nodes) > 1 and (own := sorted(unaligned & nodes)):
        yield f"clocks are not aligned yet, times are those of the machine: {', '.join(own)}"


def _write_ranks(
    directory: Path,
    recording: StepRecording,
    traced: Sequence[TracedRank],
    base_s: int,
    about: Mapping[str, Any],
) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    events = 0
    for rank in sorted({each.state.rank for each in traced}):
        own = [each for each in traced if each.state.rank == rank]
        distributed = {"rank": rank, "world_size": own[-1].state.world_size}
        text = _Counted(trace_events(own, recording.communicators, base_s, _HTA_STEP))
        events += _write(directory / f"rank{rank}.json.gz", text, base_s, about, distributed)
    return events


class _Counted:
    """Counts the events that pass."""

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        self.count = 0
        self._events = events

    def __iter__(self) -> Any:
        for event in self._events:
            self.count += 1
            yield event


def _write(
    path: Path,
    events: _Counted,
    base_s: int,
    about: Mapping[str, Any],
    distributed: Mapping[str, Any],
) -> int:
    """Write a trace; return its number of events. The file appears when it is complete."""
    unfinished = path.with_name(f".{path.name}.part")
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(unfinished, "wt", encoding="utf-8") as file:
            for line in trace_text(events, base_s, about, distributed):
                file.write(line)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return events.count
