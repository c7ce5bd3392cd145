"""The last steps of a job, over all ranks: collected from digests until each step is whole, then kept for a window.

A step is whole once all ranks that are expected have told of it, or of a later one: a rank that lost its records does not hold the others
up. News of far nodes come later than those of near ones, by seconds where daemons ask each other once a second, which is many short steps;
a rank that says nothing at all is waited for that long. Times, delays and transfers of one step enter their histories together. Memory
is bounded by the window and by that wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from keepstep.monitor.diagnosis.delays import average_delays, median_delays, message_delays
from keepstep.monitor.diagnosis.history import NOTHING, StepSeries
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
"""How much later than the first rank's news of a step the last one's may come: three levels of daemons, each of which asks once a second
and digests once a second."""
_LATE_STEPS = 3
"""And that many steps at least, however long they are, but"""
_MOST_LATE_STEPS = 1000
"""no more than so many, for all of them are kept."""


@dataclass(frozen=True, slots=True)
class Window:
    """Steps, whole and not yet whole.

    Args:
        pending: increments of steps not yet whole; only the tables that speak of steps are used, and `mismatches`, which
            holds those that the last digest brought to light.
        rows: whole steps, dtype STEP, step after step.
        last_arrivals: of whole steps.
        own, links, transfers: histories of own times by rank, median delays by link, transfer times by communicator.
        averages: history of average delays by link.
        saves: history of checkpoint phases by rank, of steps in which enough ranks saved to be compared.
        link_counts, transfer_counts: operations of the newest whole step, by key of the history.
        newest: number of the newest whole step.
        distrusted: number of the newest step of which messages were told by clocks that have turned out to be off.
    """

    pending: Digest = EMPTY
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, STEP))
    last_arrivals: np.ndarray = field(default_factory=lambda: np.zeros(0, LAST_ARRIVAL))
    own: StepSeries = NOTHING
    links: StepSeries = NOTHING
    averages: StepSeries = NOTHING
    transfers: StepSeries = NOTHING
    saves: StepSeries = NOTHING
    link_counts: Mapping[int, float] = field(default_factory=dict)
    transfer_counts: Mapping[int, float] = field(default_factory=dict)
    newest: int = 0
    distrusted: int = 0

    def step_s(self) -> float:
        """Return the job's step time: the median over window and ranks; 0.0 if not known."""
        return float(np.median(self.rows["duration_s"])) if len(self.rows) else 0.0

    def table(self) -> np.ndarray:
        """Return the whole steps as a table, dtype STEP, shape (steps, ranks), as `own`; step 0 where a rank did not tell."""
        table = np.zeros((len(self.own.steps), len(self.own.keys)), STEP)
        table["rank"] = self.own.keys
        at = np.searchsorted(self.own.steps, self.rows["step"])
        who = np.searchsorted(self.own.keys, self.rows["rank"])
        table[at, who] = self.rows
        return table

    def ended_s(self) -> tuple[float, ...]:
        """Return when each whole step ended, by the job's clock; the median over ranks."""
        return tuple(
            float(np.median(self.rows["ended_s"][self.rows["step"] == step]))
            for step in self.own.steps.tolist()
        )


def collect(
    window: Window,
    told: Digest,
    expected: np.ndarray,
    communicators: Mapping[int, Communicator],
    nodes: Mapping[int, str],
    clock_error_s: Mapping[int, float],
    thresholds: SlowThresholds,
) -> tuple[Window, int]:
    """Take in a digest's increments; return the window and how many steps became whole.

    Args:
        window: so far.
        told: increments not taken in before.
        expected: ranks that are alive and heard of.
        communicators: of the job.
        nodes: each rank's node.
        clock_error_s: how far each rank's clock may be off the job's.
        thresholds: the window's length, and the steps to warm up.
    """
    unmatched = replace(_of_steps(window.pending), mismatches=EMPTY.mismatches)
    pending = merge((unmatched, _drop_repeated(_of_steps(told), window.pending)), communicators)
    pending = _later(pending, window.newest)
    window = replace(window, pending=pending)
    count = 0
    steps = np.unique(pending.steps["step"]).tolist()
    step_s = float(np.median(pending.steps["duration_s"])) if steps else 0.0
    late = late_steps(step_s)
    for step in steps:
        rows = pending.steps.compress(pending.steps["step"] == step)
        heard = pending.steps["rank"][pending.steps["step"] >= step]
        if not np.isin(expected, heard).all() and steps[-1] < step + late:
            break
        window = replace(window, newest=step)
        if step > thresholds.warmup:
            window = _push(window, step, rows, nodes, clock_error_s, thresholds)
            count += 1
    return replace(window, pending=_later(pending, window.newest)), count


