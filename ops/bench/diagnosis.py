"""Does the monitor find the sick rank or link: faults injected into real jobs of several processes over gloo.

`python ops/bench/diagnosis.py --json [--quick] [--only NAME] [--ranks N] [--compute S]`. The last line is one JSON object.

For every fault a job is started anew (DDP, FSDP2, or a pipeline by send and receive), each rank recorded by `monitor.attach()`. Once it has
taken its baseline, the fault is injected, and the rings are read, aligned, diagnosed and treated by a policy that may restart and replace,
every half second as a daemon does. Each rank is a node of its own to the diagnosis, and where faults are of the network, one in truth:
a network namespace behind a switch in user space (`switched_network.py`). Judged is the first verdict after the injection: whether its
syndrome is one that says what was injected, and its subject exactly who was injected. Collectives do not tell which link is slow or cut; there
the job, or the group with both ends, is right. Of a link that delays, either direction is: gloo asks the receiver before it sends.
What is made slower by a factor is the compute, `--compute` seconds of processor a step, beside which a step has some 0.03 s of its own for data,
autograd and optimizer: of a rank's own time, the factor is that much less. Four ranks on two cores compute twice as long as they would alone.
`seconds` and `steps` run from the injection, of a fault within a rank up to one step before it acts. `beside` are further verdicts
within `SETTLE_S` that name somebody innocent.

`false_verdicts` counts verdicts before an injection, and all of jobs without one, `healthy_steps` the steps that went with them; beside healthy
jobs runs a process that keeps one core busy. `false_evictions` counts restarts and replacements of who was innocent.
`overhead` is a step's processor time with recording over that without, less one (the median of neighbouring windows that take turns):
wall times are mostly noise on a shared machine; quartiles of both are in `overhead_detail`.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# The benchmark beside this file is called as a module of the package is.
HERE = str(Path(__file__).parent)
sys.path.remove(HERE)
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import click  # noqa: E402

from keepstep.elastic.store.ports import ReservedPort  # noqa: E402
from keepstep.monitor.diagnosis.conclusion import NO_DIAGNOSIS_STATE, diagnose  # noqa: E402
from keepstep.monitor.diagnosis.policy import (  # noqa: E402
    ActionKind,
    EnforcementPolicy,
    EnforcementState,
    Mode,
    decide,
)
from keepstep.monitor.diagnosis.thresholds import Thresholds  # noqa: E402
from keepstep.monitor.node.probes import NodeProbe  # noqa: E402
from keepstep.monitor.telemetry.clocks import align  # noqa: E402
from keepstep.monitor.telemetry.job_rings import JobRings  # noqa: E402
from keepstep.monitor.verdicts import Subject, Syndrome, Verdict  # noqa: E402

sys.path.insert(1, HERE)
from diagnosis_worker import Control, Ill, Specification  # noqa: E402
from switched_network import DEVICE, Network, address, is_possible  # noqa: E402

sys.path.remove(HERE)

EVERY_S = 0.5
BASELINE_STEPS = 25
BASELINE_S = 150.0
PATIENCE_S = 25.0
SETTLE_S = 3.0
SICK, PEER = 1, 2

Inject = Callable[["Job"], None]


@dataclass(frozen=True)
class Fault:
    """What is done to which job, and what should be said of it.

    Args:
        name: of the fault.
        job: what trains.
        inject: does it.
        syndromes: that say what it is.
        culprits: subjects that are right, as (kind, ranks).
        network: whether it needs one.
    """

    name: str
    job: str
    inject: Inject
    syndromes: Collection[Syndrome]
    culprits: Collection[tuple[str, tuple[int, ...]]]
    network: bool = False


@dataclass(frozen=True)
class Setup:
    """What is the same for all jobs.

    Args:
        ranks: of each.
        disk: directory on a disk, for their checkpoints.
        compute_s: of processor that each rank computes in a step.
    """

    ranks: int
    disk: str
    compute_s: float


class Job:
    """A running job with what reads it."""

    def __init__(self, specification: Specification, network: Network | None) -> None:
        self.specification, self.network = specification, network
        directory = Path(specification.directory)
        (directory / "control").write_bytes(bytes(64))
        self.control = Control(directory / "control")
        self.errors = (directory / "stderr").open("w+")
        self._zygote = subprocess.Popen(
            [sys.executable, str(Path(HERE) / "diagnosis_worker.py"), specification.told()],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=self.errors, text=True,
        )  # fmt: skip
        assert self._zygote.stdout is not None
        told = self._zygote.stdout.readline()
        if not told:
            self.errors.seek(0)
            raise SystemExit(f"the job did not start: {self.errors.read()}")
        self.processes: list[int] = json.loads(told)
        self.watcher = Watcher(directory / "battery", specification.ranks)

    def ail(self, ill: Ill, value: float = 0.0, rank: int = SICK) -> None:
        self.control.write(rank, ill, value)

    def send(self, number: signal.Signals, rank: int = SICK) -> None:
        os.kill(self.processes[rank], number)

    def wait(self) -> None:
        self._zygote.wait()

    def close(self) -> None:
        for process in self.processes:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass  # It was the fault, or the fault's end.
        self._zygote.wait()
        self.watcher.close()
        self.errors.close()


class Watcher:
    """What a daemon does twice a second, and with it the policy that acts."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.rings = JobRings(directory)
        self.probes = [NodeProbe(f"node-{rank}") for rank in range(ranks)]
        self.past = NO_DIAGNOSIS_STATE
        self.state = EnforcementState()
        self.policy = EnforcementPolicy(
            mode=Mode.REPLACE, replacements=100, restarts=100, fleet_share=1.0
        )
        self.nodes = {rank: f"node-{rank}" for rank in range(ranks)}
        self.acted: list[tuple[int, ...]] = []
        self.step = 0
        self._due_s = 0.0
        self._ranks = ranks
        self._stepped: set[int] = set()

    def look(self) -> tuple[Verdict, ...]:
        """Wait for the next turn, and return what stands."""
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        self._due_s = max(self._due_s + EVERY_S, time.monotonic())
        job = self.rings.read(2**14)
        if len(job.ranks) < self._ranks:
            return ()
        job = align(job)
        processes = self.rings.processes()
        metrics = {
            f"node-{rank}": self.probes[rank].sample({rank: process})
            for rank, process in processes.items()
        }
        now_s = time.monotonic()
        self.past, verdicts = diagnose(job, metrics, self.past, now_s, Thresholds())
        self.step = max(
            (int(told.records["step"].max(initial=0)) for told in job.ranks.values()), default=0
        )
        step_s = self.past.window.step_s()
        self.state, actions = decide(self.policy, self.state, verdicts, self.nodes, step_s, now_s)
        for action in actions:
            if action.kind is not ActionKind.ALERT:
                self.acted.append(
                    action.ranks or tuple(int(node.removeprefix("node-")) for node in action.nodes)
                )
        return verdicts

    def close(self) -> None:
        self.rings.close()
        for probe in self.probes:
            probe.close()


