"""Plays one seed: runs the job, injects faults until the time is over, and judges the outcome.

Before each fault the job has all nodes, makes steps and has committed one of them. After it the job
must make steps again: the campaign waits for that, and records the time. In the end all nodes are
preempted and return, and the job finishes its last steps. Then nothing of it may be left.
"""

from __future__ import annotations

import json
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from examples.local_cluster import LocalCluster
from keepstep.elastic.rendezvous.records import NodePhase
from ops.bench.chaos import leftovers
from ops.bench.chaos.cluster import JOB, NAMES, WORKER, ChaosCluster
from ops.bench.chaos.faults import Harm, Injected
from ops.bench.chaos.machine import abilities
from ops.bench.chaos.oracle import Floor, GenerationEntry, Judgement, entries, judge, parse_lines
from ops.bench.chaos.progress import NoProgress, Patience, Records, Watcher
from ops.bench.chaos.schedule import KINDS, Fault, Part, Promise, draw, left_out, plan, possible

_LAST_STEPS = 10
_NOT_HELD = 2
"""Recorded steps that no node may hold: the newest, whose end is not known, and the one before,
whose state is being copied."""
_TERMINATED = 128 + signal.SIGTERM
_EXCERPT = 2500
_MANY = 20


class JobEnded(Exception):
    """All agents ended before the end of the job."""


@dataclass(slots=True)
class Outcome:
    """The outcome of one seed's job."""

    seed: int
    minutes: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    left_out: Mapping[str, str] = field(default_factory=dict)
    recovery_s: list[float] = field(default_factory=list)
    judgement: Judgement | None = None
    leftovers: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether anything was wrong."""
        return (
            bool(self.leftovers or self.unexplained)
            or self.judgement is None
            or bool(self.judgement.wrong)
        )

    def complaints(self) -> list[str]:
        """Return everything that was wrong; only the first of many things."""
        wrong = self.judgement.wrong if self.judgement is not None else []
        return [*wrong[:_MANY], *self.leftovers[:_MANY], *self.unexplained]

    def summary(self) -> dict[str, object]:
        """Return it as a JSON object."""
        judgement = self.judgement or Judgement()
        return {
            "seed": self.seed,
            "minutes": round(self.minutes, 1),
            "faults": dict(sorted(self.faults.items())),
            "left_out": dict(self.left_out),
            "recoveries": len(self.recovery_s),
            "recovery_s": {
                "median": round(statistics.median(self.recovery_s), 1) if self.recovery_s else None,
                "worst": round(max(self.recovery_s), 1) if self.recovery_s else None,
            },
            "lost_samples": judgement.lost_samples,
            "repeated_samples": judgement.repeated_samples,
            "loss_equal": self.judgement is not None and judgement.losses_are_equal,
            "losses": {"bit_equal": judgement.equal_losses, "close": judgement.close_losses},
            "leftovers": len(self.leftovers),
            "unexplained": self.complaints(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A campaign's length, and the faults that it may draw.

    Args:
        minutes: of faults; the start, the end and the undisturbed run come in addition.
        faults: how many at most; None for any number.
        kinds: names of the kinds to draw from; none: all.
        lease_ttl_s: as for `keepstep run --lease-ttl`.
    """

    minutes: float
    faults: int | None = None
    kinds: Collection[str] = ()
    lease_ttl_s: float = 5.0


