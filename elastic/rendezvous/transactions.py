"""Builds the transactions that a member writes to the coordinator: conditions and operations.

Pure. `keepstep.elastic.agent.membership` and the simulator run exactly these; neither has
conditions of its own. A transaction is built from the view on which its writer decided, and fails
where that view was out of date. So it does nothing when it is applied late, or a second time after
its writer could not learn its outcome.

Invariants:
- A record is written only over the version that its own membership wrote last.
- There is one leader at a time: a node takes the lead only if no other has it, and keeps it until
  its lease ends.
- A leader's action is applied only while the membership that decided has the lead, and while every
  document that leaders write is the version on which it decided.
- The job's keys are deleted only if no node has joined since the view on which that was decided.
- A job's keys are restored only where no generation was opened since they were lost.
- Members are written before the documents that name them, under the same conditions; unnamed ones
  have no effect, and are removed when a later generation is opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from keepstep.elastic.rendezvous import actions
from keepstep.elastic.rendezvous.placements import (
    encode_chunk,
    encode_commit,
    encode_generation,
    encode_request,
    place,
)
from keepstep.elastic.rendezvous.records import (
    CheckpointRecord,
    Generation,
    Leadership,
    Limits,
    NodeRecord,
    RestartRequest,
    Result,
    StoreFailure,
)
from keepstep.elastic.rendezvous.view import Keys, View, apply
from keepstep.elastic.store.contract import Change, Created, Delete, KeyValue, Modified, Put

LEADER_DOCUMENTS = (
    "generation",
    "closing",
    "abort_order",
    "release",
    "snapshot",
    "persist",
    "checkpoint",
    "store_failure",
    "history",
    "result",
)
"""The job-wide documents that only leaders write."""

MAX_OPERATIONS = 100
MAX_NBYTES = 2**20
"""Size of one transaction, below etcd's limits of 128 operations and 1.5 MiB."""

Condition = Modified | Created
Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class Transaction:
    """Operations that are applied together if all conditions hold, and otherwise not at all."""

    conditions: tuple[Condition, ...]
    operations: tuple[Operation, ...]


def join(keys: Keys, view: View, record: NodeRecord, secret: bytes) -> Transaction:
    """Announce a node under its lease; the first one of a job also writes the job's secret.

    The secret's version names the run of the job, so nobody joins a run whose keys are being
    deleted. `last_join` is rewritten by every join: a clean-up depends on its version.

    Args:
        keys: the job's keys.
        view: the job as last read.
        record: the node's first record, with its lease.
        secret: the job's secret in case it has none yet.
    """
    first = () if view.secret is not None else (Put(keys.single("secret"), secret),)
    return Transaction(
        (Created(keys.node(record.node), 0), _unchanged(keys, view, "secret")),
        (
            *first,
            Put(keys.single("last_join"), record.node.encode()),
            Put(keys.node(record.node), record.encode(), record.lease),
        ),
    )


def restore_job(keys: Keys, view: View, held: View) -> tuple[Transaction, ...]:
    """Restore the documents of a job that a coordinator has lost, from a node's view.

    Requests that were under way are not restored: no node acts on them any more. An older view
    that another node has restored is replaced.

    Args:
        keys: the job's keys.
        view: the job as last read, in which nothing was opened since the keys were lost.
        held: the view of the node when it was a member last, with a secret and a generation.
    """
    assert held.secret is not None, "a member knows the secret"
    assert held.generation is not None, "without a generation there is nothing to restore"
    single = keys.single
    documents = {
        "secret": held.secret,
        "generation": encode_generation(held.generation),
        "snapshot": encode_commit(held.snapshot) if held.snapshot else None,
        "checkpoint": held.checkpoint.encode() if held.checkpoint else None,
        "history": held.history.encode() if held.history.recoveries else None,
        "scale": held.scale.encode() if held.scale else None,
        "pause": held.pause.encode() if held.pause else None,
    }
    operations: tuple[Operation, ...] = (
        *(Delete(single(name)) for name in LEADER_DOCUMENTS if documents.get(name) is None),
        *(Delete(keys.placement(n)) for n in view.placements if n not in held.placements),
        Delete(keys.restart(), prefix=True),
        *(Put(keys.chunk(digest), encode_chunk(held.chunks[digest])) for digest in held.chunks),
        *(Put(keys.placement(n), known.encode()) for n, known in held.placements.items()),
        *(Put(keys.eviction(node), known.encode()) for node, known in held.evictions.items()),
        *(Put(single(name), value) for name, value in documents.items() if value is not None),
    )
    conditions = tuple(_unchanged(keys, view, name) for name in ("secret", *LEADER_DOCUMENTS))
    return tuple(Transaction(conditions, part) for part in _parts(keys, operations))