@contextmanager
def running(
    setup: Setup, kind: str, with_network: bool = False, overhead: int = 0
) -> Iterator[Job]:
    """Run a job; it and its network are gone afterwards."""
    with ExitStack() as owned:
        directory = owned.enter_context(
            tempfile.TemporaryDirectory(prefix="keepstep-bench-", dir="/dev/shm")
        )
        network = owned.enter_context(Network(setup.ranks)) if with_network else None
        port = owned.enter_context(ReservedPort()).number
        specification = Specification(
            kind, setup.ranks, directory, setup.disk, setup.compute_s, port=port, overhead=overhead
        )
        if network is not None:
            there = {"namespaces": network.namespaces, "device": DEVICE, "master": address(0)}
            specification = Specification(**{**asdict(specification), **there})
        job = Job(specification, network)
        owned.callback(job.close)
        yield job


def sound(fault: Fault, verdict: Verdict) -> tuple[bool, bool]:
    """Return whether a verdict says what it is, and who."""
    return verdict.syndrome in fault.syndromes, right(fault, verdict.subject)


def right(fault: Fault, subject: Subject) -> bool:
    for kind, ranks in fault.culprits:
        # A group is right if it has all of them.
        among = set(ranks) <= set(subject.ranks) if kind == "group" else ranks == subject.ranks
        if kind == subject.kind and among:
            return True
    return False


