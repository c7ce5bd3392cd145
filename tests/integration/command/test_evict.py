"""Claims about `keepstep evict`, on a real coordinator."""

import pytest

from keepstep.elastic.cli.follow import evict_node
from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.records import Eviction
from keepstep.elastic.rendezvous.view import Keys, from_listing
from keepstep.elastic.store.blocking import BlockingStore
from keepstep.elastic.store.contract import Put
from keepstep.elastic.store.embedded import EmbeddedEtcd


def test_undo_removes_the_eviction_of_an_evicted_node_only(
    etcd_server: EmbeddedEtcd,
) -> None:
    keys, store = Keys("job"), BlockingStore(etcd_server.url)
    store.commit((), (Put(keys.eviction("b"), Eviction("slow", may_return=False).encode()),))
    with pytest.raises(UsageError, match="node 'a' was not evicted; evicted nodes: b"):
        evict_node(etcd_server.url, "job", "a", "", undo=True)
    evict_node(etcd_server.url, "job", "b", "", undo=True)
    assert from_listing(keys, store.read(keys.prefix)).evictions == {}
    with pytest.raises(UsageError, match="evicted nodes: none"):
        evict_node(etcd_server.url, "job", "b", "", undo=True)
    with pytest.raises(UsageError, match="has no node 'b'"):
        evict_node(etcd_server.url, "job", "b", "on request", undo=False)
    store.close()
