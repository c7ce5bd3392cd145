"""Defines the messages between an agent and its workers, and the records that start one.

They travel over a socket pair that only the two processes have: the agent creates it, and the
worker inherits one end. The end of the connection is how either process learns that the other one
is gone.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import msgspec

from keepstep.checkpoint.format.layout.retention import Retention
from keepstep.elastic.rendezvous.records import (
    LoadedCheckpoint,
    ReplicaComparison,
    SnapshotCommit,
)
from keepstep.transport import Codec, Message, Protocol, VersionRange

_MAX_TEXT_CHARACTERS = 2**16


class CommandKind(enum.StrEnum):
    """The way a worker runs its target."""

    SCRIPT = "script"
    """The target is the path of a Python script."""
    MODULE = "module"
    """The target is a module's name, run as `python -m` runs it."""
    PROGRAM = "program"
    """The target is the path of any executable."""


@dataclass(frozen=True, slots=True)
class Command:
    """The command that the user asked to run.

    `preload` are modules that workers import while they warm up.
    """

    kind: CommandKind
    target: str
    arguments: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()

    def encode(self) -> str:
        """Return the command as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Command:
        """Parse a text that `encode` returned."""
        return msgspec.json.decode(text, type=cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One worker's place in one generation.

    Args:
        generation: the generation to enter.
        node: the name of the worker's node.
        rank: the worker's rank in the world.
        world_size: the number of ranks in the world.
        local_rank: the worker's place among the workers of its node.
        local_world_size: the number of workers of its node.
        node_rank: the node's place among the nodes.
        node_count: the number of nodes.
        store_host: where the generation's torch store is served.
        store_port: its port.
        server: the address of the local snapshot server, `unix:PATH`.
        secret: the job's secret, in hexadecimal.
        job: the job's name.
        max_restarts: the failures in a row without progress that the job survives.
        resume: the snapshot to restore; None: the newest stored checkpoint, or the beginning.
        failures_per_s: how often something of the job fails.
    """

    generation: int
    node: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node_count: int
    store_host: str
    store_port: int
    server: str
    secret: str
    job: str
    max_restarts: int
    resume: SnapshotCommit | None = None
    failures_per_s: float = 0.0

    def environment(self) -> Mapping[str, str]:
        """Return the variables that torchrun would set, for scripts that read them."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.node_count),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.store_host,
            "MASTER_PORT": str(self.store_port),
            "TORCHELASTIC_RESTART_COUNT": str(self.generation - 1),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_RUN_ID": self.job,
        }


class Warm(Message, frozen=True, kw_only=True):
    """The worker has imported what a script needs, and can be assigned at once."""


class Joined(Message, frozen=True, kw_only=True):
    """The script has called `keepstep.join`, and so reports its phases and drains by itself.

    The node's record has the fields.

    Args:
        checkpoint_url: where checkpoints are stored; None: nowhere.
        checkpoint_every: steps between them; 0: as often as loses least; None: only the last one.
        checkpoint_compression: how they are compressed; None: not at all.
        checkpoint_retention: which of them are kept; None: all.
        rank_multiple: the world size must be a multiple of this, as the mesh asks.
        max_ranks: the world size may not be greater; 0: any.
        fitting_ranks: which multiples up to that fit, as `RankLimits.fitting` has them; empty: all.
        awaits_abort_order: an aborted collective may leave garbage without an exception, so that
            nobody aborts before all snapshot servers refuse what it leaves.
        restarts_script: the worker ends with each generation, and another one runs the script.
        modules: of installed packages, which the script has imported, for those that come after.
    """

    checkpoint_url: str | None
    checkpoint_every: int | None
    checkpoint_compression: Literal["zstd"] | None = None
    checkpoint_retention: Retention | None = None
    rank_multiple: int = 1
    max_ranks: int = 0
    fitting_ranks: str = ""
    awaits_abort_order: bool = False
    restarts_script: bool = False
    modules: tuple[str, ...] = ()


class Finishing(Message, frozen=True, kw_only=True):
    """The loop has done its last step, `step`, and waits until that is committed and stored."""

    step: int


class Failed(Message, frozen=True, kw_only=True):
    """The script ended with an exception; the process ends next.

    Args:
        error: its type and message, in one line, with the line of the script where no traceback
            follows.
        traceback: the exception as Python shows it; "" where that says no more.
        is_fatal: the cause is in the user's input, so that another attempt would end the same way.
        place: the exception's type, and the line that raised it; "" if the job's surroundings may
            be the cause, so that it may not happen again.
        is_peer: it says that a peer is gone.
    """

    error: str
    traceback: str
    is_fatal: bool = False
    place: str = ""
    is_peer: bool = False


class Exiting(Message, frozen=True, kw_only=True):
    """The script has ended by `sys.exit`; the process ends next.

    `place` is the line that called it.
    """

    status: int
    place: str


class RestartRequested(Message, frozen=True, kw_only=True):
    """Another process must take this one's place; it ends next.

    `is_for_script`: only because the script has to start from its beginning; nothing is wrong.
    """

    reason: str
    is_for_script: bool = False


class GenerationReport(Message, frozen=True, kw_only=True):
    """Base of messages about one generation; they mean nothing in any other."""

    generation: int


class Ready(GenerationReport, frozen=True, kw_only=True):
    """The worker has entered the process group, at `at_s` of the wall clock."""

    at_s: float


class Restored(GenerationReport, frozen=True, kw_only=True):
    """The worker has filled its state.

    Args:
        at_s: when, by the wall clock.
        source: where the state came from, comma-separated.
        step: the step it goes on from.
        loaded: the checkpoint that it has found in storage; only rank 0 sends it, and only if it
            resumed from there.
    """

    at_s: float
    source: str
    step: int
    loaded: LoadedCheckpoint | None = None


class Stepped(GenerationReport, frozen=True, kw_only=True):
    """The worker has completed its first step of the generation, at `at_s` of the wall clock.

    The node is RUNNING once all of its workers have.
    """

    at_s: float


class ReplicasCompared(GenerationReport, frozen=True, kw_only=True):
    """Ranks that hold the same parts of the state were compared; rank 0 reports for all."""

    comparison: ReplicaComparison


class Drained(GenerationReport, frozen=True, kw_only=True):
    """The worker will write nothing more in the generation.

    With `ends` its process ends next, and another one takes its place.
    """

    ends: bool = False


class Broken(GenerationReport, frozen=True, kw_only=True):
    """A collective failed, which may be the fault of any rank: a failure of kind `peer`."""

    error: str


class SnapshotIntervalChosen(GenerationReport, frozen=True, kw_only=True):
    """The worker has chosen to take a snapshot every `every` steps, at `cost_s` seconds each."""

    every: int
    cost_s: float


class ImportModules(Message, frozen=True, kw_only=True):
    """An idle worker imports modules that the script needs, while it waits for its place."""

    modules: tuple[str, ...]


class Assign(Message, frozen=True, kw_only=True):
    """The worker's place in the next generation, which it enters.

    With `serves_store` the listening socket of the generation's torch store rides on the message.

    Args:
        assignment: the place.
        serves_store: the listening socket of the generation's torch store rides on this message,
            and the worker is to serve the store.
    """

    assignment: Assignment
    serves_store: bool


class CloseGeneration(Message, frozen=True, kw_only=True):
    """The generation is over: the worker ends its step, seals, and drains.

    With `aborts` it seals nothing and breaks off its collectives.

    Args:
        generation: which.
        aborts: something broke, so that collectives under way are broken off: at once, or after
            `AbortOrdered` if the worker awaits that.
    """

    generation: int
    aborts: bool


class AbortOrdered(Message, frozen=True, kw_only=True):
    """Collectives of the generation may be aborted: nothing of it is sealed any more."""

    generation: int


class SnapshotCommitted(Message, frozen=True, kw_only=True):
    """The snapshot of `step`, and so of every step before it, is committed: the next may begin."""

    step: int


class Stored(Message, frozen=True, kw_only=True):
    """The checkpoint of `step` is in storage; -1: none is.

    `generation` is the one whose snapshot it is, 0 if an earlier launch has stored it.
    """

    step: int
    generation: int


WorkerMessage: TypeAlias = (
    Warm
    | Joined
    | Finishing
    | Failed
    | Exiting
    | RestartRequested
    | Ready
    | Restored
    | Stepped
    | ReplicasCompared
    | Drained
    | Broken
    | SnapshotIntervalChosen
)
"""Messages that a worker sends."""


class Stop(Message, frozen=True):
    """The agent ends this process; SIGTERM follows, for a script that handles it itself."""


AgentMessage: TypeAlias = (
    ImportModules | Assign | CloseGeneration | AbortOrdered | SnapshotCommitted | Stored | Stop
)
"""Messages that an agent sends."""

PROTOCOL = Protocol(
    name="worker",
    versions=VersionRange(1, 1),  # One keepstep runs both ends.
    requests=Codec[WorkerMessage](*get_args(WorkerMessage)),
    replies=Codec[AgentMessage](*get_args(AgentMessage)),
)
"""Spoken over the socket pair; the worker is the client."""


def sendable(text: str) -> str:
    """Return a text of the user's script as a message can carry it.

    JSON has no lone surrogates (they stand for bytes of file names that are not UTF-8): they are
    escaped. A very long text loses its middle.
    """
    if len(text) > _MAX_TEXT_CHARACTERS:
        half = _MAX_TEXT_CHARACTERS // 2
        omitted = len(text) - 2 * half
        text = f"{text[:half]}\n[... {omitted} characters ...]\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()
