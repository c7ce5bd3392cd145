"""Claims about the schedule of faults: it depends on the seed and on what is possible alone."""

from itertools import islice

import pytest

from ops.bench.chaos.faults import Harm
from ops.bench.chaos.schedule import (
    KINDS,
    NODES,
    NOT_BUILT,
    Ability,
    Fault,
    Part,
    Promise,
    draw,
    left_out,
    plan,
    possible,
)

ALL = possible(list(Ability))


def faults(seed: int, count: int = 200) -> list[Fault]:
    return list(islice(draw(seed, ALL), count))


def test_equal_seeds_give_equal_faults_and_jobs() -> None:
    assert faults(7) == faults(7)
    assert plan(7) == plan(7)
    assert faults(7) != faults(8)


def test_a_shorter_campaign_has_the_same_first_faults() -> None:
    assert faults(3, 200)[:50] == faults(3, 50)


@pytest.mark.parametrize("seed", range(4))
def test_every_kind_comes_once_before_any_comes_again(seed: int) -> None:
    assert {fault.kind for fault in faults(seed, len(ALL))} == KINDS.keys()


@pytest.mark.parametrize("seed", range(4))
def test_faults_are_within_their_bounds(seed: int) -> None:
    for number, fault in enumerate(faults(seed)):
        kind = KINDS[fault.kind]
        assert fault.number == number
        assert {fault.node, fault.other} <= set(range(NODES))
        assert fault.node != fault.other
        least, greatest = kind.seconds or (0.0, 0.0)
        assert least <= fault.seconds <= greatest
        assert 0 <= fault.strength < 1
        if fault.second is not None:
            second = KINDS[fault.then]
            assert kind.overlaps
            assert second.overlaps
            assert kind.part is not second.part or kind.part is Part.NODES
            assert (fault.second.kind, fault.second.node) == (fault.then, fault.other)
            assert (fault.then_seconds > 0) == (second.seconds is not None)


def test_two_faults_that_take_memory_promise_the_stored_checkpoint_only() -> None:
    first = Fault(0, "agent_kill", 0, 1, 0.0, 0.5)
    second = Fault(0, "agent_kill", 0, 1, 0.0, 0.5, then="snapshot_server_kill")
    harmless = Fault(0, "agent_kill", 0, 1, 0.0, 0.5, then="worker_kill")
    assert first.promise is Promise.COMMITTED
    assert harmless.promise is Promise.COMMITTED
    assert second.promise is Promise.STORED


def test_outage_of_the_coordinator_promises_what_nodes_hold_unless_another_fault_overlaps() -> None:
    alone = Fault(0, "coordinator_stop", 0, 1, 5.0, 0.5)
    with_a_worker = Fault(0, "coordinator_stop", 0, 1, 5.0, 0.5, then="worker_kill")
    assert alone.promise is Promise.HELD
    assert with_a_worker.promise is Promise.COMMITTED


def test_neighbouring_seeds_have_both_storages_and_both_sizes_of_job() -> None:
    plans = [plan(seed) for seed in range(4)]
    assert len({(job.is_elastic, job.has_objects) for job in plans}) == 4


def test_what_the_machine_lacks_is_left_out_by_name_with_the_reason() -> None:
    abilities = {Ability.FILES}
    kinds = {kind.name for kind in possible(abilities)}
    missing = left_out(abilities)
    assert kinds | (missing.keys() - NOT_BUILT.keys()) == KINDS.keys()
    assert not kinds & missing.keys()
    assert missing["link_cut"] == f"needs {Ability.NETWORK}"
    assert missing["disk_full"] == f"needs {Ability.FILE_SYSTEM}"
    assert NOT_BUILT.items() <= missing.items()


def test_only_kinds_that_were_asked_for_are_drawn_or_missed() -> None:
    abilities = {Ability.FILES}
    asked = ("worker_kill", "link_cut")
    assert [kind.name for kind in possible(abilities, asked)] == ["worker_kill"]
    assert left_out(abilities, asked).keys() == {"link_cut"}


def test_every_kind_can_be_injected() -> None:
    assert all(callable(getattr(Harm, f"_{name}")) for name in KINDS)