def write_record(keys: Keys, record: NodeRecord, modified: int) -> Transaction:
    """Replace a node's record.

    Args:
        keys: the job's keys.
        record: the new record.
        modified: revision at which this membership last wrote the node's key.
    """
    key = keys.node(record.node)
    return Transaction((Modified(key, modified),), (Put(key, record.encode(), record.lease),))


def complete_restart(
    keys: Keys, view: View, node: str, created: int, request: RestartRequest
) -> Transaction:
    """Delete a restart request that the node has carried out in the view's generation."""
    return Transaction(
        (Created(keys.node(node), created), _unchanged(keys, view, "generation")),
        (Delete(keys.restart(request.rank)),),
    )


def remove_job(keys: Keys, view: View, node: str, created: int) -> Transaction:
    """Delete all keys of a job as its last member, unless somebody has joined meanwhile."""
    return Transaction(
        (Created(keys.node(node), created), _unchanged(keys, view, "last_join")),
        (Delete(keys.prefix, prefix=True),),
    )


def keep_failed_job(keys: Keys, view: View, node: str, created: int, lease: int) -> Transaction:
    """Delete a job's keys as its last member, but for the secret and how it ended.

    They stay for as long as a lease: the nodes that return until then restore the others.

    Args:
        keys: the job's keys.
        view: all of them.
        node: the last member.
        created: revision at which its membership began.
        lease: ends when no node keeps the job's state any more.
    """
    assert view.secret is not None, "a member knows the secret"
    ended = view.result or Result(False, "ended before the job was over")
    kept = {
        "secret": view.secret,
        "result": replace(ended, kept=view.generation_number).encode(),
    }
    return Transaction(
        (Created(keys.node(node), created), _unchanged(keys, view, "last_join")),
        (
            *(Delete(keys.single(name)) for name in view.revisions if name not in kept),
            *(Delete(keys.placement(number)) for number in view.placements),
            Delete(keys.chunk(), prefix=True),
            Delete(keys.restart(), prefix=True),
            Delete(keys.eviction(""), prefix=True),
            *(Put(keys.single(name), value, lease) for name, value in kept.items()),
        ),
    )


def remove_finished_job(keys: Keys, view: View) -> Transaction:
    """Delete the keys of a job that has ended and whose last member died before it could do so."""
    return Transaction(
        (_unchanged(keys, view, "result"), _unchanged(keys, view, "last_join")),
        (Delete(keys.prefix, prefix=True),),
    )


def take_lead(
    keys: Keys, view: View, record: NodeRecord, created: int, limits: Limits | None = None
) -> Transaction:
    """Become the leader, if a view shows none and nobody else has become it since.

    Args:
        keys: the job's keys.
        view: the node's view.
        record: the node's record, with its lease.
        created: revision at which its membership began.
        limits: of the job, published for forecasts of the leader's decisions.
    """
    leadership = Leadership(node=record.node, agent=record.agent, lease=record.lease, limits=limits)
    return Transaction(
        (Created(keys.node(record.node), created), _unchanged(keys, view, "leadership")),
        (Put(keys.single("leadership"), leadership.encode(), record.lease),),
    )


def lead(
    keys: Keys, view: View, led: int, action: actions.Action, wall_s: float
) -> tuple[Transaction, ...]:
    """Perform a leader's action; most take one transaction.

    Opening a generation of thousands of nodes takes several, one after the other: the last one
    opens it, the earlier ones only write its members.

    Args:
        keys: the job's keys.
        view: the view on which the action was decided.
        led: revision at which this membership took the lead.
        action: the leader's decision.
        wall_s: wall-clock seconds, stamped into records for people.
    """
    conditions = leader_conditions(keys, view, led)
    operations = leader_operations(keys, view, action, wall_s)
    return tuple(Transaction(conditions, part) for part in _parts(keys, operations))


def _parts(keys: Keys, operations: Sequence[Operation]) -> Iterator[tuple[Operation, ...]]:
    """Cut operations into transactions; all but the last have operations on chunks only."""
    chunks = [operation for operation in operations if operation.key.startswith(keys.chunk())]
    others = [operation for operation in operations if not operation.key.startswith(keys.chunk())]
    most, most_nbytes = MAX_OPERATIONS - len(others), MAX_NBYTES - sum(map(_nbytes, others))
    part: list[Operation] = []
    nbytes = 0
    for operation in chunks:
        nbytes += _nbytes(operation)
        if part and (len(part) == most or nbytes > most_nbytes):
            yield tuple(part)
            part, nbytes = [], _nbytes(operation)
        part.append(operation)
    yield (*part, *others)


def _nbytes(operation: Operation) -> int:
    return len(operation.key) + (len(operation.value) if isinstance(operation, Put) else 0)


