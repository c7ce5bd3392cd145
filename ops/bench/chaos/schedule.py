"""Draws a job and the faults that happen to it. Pure: a function of the seed and of `Ability`.

A fault is described by numbers between 0 and the number of nodes; what they mean for the running
job is decided in `faults`. The n-th fault depends on the seed and on the kinds that are possible,
and on nothing that happens while the campaign runs.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

NODES = 3


class Ability(enum.StrEnum):
    """A requirement of a kind of fault; the value names what the machine lacks without it."""

    NETWORK = "network namespaces and TUN devices (root, /dev/net/tun, ip)"
    FILE_SYSTEM = "mounts of loop devices in a mount namespace of its own (root, mkfs.ext4)"
    FILES = "storage in files: this seed has object storage"
    OBJECTS = "object storage: this seed has storage in files"
    MEMORY_GROUP = "a writable memory control group (root, cgroup v1)"


class Part(enum.StrEnum):
    """The part that a fault harms. Two faults at once harm different parts, or different nodes."""

    NODES = "nodes"
    MONITOR = "monitor"
    COORDINATOR = "coordinator"
    NETWORK = "network"
    STORAGE = "storage"


class Promise(enum.StrEnum):
    """The promise of docs/recovery.md about the step that the job resumes from."""

    NOTHING_LOST = "every completed step"
    HELD = "the newest snapshot that nodes hold, whatever the coordinator knows"
    COMMITTED = "the committed snapshot"
    STORED = "the newest stored checkpoint"
    OLDER_STORED = "the newest stored checkpoint that is intact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fault.

    Args:
        name: its name in reports.
        promise: what the job resumes from, if it resumes.
        part: what it harms; a new checkpoint shows the recovery of storage.
        needs: what must be possible.
        seconds: least and greatest duration; None if it is a moment.
        ends_generation: whether a new generation always follows.
        takes_memory: whether snapshots on its node may be gone, so that another such fault on
            another node exceeds what parity covers.
        overlaps: whether another fault may happen while the job recovers from it.
    """

    name: str
    part: Part = Part.NODES
    promise: Promise = Promise.COMMITTED
    needs: tuple[Ability, ...] = ()
    seconds: tuple[float, float] | None = None
    ends_generation: bool = False
    takes_memory: bool = False
    overlaps: bool = True


