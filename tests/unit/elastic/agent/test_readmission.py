"""Claims about which evicted nodes may join again."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from keepstep.elastic.agent.readmission import (
    pause_before_return_s,
    readmit,
    return_after_eviction,
)
from keepstep.elastic.errors import JobFailed, StoreUnavailable
from keepstep.elastic.rendezvous.records import Eviction, Result
from keepstep.elastic.rendezvous.view import Keys
from keepstep.elastic.store.contract import Listing, Put
from keepstep.elastic.store.memory import MemoryStore

KEYS = Keys("job")


class RecordingCheck:
    """A node check that returns given findings and records the nodes that it was called for."""

    def __init__(self, *findings: str) -> None:
        self.findings = findings
        self.checked_nodes: list[str] = []

    async def __call__(self, node: str, directory: Path) -> Sequence[str]:
        self.checked_nodes.append(node)
        return self.findings


def evicted_after(eviction: Eviction, check: RecordingCheck, node: str = "b") -> list[str]:
    """Evict node b, let `node` try to join, and return the nodes that are still evicted."""

    async def scenario() -> list[str]:
        store = MemoryStore()
        await store.commit((), (Put(KEYS.eviction("b"), eviction.encode()),))
        await readmit(store, "job", node, Path(), check)
        return [item.key.rpartition("/")[2] for item in (await store.read(KEYS.prefix)).items]

    return asyncio.run(scenario())


def test_node_that_the_monitor_evicted_returns_if_its_check_finds_nothing() -> None:
    check = RecordingCheck()
    assert evicted_after(Eviction("slow", may_return=True), check) == []
    assert check.checked_nodes == ["b"]


def test_node_whose_check_finds_a_fault_stays_evicted_and_the_error_names_the_fault() -> None:
    with pytest.raises(JobFailed, match=r"slow.*cpu multiplies wrongly.*--job job --undo b"):
        evicted_after(
            Eviction("slow", may_return=True),
            RecordingCheck("b: wrong matrix product, cpu multiplies wrongly"),
        )


def test_node_that_a_person_evicts_while_it_is_checked_stays_evicted() -> None:
    """The node said that it returned, and took no notice."""

    async def scenario() -> list[str]:
        store = MemoryStore()
        key = KEYS.eviction("b")
        await store.commit((), (Put(key, Eviction("slow", may_return=True).encode()),))

        async def check(node: str, directory: Path) -> Sequence[str]:
            await store.commit((), (Put(key, Eviction("in the way", may_return=False).encode()),))
            return ()

        with pytest.raises(JobFailed, match=r"in the way.*--job job --undo b.*run this line again"):
            await readmit(store, "job", "b", Path(), check)
        return [item.key for item in (await store.read(KEYS.prefix)).items]

    assert asyncio.run(scenario()) == [KEYS.eviction("b")]


def test_node_that_a_person_evicted_is_not_checked_and_stays_evicted() -> None:
    check = RecordingCheck()
    with pytest.raises(JobFailed, match=r"in the way.*--job job --undo b.*run this line again"):
        evicted_after(Eviction("in the way", may_return=False), check)
    assert check.checked_nodes == []


@pytest.mark.parametrize("node", ["a", ""])
def test_eviction_of_another_node_is_kept_even_if_the_names_have_a_common_prefix(node: str) -> None:
    check = RecordingCheck()
    assert evicted_after(Eviction("slow", may_return=True), check, node) == ["b"]
    assert check.checked_nodes == []


MAY_RETURN = {KEYS.eviction("b"): Eviction("slow", may_return=True).encode()}
RUNS = {KEYS.single("secret"): b"s" * 32}
OVER = {KEYS.single("result"): Result(True, "done").encode()}


@pytest.mark.parametrize(
    ("keys", "returns"),
    [
        (RUNS, False),
        ({**RUNS, KEYS.eviction("b"): Eviction("loud", may_return=False).encode()}, False),
        ({**RUNS, KEYS.eviction("bb"): MAY_RETURN[KEYS.eviction("b")]}, False),
        ({**MAY_RETURN}, False),
        ({**MAY_RETURN, **RUNS, **OVER}, False),
        ({**MAY_RETURN, **RUNS}, True),
    ],
    ids=["not evicted", "by a person", "another", "job is removed", "job is over", "may return"],
)
def test_node_returns_by_itself_to_a_job_that_runs_if_it_was_evicted_and_is_well(
    keys: dict[str, bytes], returns: bool
) -> None:
    check = RecordingCheck()

    async def scenario() -> bool:
        store = MemoryStore()
        await store.commit((), tuple(Put(key, value) for key, value in keys.items()))
        returned = await return_after_eviction(store, "job", "b", Path(), 0.0, 0.0, check)
        is_lifted = not (await store.read(KEYS.eviction("b"))).items
        assert not returned or is_lifted
        return returned

    assert asyncio.run(scenario()) == returns
    assert check.checked_nodes == (["b"] if returns else [])


class AwayStore(MemoryStore):
    """A coordinator that does not answer the first of each call's attempts."""

    calls = 0
    unanswered = frozenset((1, 3, 6, 8))

    async def read(self, prefix: str, limit: int = 0) -> Listing:
        self.calls += 1
        if self.calls in self.unanswered:
            raise StoreUnavailable("no answer")
        return await super().read(prefix, limit)


@pytest.mark.parametrize("outage_s", [0.0, 60.0])
def test_node_that_is_to_return_outlasts_an_outage_of_the_coordinator(outage_s: float) -> None:
    """Its agent ended, though members outlast the same outage."""

    async def scenario() -> bool:
        store = AwayStore()
        keys = MAY_RETURN | RUNS
        await store.commit((), tuple(Put(key, value) for key, value in keys.items()))
        check = RecordingCheck()
        return await return_after_eviction(store, "job", "b", Path(), 0.0, outage_s, check)

    if outage_s:
        assert asyncio.run(scenario())
    else:
        with pytest.raises(StoreUnavailable):
            asyncio.run(scenario())


def test_node_that_is_evicted_again_and_again_stays_away_longer_each_time() -> None:
    pauses_s = [pause_before_return_s(returned) for returned in range(6)]
    assert pauses_s == [0.0, 60.0, 240.0, 960.0, 3600.0, 3600.0]
    assert pause_before_return_s(10**6) == 3600.0
