"""Makes the leader's decisions, as a pure function of the coordinator's content.

The leader mirrors the job's keys, calls `decide` and performs the action that it returns in a
transaction, which fails unless the node still leads and nothing else has been decided
since (`keepstep.elastic.rendezvous.transactions`). Decisions rest on the whole state, not on single
events: a missed or repeated event changes nothing, and a new leader needs no handover.

A generation's life: open -> (failure, loss, leave, join) -> closing -> all present members drained
-> the next one is open.

Invariants:
- A generation's number grows by one.
- A generation is opened when every present member of the last one has drained, with min to max
  nodes.
- A node that was a member and may be one again keeps its ranks, as far as the number of nodes
  allows.
- A snapshot is committed when every member of its generation has sealed it and has its parity.
  The commit is sent to agents at once (`keepstep.elastic.rendezvous.commits`), and to the
  coordinator when that is due.

`keepstep.elastic.rendezvous.invariants` checks them before every action. Why a generation closes
and how it ends is decided in `closing`, how the next one opens in `opening`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from keepstep.elastic.rendezvous import checkpoint_schedule, standstill
from keepstep.elastic.rendezvous.actions import Close, Finish, RecordRecovery
from keepstep.elastic.rendezvous.closing import admit_spares, reason_to_close
from keepstep.elastic.rendezvous.commits import COMMIT_INTERVAL_S, commit_of, is_due
from keepstep.elastic.rendezvous.decision import Decision, LeaderState
from keepstep.elastic.rendezvous.evictions import evict_wrong_replica
from keepstep.elastic.rendezvous.opening import open_first_generation, open_next_generation
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.rank_assignment import present_members, records_in
from keepstep.elastic.rendezvous.records import (
    FailureKind,
    Generation,
    History,
    NodePhase,
    NodeRecord,
    Recovery,
    Result,
)
from keepstep.elastic.rendezvous.view import View

_HISTORY_LENGTH = 32


def decide(
    policy: RendezvousPolicy, view: View, leader_state: LeaderState, now_s: float, wall_s: float
) -> Decision:
    """Return the leader's next action. Pure: equal inputs give equal outputs.

    Args:
        policy: the job's limits.
        view: the coordinator's content.
        leader_state: as the last decision returned it, or a fresh one for a new leader.
        now_s: monotonic seconds, for waiting.
        wall_s: wall-clock seconds, stamped into records for people.
    """
    policy = policy.scaled(view.scale)
    quiet = Decision(LeaderState())
    if view.result is not None:
        return quiet
    results = {
        node: joined.record.ended for node, joined in view.nodes.items() if joined.record.ended
    }
    if results:
        return Decision(LeaderState(), Finish(results[min(results)]))
    generation = view.generation
    if generation is None:
        return open_first_generation(policy, view, leader_state, now_s, wall_s)
    loaded = checkpoint_schedule.record_loaded(view, wall_s)
    if view.is_closing and loaded is not None:
        # The next generation may go on from memory, and say nothing of it.
        return Decision(leader_state, loaded)
    if view.is_closing:
        return open_next_generation(policy, view, generation, leader_state, now_s, wall_s)
    present = present_members(view, generation)
    # First, because a job that commits at every step, or is done, would never reach it.
    record_recovery = _record_recovery(view, generation, present)
    if record_recovery is not None:
        return Decision(leader_state, record_recovery)
    if loaded is not None:
        return Decision(leader_state, loaded)
    current = records_in(present, generation)
    if len(current) == len(generation.members) and all(r.phase is NodePhase.DONE for r in current):
        if view.persist is not None:
            answered = checkpoint_schedule.continue_persist(view, view.persist, wall_s)
            return Decision(
                LeaderState(),
                answered,
                checkpoint_schedule.parts_awaited_until_s(view, now_s, wall_s),
            )
        return Decision(LeaderState(), Finish(Result(True, "all workers finished")))
    ending = _unrecoverable_result(view, generation, present)
    if ending is not None:
        return Decision(LeaderState(), Finish(ending))
    evict = evict_wrong_replica(policy, view, generation, records_in(present, generation))
    if evict is not None:
        return Decision(leader_state, evict)
    closing = reason_to_close(policy, view, generation, present, wall_s)
    if closing is not None:
        return Decision(LeaderState(), Close(closing))
    commit = commit_of(view, generation, present)
    if commit is not None and is_due(view, commit.commit, present, wall_s):
        return Decision(leader_state, commit)
    stored = (
        checkpoint_schedule.continue_persist(view, view.persist, wall_s)
        if view.persist is not None
        else checkpoint_schedule.begin_persist_if_due(view, present, wall_s)
    )
    if stored is not None:
        return Decision(leader_state, stored)
    failed = view.store_failure
    if failed is not None and present and all(record.finishing for record in present):
        # No further step brings another look: the last one is stored when the pause is over.
        wait_s = checkpoint_schedule.retry_at_s(failed) - wall_s
        if wait_s > 0:
            return Decision(leader_state, again_at_s=now_s + wait_s)
    decision = admit_spares(policy, view, generation, present, leader_state, now_s, wall_s)
    if decision.action is not None:
        return decision
    again_s = [decision.again_at_s, checkpoint_schedule.parts_awaited_until_s(view, now_s, wall_s)]
    if commit is not None and view.snapshot is not None:
        # Announced, and to be written by then even if training pauses.
        again_s.append(now_s + view.snapshot.at_s + COMMIT_INTERVAL_S - wall_s)
    failures = [record.failure for record in records_in(present, generation) if record.failure]
    evidence_until_s = standstill.evidence_until_s(generation, present, failures)
    if evidence_until_s is not None:
        again_s.append(now_s + max(0.0, evidence_until_s - wall_s))
        names = ", ".join(record.node for record in present if record.failure is None)
        awaited = f"the job stands still; waiting for the stacks of {names}"
        decision = replace(decision, message=awaited)
    return replace(decision, again_at_s=min((s for s in again_s if s is not None), default=None))


def may_leave(view: View, node: str) -> bool:
    """Whether a leaving node's ranks and memory are no longer needed."""
    generation = view.generation
    if generation is None or view.result is not None:
        return True
    if generation.member(node) is None:
        holders = view.snapshot.holders if view.snapshot else ()
        writers = view.persist.commit.holders if view.persist else ()
        return all(holder.node != node for holder in (*holders, *writers))
    return (
        view.is_closing
        and view.release is not None
        and view.release.generation == generation.generation
    )


