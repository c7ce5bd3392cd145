"""Claims about the rendezvous, commits and storing under seeded disasters.

`KEEPSTEP_SEEDS` sets how many seeds run (800 unless set); more are run with
`KEEPSTEP_SEEDS=20000 python -m pytest tests/sim/test_rendezvous.py -k schedule -n 2`.
`tests.sim.simulation` describes the simulator. A fix of a seed that fails comes with a mutant that
undoes it (`tests.sim.mutants`).
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.sim.mutants import MUTANTS, catch, run_seed, seeds_for
from tests.sim.simulation import OUTAGES, Simulation

SEEDS = int(os.environ.get("KEEPSTEP_SEEDS", "800"))
CHUNKS = 10


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.timeout(max(300, SEEDS // 5))
def test_any_schedule_keeps_the_invariants_and_ends_in_a_finished_job(chunk: int) -> None:
    for seed in range(chunk, SEEDS, CHUNKS):
        try:
            run_seed(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.timeout(max(300, SEEDS // 5))
def test_job_that_is_paused_resumed_and_scaled_meanwhile_keeps_them_too() -> None:
    reached = Counter[str]()
    for seed in range(SEEDS // 12):
        simulation = Simulation(seed, is_operated=True)
        try:
            simulation.run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        reached.update(generation.reason.partition(" ")[0] for generation in simulation.history)
    assert reached["paused:"] > 0
    assert reached["scaled"] > 0


@pytest.mark.timeout(max(300, SEEDS // 5))
def test_job_whose_coordinator_is_away_for_long_meanwhile_keeps_them_too() -> None:
    reached = Counter[str]()
    for seed in range(SEEDS // 8):
        simulation = Simulation(seed, has_outages=True)
        try:
            simulation.run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        reached.update(simulation.outages)
    assert min(reached[kind] for kind in OUTAGES) > 0


@pytest.mark.campaign
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.timeout(600)
def test_a_mutant_is_noticed(name: str) -> None:
    assert catch(MUTANTS[name], seeds_for(name)) is not None


def test_equal_seeds_give_equal_histories() -> None:
    def history(seed: int) -> tuple[object, ...]:
        simulation = Simulation(seed)
        simulation.run()
        return (simulation.history, simulation.coordinator.view, simulation.now_s)

    assert history(7) == history(7)
    assert history(7) != history(8)
