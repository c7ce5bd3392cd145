"""Claims about a coordinator that does not answer: it costs no state, and no generation."""

from __future__ import annotations

import pytest

from tests.sim.simulation import POLICIES, Simulation


def running_job(seed: int) -> Simulation:
    """Return a job that has committed steps, with nothing on its way that would disturb it."""
    simulation = Simulation(seed, POLICIES[0])
    for _ in range(simulation.policy.max_nodes):
        simulation._start_node()
    simulation._calm_down()
    simulation._run_until(lambda: simulation._has_recovered(None), "the job begins")
    return simulation


@pytest.mark.parametrize("seed", range(20))
def test_job_goes_on_in_its_generation_after_the_coordinator_was_away(seed: int) -> None:
    simulation = running_job(seed)
    generation, before = simulation.view.generation_number, simulation.view.snapshot
    simulation.cut_off_coordinator(8.0, dies=True)
    simulation._run_until(
        lambda: simulation.view.snapshot not in (None, before), "snapshots are committed again"
    )
    assert simulation.now_s > 8.0
    assert simulation.view.generation_number == generation


@pytest.mark.parametrize("seed", range(20))
def test_nodes_that_all_lost_their_leases_resume_from_their_memory(seed: int) -> None:
    simulation = running_job(seed)
    generation, before = simulation.view.generation, simulation.view.snapshot
    assert generation is not None
    assert before is not None
    simulation.cut_off_coordinator(8.0, dies=False)
    simulation._run_until(
        lambda: simulation.view.generation_number > generation.generation, "a generation is opened"
    )
    after = simulation.view.generation
    assert after is not None
    assert after.resume is not None
    assert after.resume.snapshot.step >= before.snapshot.step
    assert not after.resume.stored
    assert {member.node for member in after.members} == {m.node for m in generation.members}


@pytest.mark.parametrize("seed", range(20))
def test_node_whose_snapshot_server_died_takes_part_again_and_its_shards_are_rebuilt(
    seed: int,
) -> None:
    simulation = running_job(seed)
    generation, before = simulation.view.generation, simulation.view.snapshot
    assert generation is not None
    assert before is not None
    simulation.nodes[1].lose_server()
    simulation._run_until(
        lambda: simulation.view.generation_number > generation.generation, "a generation is opened"
    )
    after = simulation.view.generation
    assert after is not None
    assert after.resume is not None
    assert after.resume.snapshot.step >= before.snapshot.step
    assert {member.node for member in after.members} == {m.node for m in generation.members}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("newcomers", [0, 1])
def test_coordinator_that_has_lost_all_keys_learns_from_the_nodes_what_they_hold(
    seed: int, newcomers: int
) -> None:
    """A new one is empty, and a node that comes to it first would begin the job anew."""
    simulation = running_job(seed)
    generation = simulation.view.generation
    assert generation is not None
    if newcomers:
        simulation._crash(simulation.nodes[0])
    told = max(node.told for node in simulation.nodes if node.is_alive and node.told is not None)
    simulation.coordinator.lose_keys()
    if newcomers:
        simulation._start_node(simulation.nodes[0].name)
        while simulation.view.secret is None:
            simulation.nodes[-1].step()
    simulation._run_until(
        lambda: simulation.view.generation_number > generation.generation, "a generation is opened"
    )
    after = simulation.view.generation
    assert after is not None
    assert after.resume is not None
    assert after.resume.snapshot >= told
    assert not after.resume.stored
