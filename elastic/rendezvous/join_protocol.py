"""Decides how a node joins a job, whether it leads, and how long its lease holds.

Pure. `keepstep.elastic.agent.membership` and the simulator decide by these functions.

Invariants:
- A node's lease, as the node counts it, ends no later than the coordinator's: it counts from the
  request.
- A node's name has one owner: the membership whose first write created the node's key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from keepstep.elastic.errors import InvariantViolated, LeaseLost, UsageError
from keepstep.elastic.rendezvous import transactions
from keepstep.elastic.rendezvous.records import NodePhase, NodeRecord
from keepstep.elastic.rendezvous.transactions import Transaction
from keepstep.elastic.rendezvous.view import Keys, View
from keepstep.elastic.store.contract import KeyValue


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as its holder knows it: it ends at `until_s`, in the holder's monotonic seconds."""

    id: int
    ttl_s: float
    until_s: float

    @classmethod
    def granted(cls, lease: int, ttl_s: float, asked_s: float) -> Lease:
        """Return a lease that was asked for at `asked_s`: the coordinator counts from later on."""
        return cls(lease, ttl_s, asked_s + ttl_s)

    def renewed(self, ttl_s: float, asked_s: float) -> Lease:
        """Return the lease after a renewal that was asked for at `asked_s`."""
        return replace(self, ttl_s=ttl_s, until_s=asked_s + ttl_s)

    def is_given_up(self, now_s: float, outage_s: float) -> bool:
        """Whether its holder stops waiting for a coordinator that does not answer.

        Args:
            now_s: monotonic seconds.
            outage_s: how long after the lease's end an outage may last.
        """
        return now_s >= self.until_s + outage_s


def led_since(view: View, lease: int) -> int:
    """Return the revision at which the membership of a lease took the lead; 0 if it has not."""
    leadership = view.leadership
    if leadership is None or leadership.lease != lease:
        return 0
    return view.revisions["leadership"]


@dataclass(frozen=True, slots=True)
class RemoveFinishedJob:
    """Remove the keys of a finished job, then read again."""

    transaction: Transaction


@dataclass(frozen=True, slots=True)
class RestoreJob:
    """Write the job's keys, which the coordinator has lost, then read again."""

    transactions: tuple[Transaction, ...]


@dataclass(frozen=True, slots=True)
class AwaitPredecessor:
    """A node of this name is there: find out whether its agent lives before going on."""

    predecessor: NodeRecord


@dataclass(frozen=True, slots=True)
class AwaitHolders:
    """Another node may be about to restore the job, or is still leaving it: read again later."""


@dataclass(frozen=True, slots=True)
class Join:
    """The name is free: take a lease and write the record."""


JoinStep = RemoveFinishedJob | RestoreJob | AwaitPredecessor | AwaitHolders | Join


@dataclass(frozen=True, slots=True)
class Restart:
    """An agent goes on with the view that the last one of its node has left.

    `may_restore`: no other node can have gone on with the job since then, and lost it again.
    """

    may_restore: bool


def next_join_step(
    keys: Keys,
    view: View,
    record: NodeRecord,
    held: View | None = None,
    restart: Restart | None = None,
    *,
    may_wait: bool = False,
) -> JoinStep:
    """Return a node's next step to become a member.

    Args:
        keys: the job's keys.
        view: the documents that every agent follows, and the nodes that the decision needs: one
            present node, if there is any, and the one of this name. Each present node was compared
            with another one when it joined.
        record: the node's record.
        held: the view of the node when it was a member last; None if it was none.
        restart: set if that was an agent before this one.
        may_wait: whether other nodes may still be waited for.

    Raises:
        UsageError: the job's name is taken by a job that runs something else, or the coordinator
            holds an older copy of the job than this node.
    """
    ended = view.result
    is_own_end = ended is not None and held is not None and held.secret == view.secret
    if held is not None and is_own_end and restart is not None and may_resume(view, held):
        return RestoreJob(transactions.restore_job(keys, view, held))
    # A member of that run learns how it ended; others may still leave it, or restore it.
    may_go_on = is_own_end if restart is not None else not is_own_end and view.is_kept
    if may_go_on and may_wait and ended is not None and not ended.succeeded:
        return AwaitHolders()
    if ended is None and held is not None and is_forgotten(view, held):
        # Over an older view, which somebody else has restored, every member may.
        if restart is None or restart.may_restore or view.generation is not None:
            return RestoreJob(transactions.restore_job(keys, view, held))
        if may_wait:
            return AwaitHolders()
    is_copy = held is not None and not was_restored(view, held)
    if held is not None and is_copy and held.secret == view.secret and goes_back(view, held):
        raise UsageError(
            f"the coordinator holds generation {view.generation_number} of job {keys.job!r}, this "
            f"node took part in generation {held.generation_number}: the coordinator's data is an "
            f"older copy. Delete the keys under {keys.prefix} while this node runs, and the job "
            "goes on from what its nodes hold; or start it again to go on from storage"
        )
    is_member = is_own_end and restart is None
    if ended is not None and not view.nodes and (ended.succeeded or not is_member):
        return RemoveFinishedJob(transactions.remove_finished_job(keys, view))
    for joined in view.nodes.values():
        if joined.record.digest != record.digest:
            raise UsageError(
                f"job {keys.job!r} is already running something else on node "
                f"{joined.record.node}; choose another --job name (--rdzv-id), or start every "
                "node with the same command and --nnodes"
            )
    if record.node in view.nodes:
        return AwaitPredecessor(view.nodes[record.node].record)
    return Join()


