"""Claims about `keepstep evict`, on a real coordinator."""

import pytest

from keepstep.elastic.cli.follow import JobAddress, evict_node
from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.records import Eviction, NodeRecord
from keepstep.elastic.rendezvous.view import Keys, from_listing
from keepstep.elastic.store.address import parse_address
from keepstep.elastic.store.blocking import BlockingStore
from keepstep.elastic.store.contract import Put
from keepstep.elastic.store.embedded import EmbeddedEtcd


def test_undo_removes_the_eviction_of_an_evicted_node_only(
    etcd_server: EmbeddedEtcd,
) -> None:
    job = JobAddress(parse_address(etcd_server.url), "job")
    keys, store = Keys("job"), BlockingStore(job.coordinator)
    store.commit((), (Put(keys.eviction("b"), Eviction("slow", may_return=False).encode()),))
    with pytest.raises(UsageError, match="node 'a' was not evicted; evicted nodes: b"):
        evict_node(job, "a", "", undo=True)
    answer = evict_node(job, "b", "", undo=True)
    assert "node b may return to job job: run its line" in answer
    assert from_listing(keys, store.read(keys.prefix)).evictions == {}
    with pytest.raises(UsageError, match="evicted nodes: none"):
        evict_node(job, "b", "", undo=True)
    with pytest.raises(UsageError, match="has no node 'b'"):
        evict_node(job, "b", "on request", undo=False)
    store.close()


@pytest.mark.parametrize("has_left", [True, False], ids=["it has left", "it hands over"])
def test_a_node_that_the_job_has_evicted_itself_stays_away_if_asked(
    etcd_server: EmbeddedEtcd, has_left: bool
) -> None:
    """The command did nothing, and the node returned once its doctor had found nothing."""
    name = f"left-{has_left}"
    job = JobAddress(parse_address(etcd_server.url), name)
    keys, store = Keys(name), BlockingStore(job.coordinator)
    record = NodeRecord("b", "h", 1, "tcp:h:1", "tcp:h:2", 0, 1, "")
    eviction = Eviction("slow", may_return=True)
    store.commit((), (Put(keys.eviction("b"), eviction.encode()),))
    if not has_left:
        store.commit((), (Put(keys.node("b"), record.encode()),))
    answer = evict_node(job, "b", "on request", undo=False)
    assert f"`keepstep evict --job {name} --undo b` lets it return" in answer
    evictions = from_listing(keys, store.read(keys.prefix)).evictions
    assert evictions == {"b": Eviction("on request", may_return=False)}
    store.close()
