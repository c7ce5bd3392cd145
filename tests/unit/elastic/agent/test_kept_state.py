"""Claims about what an agent leaves to the next one of its node, and which of it that one takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.agent.state_directory import CONTROL_SOCKET, StateDirectory, hold_states
from keepstep.elastic.rendezvous.kept_state import (
    Keeping,
    KeptState,
    choose_state,
    is_kept,
    is_news,
    record_to_go_on,
    view_to_go_on,
    view_to_keep,
)
from keepstep.elastic.rendezvous.placements import place
from keepstep.elastic.rendezvous.records import Generation, Member, NodePhase, Result
from keepstep.elastic.rendezvous.view import JoinedNode, View
from keepstep.transport import listen
from tests.unit.elastic.node_records import record_of

MEMBERS = (Member("a", "h", 2, 0, "h:1", "tcp:h:2"), Member("b", "h", 2, 2, "h:3", "tcp:h:4"))
PLACEMENT, _ = place(MEMBERS)
VIEW = View(
    revision=90,
    nodes={"b": JoinedNode(replace(record_of(), node="b"), 4)},
    generation=Generation(3, MEMBERS, "h", 5, "start", failures=2, last_error="ValueError at t.py"),
    secret=b"ab" * 32,
    placements={3: PLACEMENT},
    members={3: MEMBERS},
    chunks={PLACEMENT.chunks[0]: (("a", "h", 2, "h:1", "tcp:h:2", ""),)},
    revisions={"secret": 2, "generation": 80},
)
KEPT = KeptState(
    place="here",
    line="1",
    job="job",
    secret="ab" * 32,
    record=record_of(sealed=(SnapshotId(3, 41),)),
    view=view_to_keep(VIEW),
    may_restore=True,
)


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "keepstep"


def test_what_is_left_is_read_as_it_was_written_without_other_nodes() -> None:
    assert KeptState.decode(KEPT.encode()) == KEPT
    assert KEPT.view.nodes == {}
    assert KEPT.view.generation == VIEW.generation


@pytest.mark.parametrize("name", ["secret", "generation", "checkpoint", "scale", "pause", "result"])
def test_what_changes_how_the_next_agent_goes_on_is_written(name: str) -> None:
    for revision in (1, 99):
        changed = replace(KEPT.view, revisions={**KEPT.view.revisions, name: revision})
        assert is_news(KEPT, replace(KEPT, view=changed))
        assert is_news(replace(KEPT, view=changed), KEPT)
    assert is_news(KEPT, replace(KEPT, record=replace(KEPT.record, generation=4)))
    assert not is_news(KEPT, KEPT)
    # Nothing is written for each snapshot.
    later = replace(KEPT.record, step=42, sealed=(SnapshotId(3, 42),))
    assert not is_news(KEPT, replace(KEPT, record=later))


def test_what_cannot_be_written_leaves_nothing_older(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next agent would go back to a generation that the server has left behind."""
    directory = StateDirectory.create()
    directory.write(KEPT)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("keepstep.elastic.agent.state_directory.write_file", refuse)
    with pytest.raises(OSError, match="No space left"):
        directory.write(replace(KEPT, line="2"))
    with pytest.raises(FileNotFoundError):
        directory.read()
    directory.remove()


def test_state_is_held_by_one_agent_at_a_time_and_found_by_its_place(runtime: Path) -> None:
    own = StateDirectory.create()
    own.write(KEPT)
    with listen(f"unix:{own.path / CONTROL_SOCKET}"):
        assert hold_states("here") == ()  # Its agent lives.
        own.release()
        assert hold_states("elsewhere") == ()
        (found,) = hold_states("here")
        assert found.read() == KEPT
        assert hold_states("here") == ()  # The next agent lives.
        found.release()
    # Its server is dead.
    assert hold_states("here") == ()
    assert list(runtime.glob("state-*")) == []


@pytest.mark.parametrize(
    ("lines", "keep_s", "chosen", "why"),
    [
        ((), 60.0, None, "another command line"),
        (("1",), 60.0, 0, "another command line"),
        (("2", "1"), 60.0, 1, "another command line"),
        (("2",), 60.0, None, "another command line"),
        (("1",), 0.0, None, "--keep-state is 0"),
        (("1", "1"), 60.0, None, "2 runs of this line"),
    ],
)
def test_state_is_chosen_that_is_certainly_of_the_same_run(
    lines: tuple[str, ...], keep_s: float, chosen: int | None, why: str
) -> None:
    states = [replace(KEPT, line=line) for line in lines]
    found, reason = choose_state(states, Keeping(keep_s=keep_s, place="here", line="1"))
    assert found == chosen
    assert why in reason


def test_state_is_kept_unless_the_job_has_succeeded_or_goes_on_elsewhere() -> None:
    assert is_kept(Result(False, "it raised"), VIEW, "a")
    assert not is_kept(Result(True, "done"), VIEW, "a")
    # The last node leaves, with others that leave: none of them has it.
    assert is_kept(None, VIEW, "a")
    assert not is_kept(None, VIEW, "c")
    assert not is_kept(None, View(), "a")


def test_failures_count_from_0_and_the_record_is_that_of_a_drained_member() -> None:
    generation = view_to_go_on(KEPT.view).generation
    assert generation is not None
    assert (generation.failures, generation.last_error) == (0, "")
    held = (SnapshotId(3, 41), SnapshotId(3, 42))
    kept = replace(KEPT.record, generation=3, agent="h:old")
    record = record_to_go_on(record_of(), kept, "tcp:h:9", held, held[:1], held[0])
    assert (record.generation, record.phase) == (3, NodePhase.DRAINED)
    assert (record.sealed, record.protected, record.committed) == (held, held[:1], held[0])
    assert (record.server, record.agent, record.failure) == ("tcp:h:9", record_of().agent, None)
    of_before = record_to_go_on(record_of(), kept, "tcp:h:9", held, (), SnapshotId(2, 40))
    assert of_before.committed is None