def told(verdict: Verdict) -> str:
    return f"{verdict.syndrome}: {verdict.subject} [{'; '.join(verdict.evidence)}]"


def one_of(verdicts: Collection[Verdict]) -> dict[tuple[Subject, Syndrome], Verdict]:
    return {(one.subject, one.syndrome): one for one in verdicts}


def attempt(fault: Fault, setup: Setup) -> dict[str, Any]:
    """Inject a fault into a job of its own."""
    with running(setup, fault.job, fault.network) as job:
        watcher = job.watcher
        before: dict[tuple[Subject, Syndrome], Verdict] = {}
        deadline_s = time.monotonic() + BASELINE_S
        while watcher.past.window.newest < BASELINE_STEPS:
            before |= one_of(watcher.look())
            if time.monotonic() > deadline_s:
                job.errors.seek(0)
                raise SystemExit(
                    f"{fault.name}: the job made {watcher.step} steps in {BASELINE_S} s: {job.errors.read()}"
                )
        acted = len(watcher.acted)
        standing = one_of(before.values())
        began_s, began_step, step_s = time.monotonic(), watcher.step, watcher.past.window.step_s()
        fault.inject(job)
        first: Verdict | None = None
        entry: dict[str, Any] = {
            "name": fault.name,
            "job": fault.job,
            "detected": False,
            "seconds": None,
            "steps": None,
        }
        beside: dict[tuple[Subject, Syndrome], Verdict] = {}
        until_s = began_s + PATIENCE_S
        while time.monotonic() < until_s:
            found = one_of(watcher.look())
            fresh = [verdict for key, verdict in found.items() if key not in standing]
            if fresh and first is None:
                first = fresh[0]
                entry |= {
                    "detected": True,
                    "seconds": round(time.monotonic() - began_s, 2),
                    "steps": watcher.step - began_step,
                }
                until_s = time.monotonic() + SETTLE_S
            if first is not None:
                beside |= {
                    key: one for key, one in one_of(fresh).items() if not right(fault, one.subject)
                }
        right_syndrome, right_culprit = sound(fault, first) if first is not None else (False, False)
        if first is not None and not right_culprit:
            beside.pop((first.subject, first.syndrome), None)
        job.errors.seek(0)
        innocent = [
            who
            for who in watcher.acted[acted:]
            if not any(set(who) <= set(at) for _, at in fault.culprits)
        ]
        return entry | {
            "syndrome_ok": right_syndrome,
            "culprit_ok": right_culprit,
            "verdict": told(first) if first is not None else "",
            "beside": [told(one) for one in beside.values()],
            "step_s": round(step_s, 4),
            "before": [told(one) for one in before.values()],
            "baseline_steps": began_step,
            "evicted_innocent": len(innocent) + acted,
            "said": job.errors.read()[:400],
        }


