"""Keeps the last steps of a job over all ranks, collected from digests until each is complete.

A step is complete once all expected ranks have reported it, or a later one: a rank whose records
were lost does not delay the others. Reports of far nodes arrive later than those of near ones, by
seconds where daemons poll each other once a second, which is many short steps; a rank that reports
nothing is waited for that long. Times, delays and transfers of one step enter their series
together. Memory is bounded by the window and by that wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from keepstep.monitor.diagnosis.delays import average_delays, median_delays, message_delays
from keepstep.monitor.diagnosis.history import NO_RANKS, NOTHING, StepSeries
from keepstep.monitor.diagnosis.tables import (
    COLLECTIVE,
    EMPTY,
    LAST_ARRIVAL,
    MESSAGE,
    STEP,
    TRANSFER,
    Digest,
    merge,
)
from keepstep.monitor.diagnosis.thresholds import SlowThresholds
from keepstep.monitor.diagnosis.transfers import transfer_keys
from keepstep.monitor.records import Communicator, joined

_LATE_S = 6.0
"""Maximum seconds between the first and the last rank's report of a step: three levels of daemons,
each polling once a second and digesting once a second."""
_LATE_STEPS = 3
"""The same in steps: at least this many, however long they are."""
_MOST_LATE_STEPS = 1000
"""At most this many, since all of them are kept."""

ALL_STEPS = 1 << 31
"""More steps than a digest can hold."""


@dataclass(frozen=True, slots=True)
class Window:
    """Complete and incomplete steps.

    Args:
        pending: increments of incomplete steps; only the tables by step are used, and `mismatches`,
            which holds those that the last digest added.
        rows: complete steps, dtype STEP, step after step.
        last_arrivals: of complete steps.
        own: series of own times by rank.
        links: series of median delays by link.
        averages: series of average delays by link.
        transfers: series of transfer times by communicator.
        routed: series of the payload of all-to-alls and messages, in bytes, by rank.
        saves: series of checkpoint phases by rank, of steps in which enough ranks saved to be
            compared.
        link_counts: messages of the newest complete step, by key of `links`.
        transfer_counts: collectives of the newest complete step, by key of `transfers`.
        newest: number of the newest complete step.
        first: number of the first complete step; 0 before it.
        distrusted: number of the newest step whose message times were recorded with clocks that
            turned out to be off.
    """

    pending: Digest = EMPTY
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, STEP))
    last_arrivals: np.ndarray = field(default_factory=lambda: np.zeros(0, LAST_ARRIVAL))
    own: StepSeries = NO_RANKS
    links: StepSeries = NOTHING
    averages: StepSeries = NOTHING
    transfers: StepSeries = NOTHING
    routed: StepSeries = NO_RANKS
    saves: StepSeries = NOTHING
    link_counts: Mapping[int, float] = field(default_factory=dict)
    transfer_counts: Mapping[int, float] = field(default_factory=dict)
    newest: int = 0
    first: int = 0
    distrusted: int = 0

    def step_s(self) -> float:
        """Return the job's step time: the median over window and ranks; 0.0 if not known."""
        return float(np.median(self.rows["duration_s"])) if len(self.rows) else 0.0

    def has_past(self) -> bool:
        """Return whether it is known what own times used to be."""
        return not bool(np.isnan(self.own.past).all())

    def table(self) -> np.ndarray:
        """Return the complete steps as a table, dtype STEP, shape (steps, ranks) as `own`.

        Step 0 where a rank did not report the step.
        """
        table = np.zeros((len(self.own.steps), len(self.own.keys)), STEP)
        table["rank"] = self.own.keys
        step_index = np.searchsorted(self.own.steps, self.rows["step"])
        rank_index = np.searchsorted(self.own.keys, self.rows["rank"])
        table[step_index, rank_index] = self.rows
        return table

    def ended_s(self) -> tuple[float, ...]:
        """Return when each complete step ended, by the job's clock; the median over ranks."""
        return tuple(
            float(np.median(self.rows["ended_s"][self.rows["step"] == step]))
            for step in self.own.steps.tolist()
        )


def collect(
    window: Window,
    new_digest: Digest,
    expected: np.ndarray,
    communicators: Mapping[int, Communicator],
    nodes: Mapping[int, str],
    clock_error_s: Mapping[int, float],
    thresholds: SlowThresholds,
    most: int = ALL_STEPS,
) -> tuple[Window, int]:
    """Add a digest's increments; return the window and how many steps became complete.

    Args:
        window: so far.
        new_digest: increments not added before.
        expected: ranks that are alive and reporting.
        communicators: of the job.
        nodes: each rank's node.
        clock_error_s: largest error of each rank's clock against the job's.
        thresholds: the window's length, and the steps to warm up.
        most: steps to complete; the others wait for the next call.
    """
    unmatched = replace(_of_steps(window.pending), mismatches=EMPTY.mismatches)
    pending = merge(
        (unmatched, _drop_repeated(_of_steps(new_digest), window.pending)), communicators
    )
    pending = _later(pending, window.newest)
    window = replace(window, pending=pending)
    count = 0
    steps = np.unique(pending.steps["step"]).tolist()
    step_s = float(np.median(pending.steps["duration_s"])) if steps else 0.0
    late = late_steps(step_s)
    for step in steps:
        rows = pending.steps.compress(pending.steps["step"] == step)
        if count >= most:
            break
        reported = pending.steps["rank"][pending.steps["step"] >= step]
        if not np.isin(expected, reported).all() and steps[-1] < step + late:
            break
        window = replace(window, newest=step, first=window.first or step)
        # A job that resumes counts on from where it was, and warms up all the same. The first step
        # of a reading is not reported: it is only partly known.
        if step > max(window.first + thresholds.warmup - 2, thresholds.warmup):
            window = _push(window, step, rows, nodes, clock_error_s, thresholds)
            count += 1
    return replace(window, pending=_later(pending, window.newest)), count


