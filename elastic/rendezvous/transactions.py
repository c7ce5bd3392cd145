"""Builds the transactions that a member writes to the coordinator: conditions and operations.

Pure. `keepstep.elastic.agent.membership` and the simulator run exactly these; neither has
conditions of its own. A transaction is built from the view on which its writer decided, and fails
where that view was out of date. So it does nothing when it is applied late, or a second time after
its writer could not learn its outcome.

Invariants:
- A record is written only over the version that its own membership wrote last.
- A leader's action is applied only while its node is the member that decided, and while every
  document that leaders write is the version on which it decided.
- The job's keys are deleted only if nobody has joined since the view on which that was decided.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.elastic.rendezvous import actions
from keepstep.elastic.rendezvous.records import (
    CheckpointRecord,
    NodeRecord,
    RestartRequest,
    StoreFailure,
)
from keepstep.elastic.rendezvous.view import Keys, View, apply
from keepstep.elastic.store.contract import Change, Created, Delete, KeyValue, Modified, Put

LEADER_DOCUMENTS = (
    "generation",
    "closing",
    "snapshot",
    "persist",
    "checkpoint",
    "store_failure",
    "history",
    "result",
)
"""The job-wide documents that only leaders write."""

Condition = Modified | Created
Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class Transaction:
    """Operations that are applied together if all conditions hold, and else not at all."""

    conditions: tuple[Condition, ...]
    operations: tuple[Operation, ...]


def join(keys: Keys, view: View, record: NodeRecord, secret: bytes) -> Transaction:
    """Announce a node under its lease; the first one of a job also writes the job's secret.

    The secret's version names the run of the job, so nobody joins a run whose keys are being
    deleted. `last_join` is rewritten by every join: its version is what a clean-up depends on.

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


def remove_finished_job(keys: Keys, view: View) -> Transaction:
    """Delete the keys of a job that has ended and whose last member died before it could do so."""
    return Transaction(
        (_unchanged(keys, view, "result"), _unchanged(keys, view, "last_join")),
        (Delete(keys.prefix, prefix=True),),
    )


def lead(
    keys: Keys, view: View, node: str, created: int, action: actions.Action, wall_s: float
) -> Transaction:
    """Perform a leader's action.

    Args:
        keys: the job's keys.
        view: the view on which the action was decided.
        node: the leader.
        created: revision at which the leader's membership began.
        action: what was decided.
        wall_s: wall-clock seconds, stamped into records for people.
    """
    return Transaction(
        leader_conditions(keys, view, node, created), leader_operations(keys, action, wall_s)
    )


def leader_conditions(keys: Keys, view: View, node: str, created: int) -> tuple[Condition, ...]:
    """Return the conditions of every leader's action: still a member, and nothing decided since."""
    return (
        Created(keys.node(node), created),
        *(_unchanged(keys, view, name) for name in LEADER_DOCUMENTS),
    )


def leader_operations(keys: Keys, action: actions.Action, wall_s: float) -> tuple[Operation, ...]:
    """Return what an action writes."""
    single = keys.single
    match action:
        case actions.Open(generation):
            resume = generation.resume
            return (
                Put(single("generation"), generation.encode()),
                Delete(single("closing")),
                Delete(single("persist")),
                # Verdicts and restarts name ranks of the generation before.
                Delete(single("verdicts")),
                Delete(keys.restart(), prefix=True),
                Put(single("snapshot"), resume.encode()) if resume else Delete(single("snapshot")),
            )
        case actions.Close(closing):
            return (Put(single("closing"), closing.encode()),)
        case actions.Commit(commit):
            return (Put(single("snapshot"), commit.encode()),)
        case actions.Persist(request):
            return (Put(single("persist"), request.encode()),)
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
        case actions.RecordLoaded(checkpoint):
            return (Put(single("checkpoint"), checkpoint.encode()),)
        case actions.RecordRecovery(history):
            return (Put(single("history"), history.encode()),)
        case actions.Evict(node, eviction):
            return (Put(keys.eviction(node), eviction.encode()),)
        case actions.Finish(result):
            return (Put(single("result"), result.encode()),)


def preview(keys: Keys, view: View, transaction: Transaction) -> View:
    """Return the view as it will be once a leader's transaction is applied, one revision later."""
    revision = view.revision + 1
    changes: list[Change] = []
    for operation in transaction.operations:
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
