"""Claims about links that lose packets: they are found within few steps, and single delays not."""

from collections.abc import Sequence

import numpy as np
import pytest

from keepstep.monitor.diagnosis.delays import LinkInputs, link_keys
from keepstep.monitor.diagnosis.history import NOTHING, StepSeries
from keepstep.monitor.diagnosis.lateness import Lateness
from keepstep.monitor.diagnosis.lossy_links import find_lossy_links
from keepstep.monitor.diagnosis.thresholds import SlowThresholds

NODES = {rank: f"n{rank}" for rank in range(8)}
PIPELINE = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
MESSAGES = 4
THRESHOLDS = SlowThresholds()


def stall_s(rng: np.random.Generator, lost: float) -> float:
    """Return how long a packet is late: TCP's timeout of 0.2 s doubles with each loss."""
    losses = rng.geometric(1 - lost) - 1
    return float(0.2 * (2**losses - 1))


def subjects_of(history: StepSeries, step: int) -> list[str]:
    verdicts, _ = find_lossy_links(
        history,
        LinkInputs(
            counts=dict.fromkeys(history.keys.tolist(), MESSAGES),
            nodes=NODES,
            step_s=0.5,
            since_s=[float(at) for at in range(step)],
        ),
        THRESHOLDS,
    )
    return [str(verdict.subject) for verdict in verdicts]


def push(history: StepSeries, step: int, delays_s: dict[tuple[int, int], float]) -> StepSeries:
    keys = link_keys(*np.array(list(delays_s)).T, np.full(len(delays_s), 15))
    order = np.argsort(keys)
    averages = np.array(list(delays_s.values()))[order]
    return history.push(step, keys[order], averages, THRESHOLDS.window)


def found_after(
    seed: int,
    lost: dict[tuple[int, int], float],
    steps: int,
    links: Sequence[tuple[int, int]] = PIPELINE,
) -> list[str]:
    """Return the first verdicts in a pipeline, of which links lose a share of their packets."""
    rng = np.random.default_rng(seed)
    history = NOTHING
    for step in range(25 + steps):
        delays_s = {link: float(np.mean(0.002 * rng.lognormal(0, 0.3, MESSAGES))) for link in links}
        for link, share in lost.items():
            if step >= 25:
                delays_s[link] += np.mean([stall_s(rng, share) for _ in range(MESSAGES)])
        history = push(history, step, delays_s)
        found = subjects_of(history, step)
        if found:
            return found
        history = history.learn(np.zeros(len(history.keys), bool), THRESHOLDS)
    return []


def test_link_that_loses_a_fifth_of_its_packets_is_found_within_twenty_steps() -> None:
    """Where only steps counted in which a packet was lost, one in seven was found."""
    of_seeds = [found_after(seed, {(1, 2): 0.2, (2, 1): 0.2}, 20) for seed in range(40)]
    assert all(found in (["link 1 -> 2"], ["link 2 -> 1"]) for found in of_seeds)


def test_direction_that_is_delayed_more_is_named() -> None:
    of_seeds = [found_after(seed, {(1, 2): 0.35, (2, 1): 0.1}, 20) for seed in range(40)]
    assert sum(found == ["link 1 -> 2"] for found in of_seeds) >= 36


def test_rank_whose_links_all_lose_packets_is_named() -> None:
    chain = [pair for rank in range(7) for pair in ((rank, rank + 1), (rank + 1, rank))]
    lost = dict.fromkeys([(2, 3), (3, 2), (3, 4), (4, 3)], 0.3)
    assert [found_after(seed, lost, 20, chain) for seed in range(10)] == [["rank 3 on n3"]] * 10


@pytest.mark.parametrize("outliers", [1, 2])
def test_single_late_messages_are_no_loss(outliers: int) -> None:
    history = NOTHING
    for step in range(40):
        delays_s = dict.fromkeys(PIPELINE, 0.002)
        if step in (30, 33)[:outliers]:
            delays_s[1, 2] = 3.0
        history = push(history, step, delays_s)
        assert subjects_of(history, step) == []
        history = history.learn(np.zeros(len(history.keys), bool), THRESHOLDS)


def test_lateness_is_that_of_a_recent_steps_messages_together() -> None:
    history = push(NOTHING, 1, {link: 0.01 * (link == (1, 2)) + 0.001 for link in PIPELINE})
    late = Lateness(delays=history, message_counts=dict.fromkeys(history.keys.tolist(), MESSAGES))
    assert late.among_s((2, 1)) == pytest.approx(0.044)
    assert late.among_s((0, 1)) == pytest.approx(0.004)
    assert late.among_s(range(4)) == pytest.approx(0.044)
    assert late.among_s((0, 2)) == late.in_communicator_s(0) == 0.0