def late_steps(step_s: float) -> float:
    """Return how many steps a rank's news of a step may lie behind the first one's, in a job whose step takes `step_s`; 0.0 if not known."""
    return min(max(_LATE_STEPS, _LATE_S / max(step_s, 1e-9)), _MOST_LATE_STEPS)


def distrusting(window: Window, told: Digest) -> Window:
    """Return the window when clocks have turned out to be off: messages that were told by them are not to be read off both sides."""
    heard = [
        window.newest,
        *(int(table["step"].max(initial=0)) for table in (window.pending.messages, told.messages)),
    ]
    return replace(window, distrusted=max(heard))


def _drop_repeated(told: Digest, pending: Digest) -> Digest:
    """Drop what a daemon tells again that was restarted: operations that are counted twice would seem to be whole."""
    known = np.isin(_packed(told.steps), _packed(pending.steps))
    if not known.any():
        return told
    newest = told.steps["step"][known].max()
    later = {
        name: rows.compress(rows["step"] > newest)
        for name in ("collectives", "transfers", "last_arrivals", "messages")
        for rows in (getattr(told, name),)
    }
    return replace(told, steps=told.steps.compress(~known), **later)


def _packed(rows: np.ndarray) -> np.ndarray:
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
    pending, length = window.pending, thresholds.window
    messages = pending.messages.compress(pending.messages["step"] == step)
    sent, took_s = message_delays(
        messages, clock_error_s if step > window.distrusted else {}, nodes
    )
    links, delays_s, link_counts = median_delays(sent, took_s)
    transfers = pending.transfers.compress(pending.transfers["step"] == step)
    keys = transfer_keys(transfers["communicator"], transfers["size_class"])
    own = window.own.push(step, rows["rank"], rows["own_s"], length)
    saved = rows[rows["checkpoint_s"] > 0]
    kept = joined([window.rows, rows])
    kept = kept.compress(kept["step"] >= own.steps[0])
    last_arrivals = joined(
        [
            window.last_arrivals,
            pending.last_arrivals.compress(pending.last_arrivals["step"] == step),
        ]
    )
    return replace(
        window,
        rows=kept,
        last_arrivals=last_arrivals.compress(last_arrivals["step"] >= own.steps[0]),
        own=own,
        links=window.links.push(step, links, delays_s, length),
        averages=window.averages.push(step, links, average_delays(sent, took_s), length),
        transfers=window.transfers.push(
            step, keys, transfers["sum_s"] / np.maximum(transfers["count"], 1), length
        ),
        # Whoever saves alone, rank 0 say, has no peers, and must not crowd out what all do.
        saves=window.saves.push(step, saved["rank"], saved["checkpoint_s"], length)
        if len(saved) >= thresholds.peers
        else window.saves,
        link_counts=dict(zip(links.tolist(), link_counts.astype(float).tolist(), strict=True)),
        transfer_counts=dict(
            zip(keys.tolist(), transfers["count"].astype(float).tolist(), strict=True)
        ),
    )


def _of_steps(told: Digest) -> Digest:
    return replace(
        EMPTY,
        steps=told.steps,
        collectives=told.collectives,
        transfers=told.transfers,
        last_arrivals=told.last_arrivals,
        messages=told.messages,
        mismatches=told.mismatches,
    )


def _later(pending: Digest, newest: int) -> Digest:
    """Drop what belongs to steps that are over; partly known operations of these will never be whole."""

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