def late_steps(step_s: float) -> float:
    """Return how many steps a rank's report of a step may come after the first rank's.

    Args:
        step_s: the job's step time; 0.0 if not known.
    """
    return min(max(_LATE_STEPS, _LATE_S / max(step_s, 1e-9)), _MOST_LATE_STEPS)


def distrusting(window: Window, new_digest: Digest) -> Window:
    """Return the window for clocks that turned out to be off.

    Delays of messages recorded so far are then no longer computed from both sides' clocks.
    """
    reported_steps = [
        window.newest,
        *(
            int(table["step"].max(initial=0))
            for table in (window.pending.messages, new_digest.messages)
        ),
    ]
    return replace(window, distrusted=max(reported_steps))


def _drop_repeated(new_digest: Digest, pending: Digest) -> Digest:
    """Drop what a restarted daemon reports again.

    Operations that are counted twice would seem to be complete.
    """
    is_known = np.isin(_packed(new_digest.steps), _packed(pending.steps))
    if not is_known.any():
        return new_digest
    newest = new_digest.steps["step"][is_known].max()
    later = {
        name: rows.compress(rows["step"] > newest)
        for name in ("collectives", "transfers", "last_arrivals", "messages")
        for rows in (getattr(new_digest, name),)
    }
    return replace(new_digest, steps=new_digest.steps.compress(~is_known), **later)


def _packed(rows: np.ndarray) -> np.ndarray:
    """Return one integer for each rank and step."""
    packed: np.ndarray = rows["rank"].astype(np.int64) << 32 | rows["step"].astype(np.int64)
    return packed


def _push(
    window: Window,
    step: int,
    rows: np.ndarray,
    nodes: Mapping[int, str],
    clock_error_s: Mapping[int, float],
    thresholds: SlowThresholds,
) -> Window:
    """Return the window with one more complete step."""
    pending, length = window.pending, thresholds.window
    messages = pending.messages.compress(pending.messages["step"] == step)
    message_keys, message_delay_s = message_delays(
        messages, clock_error_s if step > window.distrusted else {}, nodes
    )
    links, delays_s, link_counts = median_delays(message_keys, message_delay_s)
    transfers = pending.transfers.compress(pending.transfers["step"] == step)
    keys = transfer_keys(transfers["communicator"], transfers["size_class"])
    own = window.own.push(step, rows["rank"], rows["own_s"], length)
    saved, routing = rows[rows["checkpoint_s"] > 0], rows[rows["routed_nbytes"] > 0]
    kept_rows = joined([window.rows, rows])
    kept_rows = kept_rows.compress(kept_rows["step"] >= own.steps[0])
    last_arrivals = joined(
        [
            window.last_arrivals,
            pending.last_arrivals.compress(pending.last_arrivals["step"] == step),
        ]
    )
    return replace(
        window,
        rows=kept_rows,
        last_arrivals=last_arrivals.compress(last_arrivals["step"] >= own.steps[0]),
        own=own,
        links=window.links.push(step, links, delays_s, length),
        averages=window.averages.push(
            step, links, average_delays(message_keys, message_delay_s), length
        ),
        transfers=window.transfers.push(
            step, keys, transfers["sum_s"] / np.maximum(transfers["count"], 1), length
        ),
        routed=window.routed.push(step, routing["rank"], routing["routed_nbytes"], length),
        # A rank that saves alone, such as rank 0, has no peers, and its steps must not displace
        # those in which all ranks save.
        saves=window.saves.push(step, saved["rank"], saved["checkpoint_s"], length)
        if len(saved) >= thresholds.peers
        else window.saves,
        link_counts=dict(zip(links.tolist(), link_counts.astype(float).tolist(), strict=True)),
        transfer_counts=dict(
            zip(keys.tolist(), transfers["count"].astype(float).tolist(), strict=True)
        ),
    )


def _of_steps(new_digest: Digest) -> Digest:
    """Return the tables by step of a digest."""
    return replace(
        EMPTY,
        steps=new_digest.steps,
        collectives=new_digest.collectives,
        transfers=new_digest.transfers,
        last_arrivals=new_digest.last_arrivals,
        messages=new_digest.messages,
        mismatches=new_digest.mismatches,
    )


def _later(pending: Digest, newest: int) -> Digest:
    """Drop rows of steps that are over; partly known operations of these will never be complete."""

    def later(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
        assert rows.dtype == dtype
        kept: np.ndarray = rows.compress(rows["step"] > newest)
        return kept

    return replace(
        pending,
        steps=later(pending.steps, STEP),
        collectives=later(pending.collectives, COLLECTIVE),
        transfers=later(pending.transfers, TRANSFER),
        last_arrivals=later(pending.last_arrivals, LAST_ARRIVAL),
        messages=later(pending.messages, MESSAGE),
    )