def may_resume(view: View, held: View) -> bool:
    """Whether a failed run of the job, which all nodes have left, goes on from a node's view of it.

    It does not if others have gone on without that node before they failed.
    """
    ended = view.result
    return (
        ended is not None
        and not ended.succeeded
        and not view.nodes
        and held.generation_number >= max(ended.kept, view.generation_number)
    )


def goes_back(view: View, held: View) -> bool:
    """Whether the coordinator is behind a node's earlier view of it: it has lost data.

    Its revision grows by every write, so a smaller one shows that it is new or a copy; so does an
    older generation of the same run of the job.
    """
    is_older = view.revision < held.revision or view.secret == held.secret
    return is_older and view.generation_number < held.generation_number


def is_forgotten(view: View, held: View) -> bool:
    """Whether the coordinator has lost the job that a node was a member of, and none runs there.

    The first nodes that come to a new coordinator may have started the job again, or have restored
    it as they knew it; as long as they have opened no generation, the node that has seen the newest
    one decides how it goes on.
    """
    if held.generation is None or not goes_back(view, held):
        return False
    is_older = view.is_restored and view.secret == held.secret and was_restored(view, held)
    return view.generation is None or is_older


def was_restored(view: View, held: View) -> bool:
    """Whether the job's secret was written again since an earlier view: its keys were lost."""
    return view.revisions.get("secret") != held.revisions.get("secret")


def keeps_state(view: View, secret: bytes | None, held: View | None) -> bool:
    """Whether a node may still use what it holds.

    It may not in another run of the job; nor where the keys were lost, restored, and a generation
    was opened without this node: that one may have the number of a generation that was lost, and
    its snapshots the names of others.

    Args:
        view: the job as last read.
        secret: of the run of the job in which the node's state arose; None if it has none.
        held: the view of the node when it was a member last; None if it was none.
    """
    if secret is None:
        return True
    is_continued = held is None or view.is_restored or not was_restored(view, held)
    return view.secret == secret and is_continued


def may_revoke_predecessor(
    keys: Keys, record: NodeRecord, predecessor: NodeRecord, lives: bool | None, waited_s: float,
    limit_s: float,
) -> bool:  # fmt: skip
    """Whether a node may revoke the lease of the one that has its name; False means to wait.

    Args:
        keys: the job's keys.
        record: the node that joins.
        predecessor: the record under its name.
        lives: whether the predecessor's agent answers; None if that is unknown.
        waited_s: how long the node has waited for the predecessor to go.
        limit_s: how long it may wait.

    Raises:
        UsageError: an agent that lives, or may live, has the right to the name.
    """
    if predecessor.agent == record.agent:
        # This agent itself was a member before, and lost its lease; however long that is ago.
        return True
    if lives or waited_s > limit_s:
        raise UsageError(
            f"node {record.node!r} is already in job {keys.job!r}; choose another --node name"
        )
    return lives is False


def joining_again(view: View, record: NodeRecord) -> NodeRecord:
    """Return a record of a former member of the job, with the snapshots that it holds.

    If the open generation counts on it, the record is that of a drained member, whether it ever
    entered that generation or not: others may have found it lost, and the next one may be opened
    already.
    """
    generation = view.generation
    member = generation.member(record.node) if generation is not None else None
    if generation is None or member is None or member.server != record.server:
        return record
    return replace(record, generation=generation.generation, phase=NodePhase.DRAINED)


def without_state(record: NodeRecord) -> NodeRecord:
    """Return a record for a job in which the node has not taken part.

    Its snapshot server is replaced once the job's secret is known, and its workers are restarted.
    """
    return NodeRecord(
        node=record.node,
        host=record.host,
        nproc=record.nproc,
        agent=record.agent,
        server="",
        store_port=record.store_port,
        lease=record.lease,
        digest=record.digest,
        domain=record.domain,
        leaving=record.leaving,
        serves_coordinator=record.serves_coordinator,
    )


def settle_record(stored: KeyValue | None, created: int, record: NodeRecord) -> int:
    """Return the revision of a record whose write was refused, though it was applied before.

    Args:
        stored: the coordinator's content under the node's key.
        created: revision at which the membership began.
        record: the record that was to be written.

    Raises:
        LeaseLost: the key is gone, or belongs to a later membership.
        InvariantViolated: somebody else has written the record.
    """
    if stored is None or stored.created != created:
        raise LeaseLost(f"node {record.node} was declared gone")
    if stored.value != record.encode():
        raise InvariantViolated(
            "a record is written by its own membership only",
            f"{record.node}'s key was written at revision {stored.modified}",
        )
    return stored.modified
