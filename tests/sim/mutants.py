"""Breaks one rule of production at a time: the simulator must notice every one.

`python -m tests.sim.mutants` prints the first seed that notices each mutant, and by which rule.
A seed that failed becomes a mutant that undoes its fix.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from keepstep.checkpoint.errors import SnapshotInvariantViolated
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory import snapshot_table
from keepstep.checkpoint.snapshot.memory.snapshot_table import SnapshotTable
from keepstep.elastic.errors import InvariantViolated
from keepstep.elastic.rendezvous import (
    checkpoint_schedule,
    closing,
    commits,
    decide,
    invariants,
    opening,
    publication,
    rank_assignment,
    transactions,
)
from keepstep.elastic.rendezvous.actions import (
    CancelPersist,
    Commit,
    Open,
    OrderAbort,
    Persist,
    Publish,
    ReleaseMembers,
)
from keepstep.elastic.rendezvous.checkpoint_schedule import PartAttempt
from keepstep.elastic.rendezvous.decision import Decision
from keepstep.elastic.rendezvous.join_protocol import Lease
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.publication import Publication
from keepstep.elastic.rendezvous.records import (
    CommitAnnouncement,
    Generation,
    Member,
    NodePhase,
    NodeRecord,
    NodeReport,
    PersistRequest,
    Release,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.reports import Reports
from keepstep.elastic.rendezvous.transactions import Condition, Transaction
from keepstep.elastic.rendezvous.view import JoinedNode, Keys, View
from keepstep.elastic.store.contract import Created, Put
from tests.sim import node
from tests.sim.node import Node
from tests.sim.rules import BrokenRuleError
from tests.sim.simulation import Simulation

MAX_SEEDS = 3000
Patch = Callable[[pytest.MonkeyPatch], None]


def with_records(view: View, change: Callable[[NodeRecord], NodeRecord]) -> View:
    """Return a view whose records are changed."""
    nodes = {n: JoinedNode(change(j.record), j.created) for n, j in view.nodes.items()}
    return replace(view, nodes=nodes)


# Decisions


def commits_what_is_only_sealed(patch: pytest.MonkeyPatch) -> None:
    right = commits.commit_of

    def wrong(view: View, generation: Generation, present: Sequence[NodeRecord]) -> Commit | None:
        return right(view, generation, [replace(r, protected=r.sealed) for r in present])

    for user in (decide, opening):
        patch.setattr(user, "commit_of", wrong)


def commits_without_all_members(patch: pytest.MonkeyPatch) -> None:
    right = commits.commit_of

    def wrong(view: View, generation: Generation, present: Sequence[NodeRecord]) -> Commit | None:
        newest = max((s for r in present for s in r.protected), default=None)
        protected = () if newest is None else (newest,)
        return right(view, generation, [replace(r, protected=protected) for r in present])

    for user in (decide, opening):
        patch.setattr(user, "commit_of", wrong)


def commits_an_older_generations_snapshot(patch: pytest.MonkeyPatch) -> None:
    right = commits.commit_of

    def wrong(view: View, generation: Generation, present: Sequence[NodeRecord]) -> Commit | None:
        return right(view, replace(generation, generation=generation.generation - 1), present)

    for user in (decide, opening):
        patch.setattr(user, "commit_of", wrong)


def opens_before_all_have_drained(patch: pytest.MonkeyPatch) -> None:
    right = opening.open_next_generation

    def wrong(policy: RendezvousPolicy, view: View, old: Generation, *rest: Any) -> Decision:
        def drained(record: NodeRecord) -> NodeRecord:
            return replace(record, phase=NodePhase.DRAINED, generation=old.generation)

        return right(policy, with_records(view, drained), old, *rest)

    patch.setattr(decide, "open_next_generation", wrong)


def uses_a_generations_number_again(patch: pytest.MonkeyPatch) -> None:
    right = opening._new_generation

    def wrong(
        policy: RendezvousPolicy, view: View, members: tuple[Member, ...], number: int, *rest: Any
    ) -> Generation:
        return right(policy, view, members, max(1, number - 1), *rest)

    patch.setattr(opening, "_new_generation", wrong)


def opens_with_more_than_the_most_nodes(patch: pytest.MonkeyPatch) -> None:
    right = rank_assignment.assign_ranks
    for user in (closing, opening):
        patch.setattr(
            user,
            "assign_ranks",
            lambda old, nodes, most, *rest: right(old, nodes, most + 1, *rest),
        )


def counts_on_parity_that_is_not_complete(patch: pytest.MonkeyPatch) -> None:
    right = rank_assignment._is_restorable

    def wrong(view: View, commit: SnapshotCommit) -> bool:
        return right(with_records(view, lambda r: replace(r, protected=r.sealed)), commit)

    patch.setattr(rank_assignment, "_is_restorable", wrong)


def counts_on_more_than_the_parity(patch: pytest.MonkeyPatch) -> None:
    right = rank_assignment._is_restorable

    def wrong(view: View, commit: SnapshotCommit) -> bool:
        return right(view, replace(commit, parity=commit.parity + 1))

    patch.setattr(rank_assignment, "_is_restorable", wrong)


def gives_up_what_parity_gives_back(patch: pytest.MonkeyPatch) -> None:
    right = rank_assignment._is_restorable

    def wrong(view: View, commit: SnapshotCommit) -> bool:
        return right(view, replace(commit, parity=0))

    patch.setattr(rank_assignment, "_is_restorable", wrong)


def resumes_from_what_one_node_has_sealed(patch: pytest.MonkeyPatch) -> None:
    right = rank_assignment.absent_holders

    def wrong(view: View, commit: SnapshotCommit) -> tuple[Member, ...]:
        absent = right(view, commit)
        gone = tuple(member for member in absent if member.node not in view.nodes)
        return gone if len(absent) < len(commit.holders) else absent

    patch.setattr(rank_assignment, "absent_holders", wrong)


# Conditions and fencing


def without_leader_condition(*names: str) -> Patch:
    """Return a mutant whose leaders do not depend on some documents, or on having the lead."""

    def broken(patch: pytest.MonkeyPatch) -> None:
        right = transactions.leader_conditions

        def wrong(keys: Keys, view: View, led: int) -> tuple[Condition, ...]:
            dropped = {keys.single(name) for name in names}
            if "leadership" in names and view.leadership is not None:
                # The leader's own key ends with the same lease.
                dropped.add(keys.node(view.leadership.node))
            return tuple(c for c in right(keys, view, led) if c.key not in dropped)

        patch.setattr(transactions, "leader_conditions", wrong)

    return broken


def writes_records_without_a_condition(patch: pytest.MonkeyPatch) -> None:
    right = transactions.write_record
    patch.setattr(transactions, "write_record", lambda *args: replace(right(*args), conditions=()))


def writes_records_over_later_ones(patch: pytest.MonkeyPatch) -> None:
    """Has the condition of a record that it had until a late write took a record back."""

    def wrong(keys: Keys, record: NodeRecord, modified: int) -> Transaction:
        key = keys.node(record.node)
        created = CREATED.setdefault((id(SIMULATIONS[-1]), key, record.lease), modified)
        return Transaction((Created(key, created),), (Put(key, record.encode(), record.lease),))

    patch.setattr(transactions, "write_record", wrong)


def writes_records_without_the_lease(patch: pytest.MonkeyPatch) -> None:
    right = transactions.write_record

    def wrong(keys: Keys, record: NodeRecord, modified: int) -> Transaction:
        put = Put(keys.node(record.node), record.encode())
        return replace(right(keys, record, modified), operations=(put,))

    patch.setattr(transactions, "write_record", wrong)


def joins_over_another_owner_of_the_name(patch: pytest.MonkeyPatch) -> None:
    right = transactions.join

    def wrong(keys: Keys, view: View, record: NodeRecord, secret: bytes) -> Transaction:
        transaction = right(keys, view, record, secret)
        key = keys.node(record.node)
        kept = tuple(c for c in transaction.conditions if c.key != key)
        return replace(transaction, conditions=kept)

    patch.setattr(transactions, "join", wrong)


def removes_a_job_that_somebody_has_joined(patch: pytest.MonkeyPatch) -> None:
    right = transactions.remove_job

    def wrong(keys: Keys, *rest: Any) -> Transaction:
        transaction = right(keys, *rest)
        kept = tuple(c for c in transaction.conditions if c.key != keys.single("last_join"))
        return replace(transaction, conditions=kept)

    patch.setattr(transactions, "remove_job", wrong)


def removes_a_finished_job_in_any_case(patch: pytest.MonkeyPatch) -> None:
    right = transactions.remove_finished_job
    patch.setattr(
        transactions, "remove_finished_job", lambda *args: replace(right(*args), conditions=())
    )


def completes_a_later_generations_restart(patch: pytest.MonkeyPatch) -> None:
    right = transactions.complete_restart

    def wrong(keys: Keys, *rest: Any) -> Transaction:
        transaction = right(keys, *rest)
        kept = tuple(c for c in transaction.conditions if c.key != keys.single("generation"))
        return replace(transaction, conditions=kept)

    patch.setattr(transactions, "complete_restart", wrong)


def counts_a_lease_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    def wrong(lease: Lease, ttl_s: float, asked_s: float) -> Lease:
        return replace(lease, ttl_s=ttl_s, until_s=SIMULATIONS[-1].now_s + ttl_s)

    patch.setattr(Lease, "renewed", wrong)


def waits_for_a_member_that_has_drained(patch: pytest.MonkeyPatch) -> None:
    """Keeps a generation open although a member has joined again, without workers."""
    patch.setattr(closing, "_joined_again", lambda *_: None)


def takes_the_lead_from_another(patch: pytest.MonkeyPatch) -> None:
    right = transactions.take_lead

    def wrong(keys: Keys, *rest: Any) -> Transaction:
        transaction = right(keys, *rest)
        kept = tuple(c for c in transaction.conditions if c.key != keys.single("leadership"))
        return replace(transaction, conditions=kept)

    patch.setattr(transactions, "take_lead", wrong)


def leads_after_its_lease_has_ended(patch: pytest.MonkeyPatch) -> None:
    right = transactions.take_lead

    def wrong(keys: Keys, *rest: Any) -> Transaction:
        transaction = right(keys, *rest)
        puts = tuple(replace(o, lease=0) for o in transaction.operations)
        return replace(transaction, operations=puts)

    patch.setattr(transactions, "take_lead", wrong)


def leaves_requests_of_the_last_generation(patch: pytest.MonkeyPatch) -> None:
    right = transactions.leader_operations

    def wrong(keys: Keys, view: View, action: Any, wall_s: float) -> Any:
        operations = right(keys, view, action, wall_s)
        if isinstance(action, Open):
            return tuple(o for o in operations if o.key != keys.single("persist"))
        return operations

    patch.setattr(transactions, "leader_operations", wrong)


# Storing


def accepts_another_attempts_part(patch: pytest.MonkeyPatch) -> None:
    def wrong(view: View, request: PersistRequest, name: str) -> Any:
        part = view.nodes[name].record.persisted
        return part.part if part is not None else None

    patch.setattr(checkpoint_schedule, "_answer", wrong)


def ignores_a_parts_error(patch: pytest.MonkeyPatch) -> None:
    right = checkpoint_schedule._answer

    def wrong(view: View, request: PersistRequest, name: str) -> Any:
        part = right(view, request, name)
        return {"entry": []} if part is not None and "error" in part else part

    patch.setattr(checkpoint_schedule, "_answer", wrong)


def publishes_before_all_parts_are_written(patch: pytest.MonkeyPatch) -> None:
    right = checkpoint_schedule._answer

    def wrong(view: View, request: PersistRequest, name: str) -> Any:
        part = right(view, request, name)
        is_last = name == request.commit.holders[-1].node
        return {"entry": []} if part is None and is_last else part

    patch.setattr(checkpoint_schedule, "_answer", wrong)


def publishes_parts_of_some_holders(patch: pytest.MonkeyPatch) -> None:
    right = checkpoint_schedule.continue_persist

    def wrong(view: View, request: PersistRequest, wall_s: float) -> Publish | CancelPersist | None:
        action = right(view, request, wall_s)
        return replace(action, parts=action.parts[:-1]) if isinstance(action, Publish) else action

    patch.setattr(checkpoint_schedule, "continue_persist", wrong)


def records_a_checkpoint_before_storage_has_its_manifest(patch: pytest.MonkeyPatch) -> None:
    right = publication.conclude

    def wrong(writing: Publication | None, view: View) -> Publish | CancelPersist | None:
        is_under_way = writing is not None and writing.is_under_way
        return right(replace(writing, failure="") if is_under_way else writing, view)

    patch.setattr(publication, "conclude", wrong)


def never_cancels_a_request(patch: pytest.MonkeyPatch) -> None:
    right = checkpoint_schedule.continue_persist

    def wrong(view: View, request: PersistRequest, wall_s: float) -> Publish | None:
        action = right(view, request, wall_s)
        return action if isinstance(action, Publish) else None

    patch.setattr(checkpoint_schedule, "continue_persist", wrong)


def stores_what_is_not_committed(patch: pytest.MonkeyPatch) -> None:
    right = checkpoint_schedule.begin_persist_if_due

    def wrong(view: View, present: Sequence[NodeRecord], wall_s: float) -> Persist | None:
        action = right(view, present, wall_s)
        if action is None:
            return None
        commit = action.request.commit
        newer = replace(commit.snapshot, step=commit.snapshot.step + 1)
        return Persist(replace(action.request, commit=replace(commit, snapshot=newer)))

    patch.setattr(checkpoint_schedule, "begin_persist_if_due", wrong)


def stores_nothing_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    right = checkpoint_schedule.begin_persist_if_due

    def wrong(view: View, present: Sequence[NodeRecord], wall_s: float) -> Persist | None:
        return None if view.store_failure is not None else right(view, present, wall_s)

    patch.setattr(checkpoint_schedule, "begin_persist_if_due", wrong)


def waits_for_ever_for_a_last_checkpoint(patch: pytest.MonkeyPatch) -> None:
    right = decide._unrecoverable_result
    patch.setattr(
        decide,
        "_unrecoverable_result",
        lambda view, *rest: right(replace(view, store_failure=None), *rest),
    )


def waits_for_a_holder_that_is_gone(patch: pytest.MonkeyPatch) -> None:
    """Waits for the part of a holder that is no member, as it did until a seed hung."""
    right = checkpoint_schedule.continue_persist

    def wrong(view: View, request: PersistRequest, wall_s: float) -> Publish | CancelPersist | None:
        action = right(view, request, wall_s)
        is_gone = isinstance(action, CancelPersist) and "was gone" in action.reason
        return None if is_gone else action

    patch.setattr(checkpoint_schedule, "continue_persist", wrong)
    may_leave = decide.may_leave
    patch.setattr(
        decide, "may_leave", lambda view, name: may_leave(replace(view, persist=None), name)
    )


def lets_members_leave_before_the_newest_step_is_stored(patch: pytest.MonkeyPatch) -> None:
    """Lets nodes go as soon as all have drained, as it did when all were preempted."""
    right = opening._release

    def wrong(view: View, old: Generation, present: Sequence[NodeRecord], _: Any) -> Any:
        return right(view, old, present, None)

    patch.setattr(opening, "_release", wrong)
    patch.setattr(checkpoint_schedule, "persist_before_leaving", lambda *_: None)


def releases_members_that_drain(patch: pytest.MonkeyPatch) -> None:
    """Lets nodes go before the others have drained, whose newest step may need them."""
    right = opening.open_next_generation

    def wrong(policy: RendezvousPolicy, view: View, old: Generation, *rest: Any) -> Decision:
        decision = right(policy, view, old, *rest)
        is_leaving = any(joined.record.leaving for joined in view.nodes.values())
        if decision.action is None and view.release is None and is_leaving:
            return replace(decision, action=ReleaseMembers(Release(old.generation)))
        return decision

    patch.setattr(decide, "open_next_generation", wrong)


def believes_reports_of_servers_that_died(patch: pytest.MonkeyPatch) -> None:
    """Takes what a snapshot server reported for what its replacement holds, as it did once."""
    right = node.with_reports

    def wrong(view: View, reports: Mapping[str, NodeReport]) -> View:
        known = {
            name: replace(report, server=view.nodes[name].record.server)
            for name, report in reports.items()
            if name in view.nodes
        }
        return right(view, known)

    patch.setattr(node, "with_reports", wrong)


def begins_a_snapshots_part_once_only(patch: pytest.MonkeyPatch) -> None:
    """Tells requests by their snapshot, as it did until a seed hung after a resume."""
    right = checkpoint_schedule.next_part

    def wrong(view: View, server: str, entered: int, begun: PartAttempt | None) -> Any:
        attempt = right(view, server, entered, begun)
        if attempt is None or begun is None:
            return attempt
        is_known = attempt.request.commit.snapshot == begun.request.commit.snapshot
        return None if is_known else attempt

    patch.setattr(checkpoint_schedule, "next_part", wrong)


def begins_a_part_before_it_enters_the_generation(patch: pytest.MonkeyPatch) -> None:
    """Begins a part that entering the generation ends, as it did until a checkpoint failed."""
    right = checkpoint_schedule.next_part
    patch.setattr(
        checkpoint_schedule,
        "next_part",
        lambda view, server, _, begun: right(view, server, view.generation_number, begun),
    )


# Snapshots in memory


def begins_before_the_last_one_is_committed(patch: pytest.MonkeyPatch) -> None:
    right = snapshot_table.begin

    def wrong(table: SnapshotTable, snapshot: SnapshotId, rank: int, *rest: Any) -> Any:
        kept = {key: held for key, held in table.shards.items() if key[1] != rank}
        return right(snapshot_table._retain_only(table, kept), snapshot, rank, *rest)

    patch.setattr(snapshot_table, "begin", wrong)


def gives_out_a_buffer_that_is_in_use(patch: pytest.MonkeyPatch) -> None:
    right = snapshot_table._choose_buffer

    def wrong(table: SnapshotTable, *rest: Any, **named: Any) -> Any:
        for held in table.shards.values():
            return right(replace(table, free={held.buffer: held.capacity}), *rest, **named)
        return right(table, *rest, **named)

    patch.setattr(snapshot_table, "_choose_buffer", wrong)


def gives_out_a_buffer_that_is_too_small(patch: pytest.MonkeyPatch) -> None:
    right = snapshot_table._choose_buffer

    def wrong(table: SnapshotTable, key: Any, nbytes: int, *rest: Any, **named: Any) -> Any:
        return right(table, key, nbytes - 1, *rest, **named)

    patch.setattr(snapshot_table, "_choose_buffer", wrong)


def frees_what_is_being_stored(patch: pytest.MonkeyPatch) -> None:
    right = snapshot_table.commit

    def wrong(table: SnapshotTable, snapshot: SnapshotId) -> SnapshotTable:
        return replace(right(replace(table, pinned={}), snapshot), pinned=table.pinned)

    patch.setattr(snapshot_table, "commit", wrong)


def seals_in_a_generation_that_is_over(patch: pytest.MonkeyPatch) -> None:
    right = snapshot_table.open_generation

    def wrong(table: SnapshotTable, generation: int) -> SnapshotTable:
        return table if table.shards else right(table, generation)

    patch.setattr(snapshot_table, "open_generation", wrong)


def aborts_before_all_are_fenced(patch: pytest.MonkeyPatch) -> None:
    right = closing.order_abort

    def wrong(view: View, old: Generation, present: Sequence[NodeRecord]) -> OrderAbort | None:
        fenced = [replace(record, fenced=old.generation) for record in present]
        return right(view, old, fenced)

    patch.setattr(opening, "order_abort", wrong)
    patch.setattr(invariants, "_check_fenced", lambda view: None)


# Announcements


def announces_without_one_member(patch: pytest.MonkeyPatch) -> None:
    right = Reports.protected_by_all

    def wrong(reports: Reports, generation: Generation) -> SnapshotId | None:
        if len(generation.members) == 1:
            return right(reports, generation)
        return right(reports, replace(generation, members=generation.members[:-1]))

    patch.setattr(Reports, "protected_by_all", wrong)


def announces_what_is_only_sealed(patch: pytest.MonkeyPatch) -> None:
    right = Node._report

    def wrong(node: Node, view: View) -> None:
        holdings = node._holdings
        node._holdings = lambda: {**holdings(), "protected": holdings()["sealed"]}  # type: ignore[method-assign]
        try:
            right(node, view)
        finally:
            node._holdings = holdings  # type: ignore[method-assign]

    patch.setattr(Node, "_report", wrong)


def frees_what_it_is_asked_to_store(patch: pytest.MonkeyPatch) -> None:
    right = commits.next_commit

    def wrong(
        view: View,
        entered: int,
        known: SnapshotId | None,
        announced: CommitAnnouncement | None,
        *rest: Any,
    ) -> SnapshotId | None:
        at_once = None if announced is None else replace(announced, after=0)
        return right(view, entered, known, at_once, *rest)

    patch.setattr(commits, "next_commit", wrong)


def forgets_commits_that_members_know(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rank_assignment, "newest_known_commit", lambda *_: None)
    patch.setattr(closing, "newest_known_commit", lambda *_: None)
    patch.setattr(invariants, "_announced_commits", lambda _: set())


def resumes_only_from_what_members_know(patch: pytest.MonkeyPatch) -> None:
    """A snapshot that all hold was sealed while the coordinator, or the leader, was not reached."""
    right = opening.newest_restorable

    def wrong(view: View, generation: Generation) -> SnapshotCommit | None:
        newest = rank_assignment.newest_committed(view, generation)
        known = {commit.snapshot for commit in (newest, view.snapshot) if commit is not None}

        def without_others(record: NodeRecord) -> NodeRecord:
            return replace(record, sealed=tuple(s for s in record.sealed if s in known))

        return right(with_records(view, without_others), generation)

    patch.setattr(opening, "newest_restorable", wrong)


def names_what_its_server_has_freed(patch: pytest.MonkeyPatch) -> None:
    """A node without a place lists what it held before it heard of newer commits."""
    patch.setattr(Node, "_withdraw_freed", lambda _: None)
    # More leases are lost.
    patch.setattr(node, "RENEWALS", 3)


def never_tells_the_coordinator_of_the_last_step(patch: pytest.MonkeyPatch) -> None:
    right = commits.is_due

    def wrong(view: View, commit: SnapshotCommit, *rest: Any) -> bool:
        return view.snapshot is None and right(view, commit, *rest)

    patch.setattr(decide, "is_due", wrong)


SIMULATIONS: list[Simulation] = []
"""The simulation that runs, for mutants that need its clock."""

CREATED: dict[tuple[int, str, int], int] = {}

_DOCUMENTS = (
    "generation",
    "closing",
    "release",
    "snapshot",
    "persist",
    "checkpoint",
    "store_failure",
)

# Missing here, because too few schedules tell them from production, and noticed by unit tests:
# leaders that do not depend on `checkpoint`, `store_failure`, `history` or `result` alone, snapshot
# tables that take an older commit, and commits that are passed on before a generation is entered;
# leaders that use what a lost member sealed after the order to abort: a case shows it; leaders that
# announce while a request to store may be on its way; nodes that believe announcements of a
# generation in which they are fenced or have drained, that go back to what the coordinator knows,
# that join a job whose keys are deleted, that take what they held into another job of its name, or
# that enter a generation that they were lost from.
MUTANTS: dict[str, Patch] = {
    **{
        function.__name__: function
        for function in (
            commits_what_is_only_sealed,
            commits_without_all_members,
            commits_an_older_generations_snapshot,
            opens_before_all_have_drained,
            uses_a_generations_number_again,
            opens_with_more_than_the_most_nodes,
            counts_on_parity_that_is_not_complete,
            counts_on_more_than_the_parity,
            gives_up_what_parity_gives_back,
            resumes_from_what_one_node_has_sealed,
            writes_records_without_a_condition,
            writes_records_over_later_ones,
            writes_records_without_the_lease,
            joins_over_another_owner_of_the_name,
            removes_a_job_that_somebody_has_joined,
            removes_a_finished_job_in_any_case,
            completes_a_later_generations_restart,
            counts_a_lease_from_the_answer,
            waits_for_a_member_that_has_drained,
            takes_the_lead_from_another,
            leads_after_its_lease_has_ended,
            leaves_requests_of_the_last_generation,
            accepts_another_attempts_part,
            ignores_a_parts_error,
            publishes_before_all_parts_are_written,
            publishes_parts_of_some_holders,
            records_a_checkpoint_before_storage_has_its_manifest,
            never_cancels_a_request,
            stores_what_is_not_committed,
            stores_nothing_after_a_failure,
            waits_for_ever_for_a_last_checkpoint,
            waits_for_a_holder_that_is_gone,
            lets_members_leave_before_the_newest_step_is_stored,
            releases_members_that_drain,
            believes_reports_of_servers_that_died,
            begins_a_snapshots_part_once_only,
            begins_a_part_before_it_enters_the_generation,
            begins_before_the_last_one_is_committed,
            gives_out_a_buffer_that_is_in_use,
            gives_out_a_buffer_that_is_too_small,
            frees_what_is_being_stored,
            seals_in_a_generation_that_is_over,
            aborts_before_all_are_fenced,
            announces_without_one_member,
            announces_what_is_only_sealed,
            frees_what_it_is_asked_to_store,
            forgets_commits_that_members_know,
            resumes_only_from_what_members_know,
            never_tells_the_coordinator_of_the_last_step,
            names_what_its_server_has_freed,
        )
    },
    "leader_does_not_depend_on_having_the_lead": without_leader_condition("leadership"),
    "leader_does_not_depend_on_the_generation": without_leader_condition("generation"),
    "leader_does_not_depend_on_the_snapshot": without_leader_condition("snapshot"),
    "leader_does_not_depend_on_the_request_to_store": without_leader_condition("persist"),
    "leader_does_not_depend_on_the_closing": without_leader_condition("closing"),
    "leader_depends_on_nothing": without_leader_condition("leadership", *_DOCUMENTS, "result"),
}


NOTICING_SEEDS = {
    "names_what_its_server_has_freed": 906,
    "frees_what_it_is_asked_to_store": 359,
    "removes_a_job_that_somebody_has_joined": 256,
    "leader_does_not_depend_on_having_the_lead": 166,
    "leader_does_not_depend_on_the_request_to_store": 139,
    "leader_does_not_depend_on_the_snapshot": 137,
    "believes_reports_of_servers_that_died": 106,
    "forgets_commits_that_members_know": 76,
    "lets_members_leave_before_the_newest_step_is_stored": 39,
    "leader_does_not_depend_on_the_closing": 32,
    "begins_a_snapshots_part_once_only": 28,
    "waits_for_ever_for_a_last_checkpoint": 28,
    "completes_a_later_generations_restart": 25,
    "commits_what_is_only_sealed": 21,
    "begins_a_part_before_it_enters_the_generation": 12,
}
"""Where to begin with mutants that few seeds notice.

