"""Claims about `keepstep evict`, against a real coordinator."""

import pytest

from elastic.errors import UsageError
from elastic.follow import evict_node
from elastic.records import Eviction
from elastic.store.blocking import BlockingStore
from elastic.store.contract import Put
from elastic.store.embedded import EmbeddedEtcd
from elastic.view import Keys, from_listing


def test_an_eviction_is_undone_once_and_only_of_who_was_evicted(etcd_server: EmbeddedEtcd) -> None:
    keys, store = Keys("job"), BlockingStore(etcd_server.url)
    store.commit((), (Put(keys.eviction("b"), Eviction("slow", may_return=False).encode()),))
    with pytest.raises(UsageError, match="node 'a' was not evicted; were: b"):
        evict_node(etcd_server.url, "job", "a", "", undo=True)
    evict_node(etcd_server.url, "job", "b", "", undo=True)
    assert from_listing(keys, store.read(keys.prefix)).evictions == {}
    with pytest.raises(UsageError, match="were: none"):
        evict_node(etcd_server.url, "job", "b", "", undo=True)
    with pytest.raises(UsageError, match="has no node 'b'"):
        evict_node(etcd_server.url, "job", "b", "on request", undo=False)
    store.close()
