"""Claims about `keepstep scale`, on a real coordinator; its effect is tested on a complete job."""

import pytest

from keepstep.elastic.cli import operation
from keepstep.elastic.cli.follow import JobAddress
from keepstep.elastic.cli.operation import scale_job
from keepstep.elastic.errors import JobFailed
from keepstep.elastic.rendezvous.records import NodeRecord
from keepstep.elastic.rendezvous.view import Keys
from keepstep.elastic.store.address import parse_address
from keepstep.elastic.store.blocking import BlockingStore
from keepstep.elastic.store.contract import Modified, Put
from keepstep.elastic.store.embedded import EmbeddedEtcd


def test_job_that_ends_before_its_limits_are_changed_is_said_to_have_ended(
    etcd_server: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobAddress(parse_address(etcd_server.url), "scaled")
    keys, store = Keys("scaled"), BlockingStore(job.coordinator)
    record = NodeRecord("a", "h", 1, "tcp:h:1", "tcp:h:2", 0, 1, "")
    store.commit((), (Put(keys.node("a"), record.encode()), Put(keys.single("secret"), b"00")))
    has_ended = (Modified(keys.single("secret"), 1),)
    monkeypatch.setattr(operation, "_of_this_run", lambda keys, view: has_ended)
    with pytest.raises(JobFailed, match="has ended before its limits could be changed"):
        scale_job(job, 1, 2)
    assert [item.key for item in store.read(keys.single("scale")).items] == []
    store.close()
