"""Claims about who may come back after an eviction."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from keepstep.elastic.agent.readmission import readmit
from keepstep.elastic.errors import JobFailed
from keepstep.elastic.rendezvous.records import Eviction
from keepstep.elastic.rendezvous.view import Keys
from keepstep.elastic.store.contract import Put
from keepstep.elastic.store.memory import MemoryStore

KEYS = Keys("job")


class Doctor:
    """Finds what it is told to, and remembers whom it has seen."""

    def __init__(self, *findings: str) -> None:
        self.findings = findings
        self.seen: list[str] = []

    async def __call__(self, node: str, directory: Path) -> Sequence[str]:
        self.seen.append(node)
        return self.findings


def evicted(eviction: Eviction, doctor: Doctor, node: str = "b") -> list[str]:
    """Return who is still evicted after `node` has tried to come back, where b is evicted."""

    async def scenario() -> list[str]:
        store = MemoryStore()
        await store.commit((), (Put(KEYS.eviction("b"), eviction.encode()),))
        await readmit(store, "job", node, Path(), doctor)
        return [item.key.rpartition("/")[2] for item in (await store.read(KEYS.prefix)).items]

    return asyncio.run(scenario())


def test_node_that_a_monitor_evicted_returns_once_its_doctor_finds_nothing() -> None:
    doctor = Doctor()
    assert evicted(Eviction("slow", may_return=True), doctor) == []
    assert doctor.seen == ["b"]


def test_node_in_which_the_doctor_finds_something_stays_away_and_is_told_what() -> None:
    with pytest.raises(JobFailed, match=r"slow.*cpu multiplies wrongly.*--undo b"):
        evicted(
            Eviction("slow", may_return=True),
            Doctor("b: wrong matrix product, cpu multiplies wrongly"),
        )


def test_who_was_evicted_by_a_person_is_not_even_examined() -> None:
    doctor = Doctor()
    with pytest.raises(JobFailed, match=r"in the way.*--undo b"):
        evicted(Eviction("in the way", may_return=False), doctor)
    assert doctor.seen == []


@pytest.mark.parametrize("node", ["a", ""])
def test_others_are_no_concern_even_if_their_names_begin_alike(node: str) -> None:
    doctor = Doctor()
    assert evicted(Eviction("slow", may_return=True), doctor, node) == ["b"]
    assert doctor.seen == []