def leader_conditions(keys: Keys, view: View, led: int) -> tuple[Condition, ...]:
    """Return the conditions of every leader's action: it still leads, nothing was decided since.

    Its membership lasts, too: a coordinator that has lost its data counts revisions from 1, and may
    come to those of another leader's documents.
    """
    leader = view.nodes.get(view.leadership.node) if view.leadership is not None else None
    return (
        Created(keys.single("leadership"), led),
        *((Created(keys.node(leader.record.node), leader.created),) if leader else ()),
        *(_unchanged(keys, view, name) for name in LEADER_DOCUMENTS),
    )


def leader_operations(
    keys: Keys, view: View, action: actions.Action, wall_s: float
) -> tuple[Operation, ...]:
    """Return the operations of an action that was decided on a view."""
    single = keys.single
    match action:
        case actions.Open(generation):
            resume = generation.resume
            return (
                *_placement_operations(keys, view, generation),
                Put(single("generation"), encode_generation(generation)),
                Delete(single("closing")),
                Delete(single("abort_order")),
                Delete(single("release")),
                Delete(single("persist")),
                # Verdicts and restarts name ranks of the generation before.
                Delete(single("verdicts")),
                Delete(keys.restart(), prefix=True),
                Put(single("snapshot"), encode_commit(resume))
                if resume
                else Delete(single("snapshot")),
            )
        case actions.Close(closing):
            return (Put(single("closing"), closing.encode()),)
        case actions.OrderAbort(order):
            return (Put(single("abort_order"), order.encode()),)
        case actions.Commit(commit):
            return (Put(single("snapshot"), encode_commit(replace(commit, at_s=wall_s))),)
        case actions.Persist(request):
            return (Put(single("persist"), encode_request(request)),)
        case actions.Publish(request):
            snapshot = request.commit.snapshot
            stored = CheckpointRecord(
                step=snapshot.step,
                generation=snapshot.generation,
                url=request.url,
                at_s=wall_s,
                took_s=max(0.0, wall_s - request.at_s),
                base=request.base,
            )
            return (Put(single("checkpoint"), stored.encode()), Delete(single("persist")))
        case actions.CancelPersist(request, reason, count):
            failure = StoreFailure(request.commit.snapshot.step, reason, wall_s, count)
            return (Put(single("store_failure"), failure.encode()), Delete(single("persist")))
        case actions.ReleaseMembers(release):
            return (Put(single("release"), release.encode()),)
        case actions.RecordLoaded(checkpoint):
            return (Put(single("checkpoint"), checkpoint.encode()),)
        case actions.RecordRecovery(history):
            return (Put(single("history"), history.encode()),)
        case actions.Evict(node, eviction):
            return (Put(keys.eviction(node), eviction.encode()),)
        case actions.Finish(result):
            return (Put(single("result"), result.encode()),)


def _placement_operations(keys: Keys, view: View, generation: Generation) -> Iterator[Operation]:
    """Write a generation's missing members, and remove older ones.

    Members of the current generation stay until it is over: its nodes read them.
    """
    placement, chunks = place(generation.members)
    listed = {digest for known in view.placements.values() for digest in known.chunks}
    yield from (
        Put(keys.chunk(digest), data)
        for digest, data in chunks.items()
        if digest not in view.chunks
    )
    yield from (
        Delete(keys.chunk(digest)) for digest in view.chunks if digest not in listed | chunks.keys()
    )
    yield Put(keys.placement(generation.generation), placement.encode())
    needed = {generation.generation}
    if generation.resume is not None:
        needed.add(generation.resume.snapshot.generation)
    yield from (
        Delete(keys.placement(other)) for other in sorted(view.placements) if other not in needed
    )


def preview(keys: Keys, view: View, parts: Sequence[Transaction]) -> View:
    """Return the view as it will be once a leader's transactions are applied, one revision later.

    It takes one revision for all of them: those before the last change nothing but chunks.
    """
    revision = view.revision + 1
    changes: list[Change] = []
    for operation in (operation for part in parts for operation in part.operations):
        match operation:
            case Put(key, value, lease):
                item = KeyValue(key, value, created=revision, modified=revision, lease=lease)
                changes.append(Change(key, item, revision))
            case Delete(key, prefix=False):
                changes.append(Change(key, None, revision))
            case Delete(key) if key == keys.restart():
                changes += [
                    Change(keys.restart(rank), None, revision) for rank in sorted(view.restarts)
                ]
            case Delete(key):
                raise AssertionError(f"no leader's action deletes all keys under {key}")
    return apply(keys, view, changes)


def _unchanged(keys: Keys, view: View, name: str) -> Modified:
    return Modified(keys.single(name), view.revisions.get(name, 0))