def _unrecoverable_result(
    view: View, generation: Generation, present: Sequence[NodeRecord]
) -> Result | None:
    """Return the job's result if another attempt is pointless.

    So it is after a fatal error, when the last checkpoint cannot be stored, or when the nodes do
    not agree where.
    """
    for record in records_in(present, generation):
        if record.failure is not None and record.failure.kind is FailureKind.FATAL:
            return Result(False, record.failure.message)
    disagreement = checkpoint_schedule.differing_urls(records_in(present, generation))
    if disagreement is not None:
        return Result(False, disagreement)
    failed = view.store_failure
    is_last = failed is not None and failed.count >= checkpoint_schedule.FINAL_ATTEMPTS
    if failed and is_last and present and all(
        r.finishing and r.step <= failed.step for r in present
    ):  # fmt: skip
        return Result(False, f"the last checkpoint could not be stored: {failed.reason}")
    return None


def _record_recovery(
    view: View, generation: Generation, present: Sequence[NodeRecord]
) -> RecordRecovery | None:
    known = view.history.recoveries
    if known and known[-1].generation >= generation.generation:
        return None
    records = records_in(present, generation)
    if len(records) < len(generation.members) or any(
        "stepped" not in record.times for record in records
    ):
        return None
    resumed = generation.resume.snapshot.step if generation.resume else min(
        int(record.times.get("resumed_step", 0)) for record in records
    )  # fmt: skip
    recovery = Recovery(
        generation=generation.generation,
        reason=generation.reason,
        world_size=generation.world_size,
        detected_at_s=generation.detected_at_s,
        opened_at_s=generation.opened_at_s,
        ready_at_s=max(record.times["ready"] for record in records),
        restored_at_s=max(record.times["restored"] for record in records),
        stepped_at_s=max(record.times["stepped"] for record in records),
        resumed_step=resumed,
        lost_steps=max(0, generation.lost_from_step - resumed),
        after_failure=generation.after_failure,
        source=", ".join(
            sorted({name for r in records for name in r.restored_from.split(", ") if name})
        ),
    )
    return RecordRecovery(History((*known, recovery)[-_HISTORY_LENGTH:]))