What a seed does changes with every change of what is simulated: then others notice the mutant.
"""


@dataclass(frozen=True, slots=True)
class Catch:
    """How a mutant was noticed: at which seed, by which rule."""

    seed: int
    rule: str


def run_seed(seed: int) -> None:
    """Run one seed to its end."""
    simulation = Simulation(seed)
    SIMULATIONS[:] = [simulation]
    simulation.run()


def notice(seed: int) -> str | None:
    """Run a seed; return the rule that it breaks, or None."""
    try:
        run_seed(seed)
    except (InvariantViolated, SnapshotInvariantViolated) as error:
        return f"invariant: {error.invariant}"
    except BrokenRuleError as error:
        return f"rule: {error}"
    return None


def catch(mutant: Patch, seeds: Sequence[int]) -> Catch | None:
    """Run seeds with a mutant until a rule notices it; the seed must pass without the mutant."""
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            mutant(patch)
            rule = notice(seed)
        if rule is not None:
            unbroken = notice(seed)
            if unbroken is not None:
                raise AssertionError(f"seed {seed} fails without a mutant: {unbroken}")
            return Catch(seed, rule)
    return None


def seeds_for(name: str) -> list[int]:
    """Return the seeds to try with a mutant."""
    known = [NOTICING_SEEDS[name]] if name in NOTICING_SEEDS else []
    return [*known, *range(MAX_SEEDS)]


def main() -> int:
    """Print the table; the number of mutants that went unnoticed is the status."""
    chosen = {name: MUTANTS[name] for name in sys.argv[1:]} or MUTANTS
    missed = 0
    for name, mutant in chosen.items():
        caught = catch(mutant, seeds_for(name))
        missed += caught is None
        outcome = f"seed {caught.seed:4}, {caught.rule}" if caught else "  not noticed"
        print(f"{name:50} {outcome}", flush=True)
    print(f"{len(chosen)} mutants, {missed} not noticed")
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
