"""Claims about a coordinator that does not answer: it costs no state, and no generation."""

from __future__ import annotations

import math

import pytest

from keepstep.elastic.rendezvous.records import Generation, SnapshotCommit
from tests.sim.node import TTL_S
from tests.sim.simulation import OUTAGES, POLICIES, Simulation


def running_job(seed: int) -> Simulation:
    """Return a job that has committed steps, with nothing on its way that would disturb it."""
    simulation = Simulation(seed, POLICIES[0])
    for _ in range(simulation.policy.max_nodes):
        simulation._start_node()
    simulation._calm_down()
    simulation._run_until(lambda: simulation._has_recovered(None), "the job begins")
    return simulation


def next_generation(
    simulation: Simulation, before: Generation
) -> tuple[Generation, SnapshotCommit]:
    """Wait for the next generation; return it, and the snapshot from which it resumes."""
    simulation._run_until(
        lambda: simulation.view.generation_number > before.generation, "a generation is opened"
    )
    after = simulation.view.generation
    assert after is not None
    assert after.resume is not None
    return after, after.resume


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
@pytest.mark.parametrize("kind", OUTAGES)
def test_no_step_is_computed_again_after_an_outage_however_long_it_was(
    seed: int, kind: str
) -> None:
    """Commits go on meanwhile; then the newest snapshot that all hold counts, announced or not."""
    simulation = running_job(seed)
    for _ in range(seed):
        # It begins wherever the leader is between committing, asking to store, and storing.
        simulation.tick(disturbance=0.0)
    generation, known = simulation.view.generation, simulation.view.snapshot
    assert generation is not None
    assert known is not None
    until_s = simulation.now_s + 30.0
    if kind == "is mute":
        simulation.lose_answers(30.0)
    else:
        simulation.cut_off_coordinator(30.0, dies=kind != "stops")
    if kind == "loses all":
        simulation.coordinator.lose_keys()
    reached = [known.snapshot.step]
    while simulation.now_s < until_s - 1.0:
        simulation.tick(disturbance=0.0)
        reached.append(min(node._step() for node in simulation.nodes))
    stretch = len(reached) // 3
    assert reached[stretch] < reached[2 * stretch] < reached[-1]
    simulation._run_until(lambda: simulation.now_s > until_s + 15.0, "time passes")
    resumed = [
        opened.resume.snapshot.step if opened.resume is not None else -1
        for opened in simulation.history[-1:]
        if opened.generation > generation.generation
    ]
    # A rank may have begun the step after the one that all hold.
    assert all(step >= reached[-1] - 1 for step in resumed)
    assert len(simulation.nodes) == simulation.policy.max_nodes


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_held_back_for_a_request_to_store_when_leases_may_end(seed: int) -> None:
    """Steps after it would be computed again; leases are renewed every quarter of their time."""
    simulation = running_job(seed)
    for _ in range(seed):
        simulation.tick(disturbance=0.0)
    begun_s = simulation.now_s
    simulation.cut_off_coordinator(6.0, dies=False)
    while simulation.now_s < begun_s + 5.0:
        simulation.tick(disturbance=0.0)
        for node in simulation.nodes:
            held_until_s = node.announcements.held_until_s
            if simulation.now_s > begun_s + 3 / 4 * TTL_S and held_until_s is not None:
                assert held_until_s < simulation.now_s


@pytest.mark.parametrize("seed", range(20))
def test_commits_go_on_where_one_node_is_cut_off_before_the_others(seed: int) -> None:
    """It has not seen what the leader has just asked it to store."""
    simulation = running_job(seed)
    first = next(node for node in simulation.nodes if not node._leads)
    while simulation.view.persist is None:
        first.cut_off_until_s = 0.0
        simulation.tick(disturbance=0.0)
        if simulation.view.persist is None:
            first.cut_off_until_s = math.inf
            simulation.tick(disturbance=0.0)
        elif first.view.persist is None:
            break
        else:
            simulation._run_until(lambda: simulation.view.persist is None, "it is stored")
    first.cut_off_until_s = math.inf
    simulation.tick(disturbance=0.0)
    simulation.cut_off_coordinator(30.0, dies=False)
    reached = []
    for _ in range(40):
        simulation.tick(disturbance=0.0)
        reached.append(min(node._step() for node in simulation.nodes))
    assert reached[12] < reached[-1]


@pytest.mark.parametrize("seed", range(20))
def test_nodes_that_all_lost_their_leases_resume_from_their_memory(seed: int) -> None:
    simulation = running_job(seed)
    generation, before = simulation.view.generation, simulation.view.snapshot
    assert generation is not None
    assert before is not None
    simulation.cut_off_coordinator(8.0, dies=False)
    after, resume = next_generation(simulation, generation)
    assert resume.snapshot.step >= before.snapshot.step
    assert not resume.stored
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
    after, resume = next_generation(simulation, generation)
    assert resume.snapshot.step >= before.snapshot.step
    assert {member.node for member in after.members} == {m.node for m in generation.members}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("newcomers", [0, 1])
def test_coordinator_that_has_lost_all_keys_learns_from_the_nodes_what_they_hold(
    seed: int, newcomers: int
) -> None:
    """A new one is empty, and a node that comes to it first would start the job again."""
    simulation = running_job(seed)
    generation = simulation.view.generation
    assert generation is not None
    if newcomers:
        simulation._crash(simulation.nodes[0])
    known = max(
        node.known_commit
        for node in simulation.nodes
        if node.is_alive and node.known_commit is not None
    )
    simulation.coordinator.lose_keys()
    if newcomers:
        simulation._start_node(simulation.nodes[0].name)
        while simulation.view.secret is None:
            simulation.nodes[-1].step()
    _, resume = next_generation(simulation, generation)
    assert resume.snapshot >= known
    assert not resume.stored


def test_node_ahead_of_a_restored_job_enters_a_generation_that_nobody_has_seen() -> None:
    """It took part in a generation that the node that restored the job had not heard of.

    It waited for ever for one of that number or above, while it reported that its workers ran.
    """
    Simulation(62, has_outages=True).run()


@pytest.mark.parametrize("seed", range(20))
def test_the_node_that_has_seen_the_newest_generation_decides_how_a_lost_job_goes_on(
    seed: int,
) -> None:
    """One that has not comes to the new coordinator first, and restores what it knows."""
    simulation = running_job(seed)
    behind = simulation.nodes[-1]
    old = behind.held
    simulation.nodes[1].fail_worker()
    newest = simulation.view.generation_number + 1
    simulation._run_until(
        lambda: all(node.state.entered == newest for node in simulation.nodes), "all enter the next"
    )
    simulation._run_until(
        lambda: all(node.known_commit is not None for node in simulation.nodes), "all commit in it"
    )
    known = max(node.known_commit for node in simulation.nodes if node.known_commit is not None)
    simulation.coordinator.lose_keys()
    behind.held = old
    behind.held_after_losses = 0
    while simulation.view.generation is None:
        behind.step()
    assert simulation.view.generation_number == newest - 1
    simulation._run_until(
        lambda: simulation.view.generation_number > newest and simulation._has_recovered(None),
        "training goes on",
    )
    assert [each.generation for each in simulation.history].count(newest) == 1
    following = next(each for each in simulation.history if each.generation > newest)
    assert following.resume is not None
    assert following.resume.snapshot >= known
