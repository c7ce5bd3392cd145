"""Claims about the rendezvous, commits and storing under seeded disasters.

`KEEPSTEP_SEEDS` sets how many seeds run (3,000 unless set); more are run with
`KEEPSTEP_SEEDS=20000 python -m pytest tests/sim/test_rendezvous.py -k schedule -n 2`.
`tests.sim.simulation` describes the simulator. A seed that fails goes into `FAILED_SEEDS`, with a
mutant that undoes its fix.
"""

from __future__ import annotations

import os

import pytest

from tests.sim.mutants import MAX_SEEDS, MUTANTS, catch, run_seed
from tests.sim.simulation import Simulation

SEEDS = int(os.environ.get("KEEPSTEP_SEEDS", "3000"))
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


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(name: str) -> None:
    assert catch(MUTANTS[name], range(MAX_SEEDS)) is not None


def test_equal_seeds_give_equal_histories() -> None:
    def history(seed: int) -> tuple[object, ...]:
        simulation = Simulation(seed)
        simulation.run()
        return (simulation.history, simulation.coordinator.view, simulation.now_s)

    assert history(7) == history(7)
    assert history(7) != history(8)
