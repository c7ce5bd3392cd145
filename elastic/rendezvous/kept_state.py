"""Decides what of a node's state in memory is left to its next agent, and how that goes on. Pure.

`keepstep.elastic.agent.state_directory` writes and finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.rendezvous.records import NodePhase, NodeRecord, Record, Result
from keepstep.elastic.rendezvous.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """How long an agent's state is kept for the next agent of its node, and how that one finds it.

    Attributes:
        keep_s: for how long; 0: it ends with its agent.
        place: names the job and the node.
        line: digest of what else has to be equal, such as the script's arguments.
    """

    keep_s: float = 0.0
    place: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState(Record):
    """The document that an agent leaves to the next one of its node, with its snapshot server.

    Attributes:
        place, line: as in `Keeping`.
        job: the job's name.
        secret: of this run of the job, in hexadecimal.
        record: the node's.
        view: the newest one that had a generation, without other nodes.
        may_restore: no other node can have gone on since without the coordinator's holding it.
    """

    place: str
    line: str
    job: str
    secret: str
    record: NodeRecord
    view: View
    may_restore: bool


def choose_state(states: Sequence[KeptState], keeping: Keeping) -> tuple[int | None, str]:
    """Return which of a place's states to go on from, and why the others are dropped.

    Args:
        states: what agents that are gone have left.
        keeping: of the agent that chooses.
    """
    if not keeping.keep_s:
        return None, "--keep-state is 0"
    equal = [number for number, state in enumerate(states) if state.line == keeping.line]
    if len(equal) > 1:
        return None, f"{len(equal)} runs of this line have left one; give each run a --job name"
    return (equal[0] if equal else None), "it is of another command line"


def is_kept(result: Result | None, view: View, node: str) -> bool:
    """Whether the state of a node that leaves its job is of use to its next agent.

    It is not if the job has succeeded, or goes on without the node.

    Args:
        result: the job's; None: it has none.
        view: the job, as the node sees it.
        node: the node's name.
    """
    if result is not None:
        return not result.succeeded
    return view.generation is not None and view.generation.member(node) is not None


def view_to_keep(view: View) -> View:
    """Return a view without what concerns other nodes, or nobody after a restart."""
    return replace(
        view, nodes={}, restarts={}, leadership=None, verdicts=None, unreadable={}, gone=frozenset()
    )


def view_to_go_on(view: View) -> View:
    """Return a kept view for the next agent: failures count from 0 again."""
    assert view.generation is not None, "without a generation nothing is kept"
    generation = replace(view.generation, failures=0, failing_node="", last_error="")
    return replace(view, generation=generation)


def record_to_go_on(
    own: NodeRecord,
    kept: NodeRecord,
    server: str,
    sealed: tuple[SnapshotId, ...],
    protected: tuple[SnapshotId, ...],
    committed: SnapshotId,
) -> NodeRecord:
    """Return the record of an agent that goes on with a server that another one has left.

    Args:
        own: the record of an agent that begins.
        kept: the last one of the agent before.
        server: the server's address.
        sealed: what it holds.
        protected: that of it whose parity is complete.
        committed: the newest snapshot that the server knows as committed.
    """
    is_of_generation = committed.generation == kept.generation and committed.step >= 0
    return replace(
        own,
        server=server,
        generation=kept.generation,
        phase=NodePhase.DRAINED,
        step=kept.step,
        sealed=sealed,
        protected=protected,
        committed=committed if is_of_generation else None,
        fenced=kept.generation,
    )


def is_news(written: KeptState, kept: KeptState) -> bool:
    """Whether the next agent would go on otherwise.

    What is committed within a generation is not among it: the server knows that.
    """
    names = ("secret", "generation", "checkpoint", "scale", "pause", "result")

    def essence(state: KeptState) -> tuple[object, ...]:
        revisions = tuple(state.view.revisions.get(name) for name in names)
        return revisions, state.view.evictions, state.record.generation

    return essence(written) != essence(kept)
