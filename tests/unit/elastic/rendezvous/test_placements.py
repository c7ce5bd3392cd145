"""Claims about members: written once, in requests that etcd takes, and read unchanged."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous import transactions
from keepstep.elastic.rendezvous.actions import Commit, Open
from keepstep.elastic.rendezvous.placements import decode_chunk, members_of, place
from keepstep.elastic.rendezvous.rank_assignment import assign_groups, assign_ranks
from keepstep.elastic.rendezvous.records import Generation, Member, NodeRecord, SnapshotCommit
from keepstep.elastic.rendezvous.transactions import Transaction
from keepstep.elastic.rendezvous.view import JoinedNode, Keys, View, apply, from_listing
from keepstep.elastic.store.contract import Change, Delete, KeyValue, Listing, Put

KEYS = Keys("job")
MAX_REQUEST_NBYTES, MAX_REQUEST_OPERATIONS = 1536 * 1024, 128
"""The size of a request that etcd takes by default."""


def records_of(count: int) -> list[NodeRecord]:
    """Return records with names and addresses that hardly compress, as of a cloud's hosts."""
    return [
        NodeRecord(
            node=f"ip-10-{n * 7919 % 251}-{n >> 8}-{n & 255}.region-1.compute.internal",
            host=f"10.{n * 7919 % 251}.{n >> 8}.{n & 255}", nproc=8,
            agent=f"10.{n * 7919 % 251}.{n >> 8}.{n & 255}:{32768 + n * 31337 % 28000}",
            server=f"tcp:10.{n * 7919 % 251}.{n >> 8}.{n & 255}:{32768 + n * 40009 % 28000}",
            store_port=1, lease=n, digest="d", domain=f"rack-{n // 32}", warm=True,
        )
        for n in range(count)
    ]  # fmt: skip


def generation_of(
    number: int, records: Sequence[NodeRecord], before: Sequence[Member] = (), **fields: object
) -> Generation:
    view = View(nodes={record.node: JoinedNode(record, n) for n, record in enumerate(records)})
    members, parity = assign_groups(assign_ranks(before, records, len(records)), view, 8, 1)
    return replace(Generation(number, members, "h", 5, "start", parity=parity), **fields)


def fold(view: View, parts: Sequence[Transaction]) -> View:
    """Return the view after these transactions."""
    for part in parts:
        revision = view.revision + 1
        changes = []
        for operation in part.operations:
            if isinstance(operation, Put):
                item = KeyValue(operation.key, operation.value, revision, revision)
                changes.append(Change(operation.key, item, revision))
            elif not operation.prefix:
                changes.append(Change(operation.key, None, revision))
        view = apply(KEYS, view, changes)
    return view


def nbytes_of(part: Transaction) -> int:
    return sum(
        len(o.key) + (len(o.value) if isinstance(o, Put) else 0) + 32 for o in part.operations
    ) + sum(len(condition.key) + 32 for condition in part.conditions)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 300])
def test_members_are_read_as_they_were_placed(count: int) -> None:
    members = generation_of(1, records_of(count)).members
    placement, chunks = place(members)
    known = {digest: decode_chunk(digest, data) for digest, data in chunks.items()}
    assert members_of(placement, known) == members


def test_16384_nodes_are_placed_by_requests_that_etcd_takes() -> None:
    records = records_of(16384)
    first = generation_of(1, records)
    parts = transactions.lead(KEYS, View(), 1, Open(first), 0.0)
    view = fold(View(), parts)
    assert view.generation == first
    resume = SnapshotCommit(SnapshotId(1, 7), first.members, first.parity)
    second = generation_of(2, records[:-1], first.members, resume=resume)
    parts += transactions.lead(KEYS, view, 1, Open(second), 0.0)
    view = fold(view, parts[-1:])
    assert (view.generation, view.snapshot) == (second, resume)
    assert max(nbytes_of(part) for part in parts) < MAX_REQUEST_NBYTES
    assert max(len(part.operations) for part in parts) < MAX_REQUEST_OPERATIONS


def test_commit_is_of_the_same_size_at_any_number_of_nodes() -> None:
    sizes = set()
    for count in (4, 4096):
        generation = generation_of(1, records_of(count))
        view = fold(View(), transactions.lead(KEYS, View(), 1, Open(generation), 0.0))
        commit = SnapshotCommit(SnapshotId(1, 7), generation.members, generation.parity)
        parts = transactions.lead(KEYS, view, 1, Commit(commit), 0.0)
        sizes.add(sum(map(nbytes_of, parts)))
        assert fold(view, parts).snapshot == commit
    assert len(sizes) == 1


def test_generation_without_one_node_shares_most_chunks_with_the_one_before() -> None:
    records = records_of(1000)
    first = generation_of(1, records)
    view = fold(View(), transactions.lead(KEYS, View(), 1, Open(first), 0.0))
    lost = [record for n, record in enumerate(records) if n != 300]
    second = generation_of(2, lost, first.members)
    (part,) = transactions.lead(KEYS, view, 1, Open(second), 0.0)
    written = [o for o in part.operations if isinstance(o, Put) and o.key.startswith(KEYS.chunk())]
    assert len(written) == 2
    assert sum(len(o.value) for o in part.operations if isinstance(o, Put)) < 10_000


def test_what_no_placement_lists_is_removed_when_the_next_generation_is_opened() -> None:
    generations = [generation_of(n, records_of(4)[n - 1 :]) for n in (1, 2, 3)]
    view = View()
    for generation in generations:
        (part,) = transactions.lead(KEYS, view, 1, Open(generation), 0.0)
        view = fold(view, [part])
    digests = [next(iter(place(generation.members)[1])) for generation in generations]
    assert Delete(KEYS.chunk(digests[0])) in part.operations
    assert set(view.chunks) == set(digests[1:])
    assert set(view.placements) == {3}


def test_placement_stays_as_long_as_a_generation_resumes_from_its_snapshot() -> None:
    first = generation_of(1, records_of(3))
    resume = SnapshotCommit(SnapshotId(1, 7), first.members, first.parity)
    view = fold(View(), transactions.lead(KEYS, View(), 1, Open(first), 0.0))
    for number in (2, 3, 4):
        following = generation_of(number, records_of(2), first.members, resume=resume)
        view = fold(view, transactions.lead(KEYS, view, 1, Open(following), 0.0))
        assert set(view.placements) == {1, number}
        assert view.snapshot == resume


def test_holders_of_a_snapshot_that_storage_completes_are_those_that_are_left() -> None:
    first = generation_of(1, records_of(3))
    view = fold(View(), transactions.lead(KEYS, View(), 1, Open(first), 0.0))
    lost = first.members[1].node
    left = tuple(member for member in first.members if member.node != lost)
    commit = SnapshotCommit(SnapshotId(1, 7), left, 1, stored="/c", absent=(lost,))
    assert fold(view, transactions.lead(KEYS, view, 1, Commit(commit), 0.0)).snapshot == commit


def test_chunk_that_is_missing_or_another_is_a_usage_error() -> None:
    placement, chunks = place(generation_of(1, records_of(3)).members)
    (digest,) = chunks
    with pytest.raises(UsageError, match="is not 0"):
        decode_chunk("0" * 16, chunks[digest])
    with pytest.raises(UsageError, match="incomplete"):
        decode_chunk(digest, chunks[digest][:-5])
    with pytest.raises(UsageError, match="missing"):
        members_of(placement, {})
    item = KeyValue(KEYS.placement(1), placement.encode(), 1, 1)
    with pytest.raises(UsageError, match="missing"):
        from_listing(KEYS, Listing(1, (item,)))
