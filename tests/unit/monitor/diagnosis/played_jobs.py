"""Plays jobs over time: records, samples of processes, diagnosis, and the policy at its boldest.

A job is described by what its ranks do in each step. `play` reads, diagnoses and decides once a
second, as a daemon does with `--act replace`, and returns what the policy did.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from keepstep.monitor.diagnosis.conclusion import NO_DIAGNOSIS_STATE, DiagnosisState, diagnose
from keepstep.monitor.diagnosis.metrics import NodeMetrics, ProcessSample
from keepstep.monitor.diagnosis.policy import (
    ActionKind,
    EnforcementAction,
    EnforcementPolicy,
    EnforcementState,
    Mode,
    decide,
)
from keepstep.monitor.diagnosis.thresholds import Thresholds
from keepstep.monitor.records import Operation, Phase
from keepstep.monitor.verdicts import Verdict
from tests.unit.monitor.diagnosis.trace_text import Recording, Trace

SAMPLE_EVERY_S = 5.0
FOREVER_S = 1e6

Seconds = Callable[[int, int], float]
"""Seconds of a rank in a step."""


def none(_rank: int, _step: int) -> float:
    return 0.0


@dataclass
class Played:
    """The outcome of a job.

    Args:
        readings: the time of each, and the verdicts that held.
        actions: the time of each action of the policy.
        state: of diagnosis at the end.
    """

    readings: list[tuple[float, tuple[Verdict, ...]]] = field(default_factory=list)
    actions: list[tuple[float, EnforcementAction]] = field(default_factory=list)
    state: DiagnosisState = NO_DIAGNOSIS_STATE

    @property
    def alerts(self) -> list[str]:
        return [str(action) for _, action in self.actions if action.kind is ActionKind.ALERT]

    @property
    def interventions(self) -> list[str]:
        return [str(action) for _, action in self.actions if action.kind is not ActionKind.ALERT]

    def first_s(self, kind: ActionKind) -> float:
        return next(at_s for at_s, action in self.actions if action.kind is kind)


def steps(
    count: int,
    work_s: Seconds,
    *,
    ranks: int = 4,
    first_step: int = 1,
    marks_steps: bool = True,
    data_s: Seconds = none,
    after_s: Seconds = none,
    after: Phase | None = None,
    routed_nbytes: Seconds = none,
    reduces: Callable[[int], bool] = lambda _step: True,
    asynchronous: bool = False,
    per_node: int = 2,
) -> Trace:
    """Return a job whose ranks load data, work, reduce, and perhaps do something after the step.

    Args:
        count: number of steps.
        work_s: from the batch to the all-reduce.
        ranks: number of ranks.
        first_step: number of the first step.
        marks_steps: whether steps are recorded.
        data_s: waiting for the batch; recorded if it is above zero.
        after_s: after the step, before the next; others wait in their next all-reduce.
        after: the phase that is recorded for it, if any.
        routed_nbytes: payload of an all-to-all in the middle of the work; 0: there is none.
        reduces: whether ranks reduce in a step.
        asynchronous: whether they call the all-reduce asynchronously, as DDP and FSDP do.
        per_node: ranks on a node.
    """
    world = tuple(range(ranks))
    trace = Trace({rank: "abcdefgh"[rank // per_node] for rank in world}, {}, {"world": world})
    now_s = dict.fromkeys(world, 1.0)
    for step in range(first_step, first_step + count):
        begin_s, arrive_s = {}, {}
        for rank in world:
            if data_s(rank, step) > 0:
                until_s = now_s[rank] + data_s(rank, step)
                trace.phase(rank, Phase.DATA_WAIT, now_s[rank], until_s, step)
                now_s[rank] = until_s
            begin_s[rank] = now_s[rank]
            arrive_s[rank] = now_s[rank] + work_s(rank, step)
        if routed_nbytes(0, step):
            middle_s = {rank: (begin_s[rank] + arrive_s[rank]) / 2 for rank in world}
            latest_s = max(middle_s.values())
            for rank in world:
                trace.operation(
                    rank, "world", Operation.ALL_TO_ALL, middle_s[rank], latest_s + 0.01,
                    nbytes=int(routed_nbytes(rank, step)), step=step,
                )  # fmt: skip
                arrive_s[rank] += latest_s + 0.01 - middle_s[rank]
        if reduces(step):
            ended_s = max(arrive_s.values()) + 0.05
            for rank in world:
                trace.operation(
                    rank, "world", Operation.ALL_REDUCE, arrive_s[rank], ended_s, step=step,
                    asynchronous=asynchronous,
                )  # fmt: skip
                arrive_s[rank] = ended_s
        for rank in world:
            if marks_steps:
                trace.phase(rank, Phase.STEP, begin_s[rank], arrive_s[rank], step)
            now_s[rank] = arrive_s[rank] + after_s(rank, step)
            if after is not None and after_s(rank, step) > 0:
                trace.phase(rank, after, arrive_s[rank], now_s[rank], step)
    trace.read_s = max(now_s.values())
    return trace


def stages(count: int, work_s: float, *, ranks: int = 4, first_step: int = 1) -> Trace:
    """Return a pipeline: each stage receives, works, sends on; then all reduce."""
    world = tuple(range(ranks))
    trace = Trace({rank: "abcd"[rank] for rank in world}, {}, {"world": world})
    now_s = 1.0
    for step in range(first_step, first_step + count):
        at_s = now_s
        for rank in world:
            if rank:
                trace.operation(
                    rank, "world", Operation.RECEIVE, now_s, at_s, step=step, peer=rank - 1
                )
            trace.phase(rank, Phase.STEP, at_s, now_s + ranks * work_s + 0.1, step)
            at_s += work_s
            if rank < ranks - 1:
                trace.operation(
                    rank, "world", Operation.SEND, at_s, at_s + 0.01, step=step, peer=rank + 1
                )
            trace.operation(
                rank, "world", Operation.ALL_REDUCE, at_s + 0.02, now_s + ranks * work_s + 0.1,
                step=step,
            )  # fmt: skip
        now_s += ranks * work_s + 0.1
    trace.read_s = now_s
    return trace


def play(
    trace: Trace,
    *,
    busy: Callable[[int, float], bool] = lambda _rank, _now_s: False,
    is_sampled: bool = True,
    until_s: float | None = None,
    stopped: Sequence[int] = (),
) -> Played:
    """Read, diagnose and decide once a second.

    Args:
        trace: of the job.
        busy: whether the process of a rank uses a processor at a time; if not, it does nothing.
        is_sampled: whether processes are sampled at all.
        until_s: when to stop; at the trace's end if not given.
        stopped: ranks that a signal has stopped.
    """
    played, policy = Played(), EnforcementPolicy(Mode.REPLACE, replacements=100, restarts=100)
    enforcement, recording = EnforcementState(), Recording(trace)
    cpu_s = dict.fromkeys(trace.nodes, 0.0)
    samples: dict[int, ProcessSample] = {}
    sampled_s, now_s, end_s = -SAMPLE_EVERY_S, 1.0, until_s or trace.read_s
    while now_s <= end_s:
        for rank in trace.nodes:
            cpu_s[rank] += 1.0 if busy(rank, now_s) else 0.0
        if now_s - sampled_s >= SAMPLE_EVERY_S:
            sampled_s = now_s
            samples = {
                rank: ProcessSample(rank, 1000 + rank, now_s, cpu_s[rank], 0)
                for rank in trace.nodes
            }
        metrics = {
            node: NodeMetrics(
                node, now_s,
                stopped_ranks=tuple(rank for rank in stopped if trace.nodes[rank] == node),
                processes=tuple(
                    sample for rank, sample in samples.items() if trace.nodes[rank] == node
                ) if is_sampled else (),
            )
            for node in set(trace.nodes.values())
        }  # fmt: skip
        job = recording.job(now_s, now_s - 4.0)
        played.state, verdicts = diagnose(job, metrics, played.state, now_s, Thresholds())
        played.readings.append((now_s, verdicts))
        step_s = played.state.window.step_s()
        enforcement, actions = decide(policy, enforcement, verdicts, trace.nodes, step_s, now_s)
        played.actions += [(now_s, action) for action in actions]
        now_s += 1.0
    return played