def play(
    seed: int, limits: Limits, directory: Path, *, isolated: bool, console: Console
) -> Outcome:
    """Run the job of a seed in a directory, and return the outcome."""
    job_plan = plan(seed)
    permitted = abilities(isolated=isolated, has_objects=job_plan.has_objects)
    outcome = Outcome(seed, left_out=left_out(permitted, limits.kinds))
    faults = draw(seed, possible(permitted, limits.kinds))
    console.print(f"seed {seed}: {job_plan}; logs in {directory}")
    with (
        ChaosCluster(directory, job_plan, permitted, limits.lease_ttl_s) as cluster,
        Watcher(cluster.url, JOB) as watcher,
    ):
        campaign = _Campaign(cluster, watcher, outcome, console)
        begun_s = time.monotonic()
        last_step = 0
        try:
            campaign.start()
            begun_s = time.monotonic()
            for fault in faults:
                is_over = time.monotonic() > begun_s + 60 * limits.minutes
                if is_over or fault.number == limits.faults:
                    break
                campaign.suffer(fault)
            last_step = campaign.finish()
            outcome.leftovers += campaign.leftovers(owns_shared_memory=isolated)
        except (JobEnded, NoProgress) as error:
            outcome.unexplained.append(f"{error}\n{cluster.output()[-_EXCERPT * 3 :]}")
        outcome.minutes = (time.monotonic() - begun_s) / 60
        outcome.unexplained += watcher.went_back
    agents, monitors = (sorted(directory.glob(f"{of}/*.log")) for of in ("agents", "monitors"))
    outcome.unexplained += leftovers.complaints([*agents, *monitors])
    outcome.unexplained += leftovers.untold(agents)
    if last_step:
        undisturbed = run_undisturbed(directory, seed, last_step)
        history = entries(campaign.records.read())
        outcome.judgement = judge(history, undisturbed, campaign.floors, last_step)
    promises = [f"{floor.at_s:.1f} s: {floor.step}, {floor.why}" for floor in campaign.floors]
    (directory / "promises.txt").write_text("\n".join(promises))
    return outcome


def run_undisturbed(directory: Path, seed: int, steps: int) -> GenerationEntry:
    """Run the same job on one node without a fault."""
    job_plan = plan(seed)
    records = directory / "undisturbed"
    records.mkdir()
    options = {"log": str(records), "steps": steps, "pace_s": 0.0, "dropout": job_plan.dropout}
    command = [str(WORKER), json.dumps(options)]
    with LocalCluster(
        "undisturbed", command, nnodes="1:1", workers=job_plan.world_size, log=directory / "log"
    ) as cluster:
        cluster.start("a")
        status = cluster.wait("a", 3600)
        if status:
            raise RuntimeError(f"the undisturbed run ended with {status}:\n{cluster.output()}")
    lines = parse_lines(
        text
        for path in records.glob("rank-*.jsonl")
        for text in path.read_text().splitlines(keepends=True)
    )
    (entry,) = entries(lines)
    return entry