_NETWORK = (Ability.NETWORK,)
_DISK = (Ability.FILES, Ability.FILE_SYSTEM)
_OBJECTS = (Ability.OBJECTS,)
KINDS = {
    kind.name: kind
    for kind in (
        Kind(name="worker_kill", ends_generation=True),
        Kind(name="two_workers_kill", ends_generation=True),
        Kind(name="worker_stop", seconds=(2, 12)),
        Kind(name="agent_kill", ends_generation=True, takes_memory=True),
        Kind(name="agent_stop", seconds=(2, 15), takes_memory=True),
        Kind(name="node_kill", ends_generation=True, takes_memory=True),
        Kind(name="node_stop", seconds=(2, 15), takes_memory=True),
        Kind(name="snapshot_server_kill", ends_generation=True, takes_memory=True),
        Kind(name="snapshot_server_stop", seconds=(2, 15), takes_memory=True),
        # The kernel chooses what it kills: a worker, a spare process, or even the agent.
        Kind(name="memory_pressure", needs=(Ability.MEMORY_GROUP,), seconds=(3, 10),
             takes_memory=True),
        Kind(name="monitor_kill", part=Part.MONITOR),
        Kind(name="monitor_stop", part=Part.MONITOR, seconds=(2, 10)),
        Kind(name="member_kill", part=Part.COORDINATOR, seconds=(1, 15)),
        Kind(name="member_stop", part=Part.COORDINATOR, seconds=(1, 15)),
        Kind(name="coordinator_away", part=Part.COORDINATOR, promise=Promise.HELD, seconds=(3, 30)),
        Kind(name="coordinator_stop", part=Part.COORDINATOR, promise=Promise.HELD, seconds=(3, 30)),
        Kind(name="coordinator_lost", part=Part.COORDINATOR, promise=Promise.HELD, seconds=(1, 30)),
        Kind(name="member_cut", part=Part.NETWORK, needs=_NETWORK, seconds=(2, 15)),
        Kind(name="coordinator_cut", part=Part.NETWORK, needs=_NETWORK, seconds=(2, 15),
             takes_memory=True),
        Kind(name="coordinator_unreachable", part=Part.NETWORK, promise=Promise.HELD,
             needs=_NETWORK, seconds=(2, 30)),
        Kind(name="requests_lost", part=Part.NETWORK, promise=Promise.HELD, needs=_NETWORK,
             seconds=(2, 30)),
        Kind(name="answers_lost", part=Part.NETWORK, promise=Promise.HELD, needs=_NETWORK,
             seconds=(2, 30)),
        Kind(name="node_cut", part=Part.NETWORK, needs=_NETWORK, seconds=(2, 15),
             takes_memory=True),
        Kind(name="link_cut", part=Part.NETWORK, needs=_NETWORK, seconds=(2, 12),
             takes_memory=True),
        Kind(name="link_cut_one_way", part=Part.NETWORK, needs=_NETWORK, seconds=(2, 12),
             takes_memory=True),
        Kind(name="link_delay", part=Part.NETWORK, needs=_NETWORK, seconds=(2, 12)),
        Kind(name="link_loss", part=Part.NETWORK, needs=_NETWORK, seconds=(2, 12)),
        Kind(name="disk_full", part=Part.STORAGE, needs=_DISK, seconds=(2, 10)),
        Kind(name="disk_read_only", part=Part.STORAGE, needs=_DISK, seconds=(2, 10)),
        Kind(name="disk_stall", part=Part.STORAGE, needs=_DISK, seconds=(2, 10)),
        Kind(name="objects_refused", part=Part.STORAGE, needs=_OBJECTS, seconds=(2, 10)),
        Kind(name="objects_stall", part=Part.STORAGE, needs=_OBJECTS, seconds=(2, 15)),
        Kind(name="objects_slow", part=Part.STORAGE, needs=_OBJECTS, seconds=(2, 15)),
        Kind(name="objects_torn", part=Part.STORAGE, needs=_OBJECTS, seconds=(2, 15)),
        Kind(name="node_term", promise=Promise.NOTHING_LOST, ends_generation=True, overlaps=False),
        Kind(name="all_term", promise=Promise.NOTHING_LOST, ends_generation=True, overlaps=False),
        Kind(name="node_group_term", promise=Promise.NOTHING_LOST, ends_generation=True,
             overlaps=False),
        Kind(name="all_group_term", promise=Promise.NOTHING_LOST, ends_generation=True,
             overlaps=False),
        Kind(name="join_in_recovery", ends_generation=True, takes_memory=True, overlaps=False),
        Kind(name="job_crash", promise=Promise.STORED, ends_generation=True, overlaps=False),
        Kind(name="job_and_coordinator_crash", promise=Promise.STORED, ends_generation=True,
             overlaps=False),
        Kind(name="checkpoint_damaged", promise=Promise.OLDER_STORED, ends_generation=True,
             overlaps=False),
    )
}  # fmt: skip

NOT_BUILT = {
    "clock_jump": "libfaketime is absent, and the machine's own clock is not ours to set",
    "disk_slow": "neither device-mapper's delay target nor FUSE; objects_slow has slow storage",
}

