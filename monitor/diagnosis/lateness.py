"""Tells how late a recent step's messages and collectives were, as a measure for the next wait.

TCP sends a lost packet again after a time that doubles with each loss, so what a connection that
loses packets is about to wait for may take more than twice as long as all that it has waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from keepstep.monitor.diagnosis.delays import unpack
from keepstep.monitor.diagnosis.history import NOTHING, StepSeries
from keepstep.monitor.diagnosis.transfers import communicators_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """Durations of the operations of recent steps.

    Args:
        delays: average delays of messages by packed link, of each step.
        message_counts: messages a step, by key of `delays`.
        transfers: average transfer times of collectives by packed communicator, of each step.
        transfer_counts: collectives a step, by key of `transfers`.
    """

    delays: StepSeries = NOTHING
    message_counts: Mapping[int, float] = field(default_factory=dict)
    transfers: StepSeries = NOTHING
    transfer_counts: Mapping[int, float] = field(default_factory=dict)

    def among_s(self, ranks: Collection[int]) -> float:
        """Return the longest that messages between two of these ranks took in one step together."""
        senders, receivers, _ = unpack(self.delays.keys)
        members = np.fromiter(ranks, np.int64)
        inside = np.isin(senders, members) & np.isin(receivers, members)
        return _longest_s(self.delays, inside, self.message_counts)

    def in_communicator_s(self, communicator: int) -> float:
        """Return the longest that a communicator's collectives took in one step together."""
        inside = communicators_of(self.transfers.keys) == communicator
        return _longest_s(self.transfers, inside, self.transfer_counts)


def _longest_s(series: StepSeries, chosen: np.ndarray, counts: Mapping[int, float]) -> float:
    if not chosen.any():
        return 0.0
    per_step = np.array([counts.get(key, 1.0) for key in series.keys[chosen].tolist()])
    total_s = np.nan_to_num(np.exp(series.values[:, chosen])) * per_step
    return float(total_s.max(initial=0.0))