class _Campaign:
    """The job while it runs."""

    def __init__(
        self, cluster: ChaosCluster, watcher: Watcher, outcome: Outcome, console: Console
    ) -> None:
        self._cluster, self._watcher = cluster, watcher
        self._outcome, self._console = outcome, console
        self._patience = Patience()
        self._harm = Harm(cluster, watcher, self._patience)
        self.records = Records(cluster.records)
        self.floors: list[Floor] = []
        self._leaving: set[str] = set()
        self._starved: set[str] = set()
        """Nodes that lack memory, where the kernel may kill any process."""
        self._fault = "the start"

    def start(self) -> None:
        """Start the job and wait until it makes steps."""
        coordinator = self._cluster.coordinator
        self._patience.wait_until(
            "etcd serves", lambda: all(map(coordinator.is_healthy, coordinator.members))
        )
        for node in NAMES:
            self._cluster.start(node)
        took_s = self._wait("the job makes steps", self._is_at_full_strength)
        self._patience.measured(took_s)
        for node in NAMES:
            self._cluster.start_monitor(node)
        self._console.print(f"started within {took_s:.0f} s")

    def suffer(self, fault: Fault) -> None:
        """Let a fault happen, and wait until the job has all nodes and makes steps again."""
        self._settle()
        self._let_pass(fault.calm_s)
        self._fault = str(fault)
        parts = [fault, fault.second] if fault.second is not None else [fault]
        self._outcome.faults.update(part.kind for part in parts)
        self._starved = {NAMES[part.node] for part in parts if part.kind == "memory_pressure"}
        ends_generation = any(KINDS[part.kind].ends_generation for part in parts)
        entry_ns = self.records.newest_entry_ns() if ends_generation else 0
        self.floors.append(self._floor(fault))
        begun_s = time.monotonic()
        injected = self._harm.inject(fault)
        if injected.stored_floor is not None:
            self.floors[-1] = Floor(begun_s, injected.stored_floor, fault.promise)
        ends = [injected.end]
        if fault.second is not None:
            self._let_pass(fault.then_after_s)
            ends.append(self._harm.inject(fault.second).end)
        self._let_pass(max(fault.seconds, fault.then_seconds))
        self._leave(injected)
        is_momentary = not fault.seconds and not fault.then_seconds
        if ends_generation and is_momentary and fault.strength < 0.5:
            self._goes_on_without(entry_ns, begun_s)
        for end in ends:
            end()
        recovered_s = self._recovered(fault, parts, begun_s, entry_ns)
        self._outcome.recovery_s.append(recovered_s)
        self._console.print(f"{fault.number:3} {fault}: {recovered_s:.1f} s", highlight=False)
        for note in self._harm.notes:
            self._console.print(f"    {note}", highlight=False)
        self._harm.notes.clear()

    def finish(self) -> int:
        """Preempt all nodes, let them return and end the job; return its last step."""
        self._settle()
        self._fault = "the end: all nodes are preempted, return and finish"
        self.floors.append(Floor(time.monotonic(), None, Promise.NOTHING_LOST))
        for node in NAMES:
            self._cluster.terminate(node)
        self._leave(Injected(leaving=NAMES))
        self._cluster.steps = self.records.last_step() + _LAST_STEPS
        # Nodes with other options than those that are present are refused.
        self._wait("no node is a member", lambda: not self._watcher.view.nodes)
        for node in NAMES:
            self._cluster.start(node)
        self._leaving = set(NAMES)
        self._wait("all agents end", lambda: not self._running_agents())
        for node, agent in self._cluster.agents.items():
            if agent.returncode:
                self._complain(f"agent {node} ended with {agent.returncode} when the job was done")
        self._cluster.end_monitors()
        return self._cluster.steps

    def leftovers(self, *, owns_shared_memory: bool) -> list[str]:
        """Return the job's leftovers; its helper processes may take a while to end."""
        members = self._cluster.coordinator.processes()

        def remaining() -> list[str]:
            marked = self._cluster.marked_processes()
            return leftovers.find(
                processes=[process for process in marked if process.pid not in members],
                runtime=self._cluster.runtime, owns_shared_memory=owns_shared_memory,
                url=self._cluster.url, job=JOB, storage_url=self._cluster.storage.url,
            )  # fmt: skip

        try:
            self._patience.wait_until("nothing is left", lambda: not remaining())
        except NoProgress:
            return remaining()
        return []

    def _floor(self, fault: Fault) -> Floor:
        at_s = time.monotonic()
        if fault.promise is Promise.NOTHING_LOST:
            return Floor(at_s, None, fault.promise)
        if fault.promise is Promise.HELD:
            return Floor(at_s, None, fault.promise, _NOT_HELD)
        if fault.promise is Promise.COMMITTED:
            return Floor(at_s, self._watcher.committed(), fault.promise)
        checkpoint = self._watcher.view.checkpoint
        return Floor(at_s, checkpoint.step if checkpoint else 0, fault.promise)

    def _leave(self, injected: Injected) -> None:
        """Wait until preempted agents have ended, as they were asked to."""
        self._leaving = set(injected.leaving)
        self._wait(
            f"agents of {', '.join(injected.leaving)} leave",
            lambda: not self._leaving.intersection(self._running_agents()),
        )
        for node in injected.leaving:
            agent = self._cluster.agents[node]
            if agent.returncode != _TERMINATED:
                self._complain(f"preempted agent {node} ended with {agent.returncode}")
            del self._cluster.agents[node]
        self._leaving = set()

    def _goes_on_without(self, entry_ns: int, begun_s: float) -> None:
        """Let the job go on without the node that it has lost, where it can."""
        if self._cluster.plan.is_elastic and self._running_agents():
            self._wait(
                "the others go on", lambda: self.records.completed_at(begun_s, entry_ns)[0] > 0
            )

    def _recovered(self, fault: Fault, parts: list[Fault], begun_s: float, entry_ns: int) -> float:
        """Wait for steps; return the longest time without one since the fault began.

        A fault that lasts is over by now, so that steps before its end do not count.
        """
        longest_s = max(fault.seconds, fault.then_seconds)
        after_s = time.monotonic() if longest_s else begun_s
        allowance_s = 2 * longest_s
        self._wait(
            "the job makes steps again",
            lambda: self.records.completed_at(after_s, entry_ns)[0] > 0,
            beyond_s=allowance_s,
        )
        if any(KINDS[part.kind].part is Part.STORAGE for part in parts):
            step = self.records.last_step()
            self._wait(
                "a checkpoint is stored again",
                lambda: (
                    (checkpoint := self._watcher.view.checkpoint) is not None
                    and checkpoint.step > step
                ),
                beyond_s=10 * allowance_s,
            )
        return self.records.longest_stall_s(begun_s)

    def _settle(self) -> None:
        """Wait until the job has all nodes, makes steps and commits them."""
        committed = self.records.last_step()
        self._wait(
            "the job has all nodes and commits steps",
            lambda: (
                self._is_at_full_strength()
                # A crashed job may have gone back, and then begins to commit below.
                and self._watcher.committed() >= min(committed, self.records.last_step()) + 1
            ),
            beyond_s=60.0,
        )

    def _is_at_full_strength(self) -> bool:
        view = self._watcher.view
        step, world_size = self.records.completed_at(0.0, 0)
        return (
            step > 1
            and world_size == self._cluster.plan.world_size
            and view.generation is not None
            and view.generation.world_size == world_size
            and not view.is_closing
            and set(view.nodes) == set(NAMES)
            and all(joined.record.phase is NodePhase.RUNNING for joined in view.nodes.values())
            and view.snapshot is not None
            and view.snapshot.snapshot.generation == view.generation_number
        )

    def _let_pass(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while (rest_s := until_s - time.monotonic()) > 0:
            self._look_after_agents()
            time.sleep(min(0.2, rest_s))

    def _wait(self, what: str, condition: Callable[[], bool], *, beyond_s: float = 0.0) -> float:
        def holds() -> bool:
            self._look_after_agents()
            return condition()

        return self._patience.wait_until(f"{what} ({self._fault})", holds, beyond_s=beyond_s)

    def _running_agents(self) -> list[str]:
        return [node for node, agent in self._cluster.agents.items() if agent.poll() is None]

    def _look_after_agents(self) -> None:
        """Restart agents that have ended by mistake."""
        ended = [
            node
            for node, agent in self._cluster.agents.items()
            if agent.poll() is not None and node not in self._leaving
        ]
        for node in ended:
            status = self._cluster.agents[node].returncode
            if node in self._starved and status == -signal.SIGKILL:
                continue  # The kernel has chosen the agent.
            log = self._cluster.directory / "agents" / f"{node}.log"
            self._complain(f"agent {node} ended with {status}", log)
        if ended and not self._running_agents():
            raise JobEnded(f"all agents have ended ({self._fault})")
        for node in ended:
            self._cluster.start(node)

    def _complain(self, what: str, log: Path | None = None) -> None:
        excerpt = f"\n{log.read_text(errors='replace')[-_EXCERPT:]}" if log is not None else ""
        self._console.print(f"    {what}", style="red", highlight=False)
        self._outcome.unexplained.append(f"{what} ({self._fault}){excerpt}")