def healthy(kind: str, setup: Setup, steps: int, seconds: float, busy: bool) -> dict[str, Any]:
    """Let a job train with nothing injected."""
    burners = []
    try:
        with running(setup, kind) as job:
            if busy:
                burners = [
                    subprocess.Popen([sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"])
                    for core in list(os.sched_getaffinity(0))[:1]
                ]  # fmt: skip
            verdicts: dict[tuple[Subject, Syndrome], Verdict] = {}
            until_s = time.monotonic() + seconds
            while job.watcher.step < steps and time.monotonic() < until_s:
                verdicts |= one_of(job.watcher.look())
            return {
                "job": kind,
                "busy": busy,
                "steps": job.watcher.step,
                "step_s": round(job.watcher.past.window.step_s(), 4),
                "verdicts": [told(one) for one in verdicts.values()],
                "evictions": len(job.watcher.acted),
            }
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def overhead(setup: Setup, windows: int) -> dict[str, Any]:
    """Return what recording adds to a step, by processor time and by wall time."""
    with running(setup, "ddp", overhead=windows) as job:
        job.wait()
        found = json.loads((Path(job.specification.directory) / "overhead.json").read_text())
    result = {}
    for at, name in ((1, "processor"), (0, "wall")):
        ratios = sorted(
            a[at] / b[at] - 1 for a, b in zip(found["with"], found["without"], strict=True)
        )
        quarter = len(ratios) // 4
        result[name] = [
            round(value, 5)
            for value in (ratios[quarter], statistics.median(ratios), ratios[-1 - quarter])
        ]
    return result


def _throttle(job: Job) -> None:
    """Give the sick rank a third of a processor, by its cgroup."""
    for top in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")):
        place = top / f"keepstep-battery-{os.getpid()}"
        try:
            place.mkdir(exist_ok=True)
            if (place / "cpu.cfs_quota_us").exists():
                (place / "cpu.cfs_period_us").write_text("20000")
                (place / "cpu.cfs_quota_us").write_text("5000")
            else:
                (place / "cpu.max").write_text("5000 20000")
            (place / "cgroup.procs").write_text(str(job.processes[SICK]))
        except OSError:
            continue
        return
    raise SystemExit("no cgroup of processors can be made here")


def _unthrottle() -> None:
    for top in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")):
        place = top / f"keepstep-battery-{os.getpid()}"
        if place.exists():
            place.rmdir()


def _on_network(change: Callable[[Network], None]) -> Inject:
    def inject(job: Job) -> None:
        assert job.network is not None
        change(job.network)

    return inject


def _ail(ill: Ill, value: float = 0.0) -> Inject:
    return lambda job: job.ail(ill, value)


def _cut(network: Network) -> None:
    network.link(SICK, PEER, cut=True)
    network.link(PEER, SICK, cut=True)


def _slow_receiver(network: Network) -> None:
    for sender in range(network.size):
        network.link(sender, PEER, delay_s=0.03)


def faults() -> list[Fault]:
    hang, dead, mismatch = (
        {Syndrome.NON_COMMUNICATION_HANG},
        {Syndrome.DEAD_PROCESS},
        {Syndrome.MISMATCH},
    )
    slow, slow_comm = {Syndrome.NON_COMMUNICATION_SLOW}, {Syndrome.COMMUNICATION_SLOW}
    sick = [("rank", (SICK,))]
    link = [("link", (SICK, PEER))]
    either = [("link", (SICK, PEER)), ("link", (PEER, SICK))]
    vague = [("group", (SICK, PEER)), ("job", ()), *either]
    stop: Inject = lambda job: job.send(signal.SIGSTOP)  # noqa: E731
    kill: Inject = lambda job: job.send(signal.SIGKILL)  # noqa: E731
    found = []
    for kind in ("ddp", "fsdp", "pipeline"):
        found += [
            Fault("stopped (SIGSTOP)", kind, stop, hang, sick),
            Fault("infinite loop", kind, _ail(Ill.LOOP), hang, sick),
            Fault("GIL held in C", kind, _ail(Ill.GIL), hang, sick),
            Fault("killed (SIGKILL)", kind, kill, dead, sick),
            Fault("exception in user code", kind, _ail(Ill.ERROR), dead, sick),
            Fault("slow compute x2", kind, _ail(Ill.SLOW, 2.0), slow, sick),
        ]
    for kind in ("ddp", "fsdp"):
        found += [
            Fault("slow compute x1.3", kind, _ail(Ill.SLOW, 1.3), slow, sick),
            Fault("slow compute x5", kind, _ail(Ill.SLOW, 5.0), slow, sick),
            Fault("slow data loader", kind, _ail(Ill.DATA_SLOW, 0.05), {Syndrome.DATA_STALL}, sick),
            Fault("stalled data loader", kind, _ail(Ill.DATA_STALL), {Syndrome.DATA_STALL}, sick),
            Fault("mismatch of size", kind, _ail(Ill.MISMATCH_SIZE), mismatch, sick),
            Fault("mismatch of operation", kind, _ail(Ill.MISMATCH_OPERATION), mismatch, sick),
            Fault("mismatch of order", kind, _ail(Ill.MISMATCH_ORDER), mismatch, sick),
        ]
    found += [
        Fault("throttled processor", "ddp", _throttle, {Syndrome.THROTTLED, *slow}, sick),
        Fault("slow disk", "ddp", _ail(Ill.SLOW_DISK), {Syndrome.CHECKPOINT_STALL}, sick),
        Fault("slow link, delay", "pipeline", _on_network(lambda net: net.link(SICK, PEER, delay_s=0.03)), slow_comm, either, True),
        Fault("slow link, rate", "pipeline", _on_network(lambda net: net.link(SICK, PEER, rate=2e6)), slow_comm, link, True),
        Fault("lossy link", "pipeline", _on_network(lambda net: net.link(SICK, PEER, lost=0.2)), slow_comm, link, True),
        Fault("slow receiver", "pipeline", _on_network(_slow_receiver), slow_comm, [("rank", (PEER,))], True),
        Fault("cut link", "pipeline", _on_network(_cut), {Syndrome.COMMUNICATION_HANG}, either, True),
        Fault("slow link, delay", "ddp", _on_network(lambda net: net.link(SICK, PEER, delay_s=0.03)), slow_comm, vague, True),
        Fault("cut link", "ddp", _on_network(_cut), {Syndrome.COMMUNICATION_HANG}, vague, True),
    ]  # fmt: skip
    return found


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Nothing on stdout but the last line.")
@click.option("--quick", is_flag=True, help="Fewer jobs for each fault, fewer healthy steps.")
@click.option(
    "--only", multiple=True, help="Faults whose name or job has this in it; also healthy, overhead."
)
@click.option("--ranks", default=4, help="Of each job.")
@click.option("--repeat", default=1, help="Times that each fault is injected.")
@click.option(
    "--compute", default=0.06, help="Seconds of processor that each rank computes in a step."
)
@click.option("--disk", default=None, help="Directory on a real disk for the checkpoints.")
def main(
    as_json: bool,
    quick: bool,
    only: tuple[str, ...],
    ranks: int,
    repeat: int,
    compute: float,
    disk: str | None,
) -> None:
    def wanted(*names: str) -> bool:
        return not only or any(one in name for one in only for name in names)

    chosen = [one for one in faults() if wanted(one.name, one.job, f"{one.name}/{one.job}")]
    if quick:
        kept: dict[str, Fault] = {}
        for fault in chosen:
            kept.setdefault(fault.name, fault)
        chosen = list(kept.values())
    entries: list[dict[str, Any]] = []
    left_out: list[str] = []
    networked = is_possible()
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-", dir=disk) as saved:
        setup = Setup(ranks, saved, compute)
        for fault in chosen * repeat:
            if fault.network and not networked:
                left_out.append(f"{fault.name}/{fault.job}: needs root, ip netns and /dev/net/tun")
                continue
            try:
                entry = attempt(fault, setup)
            finally:
                _unthrottle()
            entries.append(entry)
            if not as_json:
                print(json.dumps(entry, indent=1), flush=True)
            else:
                print(
                    f"{fault.name}/{fault.job}: {entry['verdict'] or 'missed'}",
                    file=sys.stderr,
                    flush=True,
                )
        calm = []
        for kind in ("ddp", "fsdp", "pipeline"):
            if wanted("healthy", f"healthy/{kind}"):
                for busy in (True,) if quick else (False, True):
                    calm.append(
                        healthy(
                            kind, setup, 1000 if quick else 3000, 60.0 if quick else 300.0, busy
                        )
                    )
                    print(
                        json.dumps(calm[-1], indent=1),
                        file=sys.stderr if as_json else sys.stdout,
                        flush=True,
                    )
        cost = overhead(setup, 8 if quick else 30) if wanted("overhead") else None
    result = {
        "faults": entries,
        "detected": f"{sum(one['detected'] for one in entries)}/{len(entries)}",
        "right_syndrome": f"{sum(one['syndrome_ok'] for one in entries)}/{len(entries)}",
        "right_culprit": f"{sum(one['culprit_ok'] for one in entries)}/{len(entries)}",
        "healthy": calm,
        "false_verdicts": sum(len(one["before"]) for one in entries)
        + sum(len(one["verdicts"]) for one in calm),
        "healthy_steps": sum(one["baseline_steps"] for one in entries)
        + sum(one["steps"] for one in calm),
        "false_evictions": sum(one["evicted_innocent"] for one in entries)
        + sum(one["evictions"] for one in calm),
        "overhead": cost["processor"][1] if cost else None,
        "overhead_detail": cost,
        "left_out": left_out,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