_OVERLAP = 0.4
_CALM_S = 6.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        number: its place in the schedule, from 0.
        kind: name of its kind.
        node: the node that it happens to, or whose link or etcd member has it.
        other: another node, for faults of two.
        seconds: how long it lasts; 0 for a moment.
        strength: between 0 and 1: how much is delayed or lost, which object is damaged.
        then: kind of a second fault on `other` while the job recovers from the first; "" for none.
        then_seconds: how long the second fault lasts; 0 for a moment.
        then_after_s: how long after the first fault the second one happens.
        calm_s: how long the job goes on undisturbed before the fault.
    """

    number: int
    kind: str
    node: int
    other: int
    seconds: float
    strength: float
    then: str = ""
    then_seconds: float = 0.0
    then_after_s: float = 0.0
    calm_s: float = 0.0

    @property
    def second(self) -> Fault | None:
        """The second fault by itself, if there is one."""
        if not self.then:
            return None
        return Fault(
            self.number, self.then, self.other, self.node, self.then_seconds, self.strength
        )

    @property
    def promise(self) -> Promise:
        """The least step that the job resumes from."""
        first = KINDS[self.kind]
        if self.then and first.takes_memory and KINDS[self.then].takes_memory:
            return Promise.STORED
        # Another fault may strike before all members protect what was computed last.
        return Promise.COMMITTED if self.then and first.promise is Promise.HELD else first.promise

    def __str__(self) -> str:
        duration = f" for {self.seconds:.0f} s" if self.seconds else ""
        second = f", then {self.second}" if self.second else ""
        return f"{self.kind} on {self.node}{duration}{second}"


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The job of one seed.

    Attributes:
        is_elastic: the job goes on with fewer nodes; else it waits until all are back, and so has
            one world size from its first step to its last.
        has_objects: checkpoints lie in object storage, else in files.
        workers: workers of each node.
        spares: warm processes of each node.
        checkpoint_every: steps between checkpoints.
    """

    is_elastic: bool
    has_objects: bool
    workers: int
    spares: int
    checkpoint_every: int

    @property
    def nnodes(self) -> str:
        """As for `keepstep run --nnodes`."""
        return f"{1 if self.is_elastic else NODES}:{NODES}"

    @property
    def dropout(self) -> float:
        """The model's dropout. Another world size drops other values, which changes losses."""
        return 0.0 if self.is_elastic else 0.1

    @property
    def world_size(self) -> int:
        """Number of ranks at full strength."""
        return NODES * self.workers


def plan(seed: int) -> JobPlan:
    """Draw the job. Neighbouring seeds differ in storage and in elasticity."""
    rng = random.Random(f"plan {seed}")
    return JobPlan(
        is_elastic=seed % 2 == 0,
        has_objects=seed // 2 % 2 == 0,
        workers=1 if rng.random() < 0.75 else 2,
        spares=rng.choice([0, 1]),
        checkpoint_every=rng.choice([20, 40]),
    )


def possible(abilities: Collection[Ability], kinds: Collection[str] = ()) -> list[Kind]:
    """Return the kinds that can be drawn: those asked for (none: all) that have what they need."""
    return [
        kind
        for kind in KINDS.values()
        if (not kinds or kind.name in kinds) and all(need in abilities for need in kind.needs)
    ]


def left_out(abilities: Collection[Ability], kinds: Collection[str] = ()) -> dict[str, str]:
    """Return the kinds that cannot be drawn, and why."""
    return {
        kind.name: next(f"needs {need}" for need in kind.needs if need not in abilities)
        for kind in KINDS.values()
        if (not kinds or kind.name in kinds) and not all(need in abilities for need in kind.needs)
    } | ({} if kinds else NOT_BUILT)


def draw(seed: int, kinds: Collection[Kind]) -> Iterator[Fault]:
    """Yield faults without end. Every kind comes once before any comes again."""
    rng = random.Random(f"faults {seed}")
    number = 0
    while True:
        for kind in rng.sample(list(kinds), len(kinds)):
            node, other = rng.sample(range(NODES), 2)
            seconds = _draw_seconds(rng, kind)
            strength = rng.random()
            candidates = [second for second in kinds if _can_overlap(kind, second)]
            second = rng.choice(candidates) if candidates else None
            if rng.random() >= _OVERLAP:
                second = None
            yield Fault(
                number, kind.name, node, other, seconds, strength,
                then=second.name if second else "",
                then_seconds=_draw_seconds(rng, second) if second else 0.0,
                then_after_s=round(rng.uniform(0.0, 4.0), 1) if second else 0.0,
                calm_s=round(rng.uniform(0.0, _CALM_S), 1),
            )  # fmt: skip
            number += 1


def _draw_seconds(rng: random.Random, kind: Kind) -> float:
    return round(rng.uniform(*kind.seconds), 1) if kind.seconds else 0.0


def _can_overlap(first: Kind, second: Kind) -> bool:
    is_elsewhere = first.part is not second.part or first.part is Part.NODES
    return first.overlaps and second.overlaps and is_elsewhere
