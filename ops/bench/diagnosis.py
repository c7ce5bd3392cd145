"""Measures whether the monitor finds faults that are injected into real jobs over gloo.

`python ops/bench/diagnosis.py --json [--quick] [--only NAME] [--ranks N] [--compute S]`. The last
line is one JSON object.

Every fault has its own job (DDP, FSDP2, or a pipeline by send and receive), with each rank recorded
by `monitor.attach()`. Once the baseline is measured, the fault is injected. Every half second, as
in a daemon, the rings are read, aligned and diagnosed, and a policy decides on restarts and
replacements. Each rank is a node to the diagnosis; for faults of the network it is a network
namespace behind a switch in user space (`switched_network.py`).

The first verdict after the injection counts: its syndrome must be one of the fault's syndromes, and
its subject exactly the rank or link with the fault. Collectives do not show which link is slow or
cut; there the job, or the group with both ends, is right. For a link with a delay, or
that loses packets, either direction is right: gloo asks the receiver before it sends, and what is
lost with the acknowledgements is sent again. A slowdown multiplies the compute, which takes
`--compute` processor seconds per step; data, autograd and optimizer take another 0.03 s, so the
rank's own time grows by a smaller factor. Four ranks on two cores compute twice as long as on four.
`seconds` and `steps` count from the injection; a fault within a rank acts up to one step later.
`others` are further verdicts within `SETTLE_S` about subjects without a fault.

`lumpy` are healthy jobs with a habit that may be taken for a fault: uneven stages, busy experts,
slow batches, long saves, recompiles and so on. Verdicts may be shown of them; `alerts` of each
should be one at most, and `evictions` none.

`false_verdicts` counts verdicts before an injection and all verdicts of healthy jobs, and
`healthy_steps` the steps that these cover; a process keeps one core busy during healthy jobs.
`false_evictions` counts restarts and replacements of ranks without a fault. `overhead` is a step's
processor time with recording over that without, minus one (the median over neighbouring windows,
which alternate): wall times are mostly noise on a shared machine. `overhead_detail` has quartiles
of both.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# This directory has modules with the names of others, which it must not hide.
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
from diagnosis_worker import Control, Defect, Habit, Specification  # noqa: E402
from switched_network import DEVICE, Network, address, is_possible  # noqa: E402

sys.path.remove(HERE)

EVERY_S = 0.5
BASELINE_STEPS = 25
BASELINE_S = 150.0
PATIENCE_S = 25.0
SETTLE_S = 3.0
FAULTY, PEER = 1, 2

Inject = Callable[["Job"], None]


@dataclass(frozen=True)
class Fault:
    """A fault, the kind of job that it is injected into, and the right verdicts.

    Args:
        name: name of the fault.
        job: kind of the job.
        inject: injects the fault.
        syndromes: right syndromes.
        culprits: right subjects, as (kind, ranks).
        network: whether the job needs a switched network.
    """

    name: str
    job: str
    inject: Inject
    syndromes: Collection[Syndrome]
    culprits: Collection[tuple[str, tuple[int, ...]]]
    network: bool = False


@dataclass(frozen=True)
class Setup:
    """The settings of all jobs.

    Args:
        ranks: number of ranks of each job.
        disk: directory on a disk for checkpoints.
        compute_s: processor seconds that each rank computes per step.
    """

    ranks: int
    disk: str
    compute_s: float


class Job:
    """A running job and the monitoring of it."""

    def __init__(self, specification: Specification, network: Network | None) -> None:
        self.specification, self.network = specification, network
        directory = Path(specification.directory)
        (directory / "control").write_bytes(bytes(64))
        self.control = Control(directory / "control")
        self.errors = (directory / "stderr").open("w+")
        self._zygote = subprocess.Popen(
            [sys.executable, str(Path(HERE) / "diagnosis_worker.py"), specification.encode()],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=self.errors, text=True,
        )  # fmt: skip
        assert self._zygote.stdout is not None
        process_ids = self._zygote.stdout.readline()
        if not process_ids:
            self.errors.seek(0)
            raise SystemExit(f"the job did not start: {self.errors.read()}")
        self.processes: list[int] = json.loads(process_ids)
        self.monitor = Monitor(directory / "battery", specification.ranks)

    def inject(self, defect: Defect, value: float = 0.0, rank: int = FAULTY) -> None:
        self.control.write(rank, defect, value)

    def send(self, number: signal.Signals, rank: int = FAULTY) -> None:
        os.kill(self.processes[rank], number)

    def wait(self) -> None:
        self._zygote.wait()

    def close(self) -> None:
        for process in self.processes:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass  # The fault has ended it.
        self._zygote.wait()
        self.monitor.close()
        self.errors.close()


class Monitor:
    """Reads, diagnoses and decides as the monitor's daemon does, in one process."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.rings = JobRings(directory)
        self.probes = [NodeProbe(f"node-{rank}") for rank in range(ranks)]
        self.diagnosis_state = NO_DIAGNOSIS_STATE
        self.state = EnforcementState()
        self.policy = EnforcementPolicy(
            mode=Mode.REPLACE, replacements=100, restarts=100, fleet_share=1.0
        )
        self.nodes = {rank: f"node-{rank}" for rank in range(ranks)}
        self.action_ranks: list[tuple[int, ...]] = []
        self.alerts: list[str] = []
        self.step = 0
        self._due_s = 0.0
        self._ranks = ranks

    def diagnose(self) -> tuple[Verdict, ...]:
        """Wait for the next turn, and return the verdicts that hold."""
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
        self.diagnosis_state, verdicts = diagnose(
            job, metrics, self.diagnosis_state, now_s, Thresholds()
        )
        self.step = max(
            (int(rank.records["step"].max(initial=0)) for rank in job.ranks.values()), default=0
        )
        step_s = self.diagnosis_state.window.step_s()
        self.state, actions = decide(self.policy, self.state, verdicts, self.nodes, step_s, now_s)
        for action in actions:
            if action.kind is ActionKind.ALERT:
                self.alerts.append(str(action))
            else:
                node_ranks = tuple(int(node.removeprefix("node-")) for node in action.nodes)
                self.action_ranks.append(action.ranks or node_ranks)
        return verdicts

    def close(self) -> None:
        self.rings.close()
        for probe in self.probes:
            probe.close()


@contextmanager
def running(
    setup: Setup,
    kind: str,
    with_network: bool = False,
    overhead: int = 0,
    habit: Habit = Habit.NONE,
) -> Iterator[Job]:
    """Run a job while the context lasts; its end removes the job and its network."""
    with ExitStack() as stack:
        directory = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="keepstep-bench-", dir="/dev/shm")
        )
        network = stack.enter_context(Network(setup.ranks)) if with_network else None
        port = stack.enter_context(ReservedPort()).number
        specification = Specification(
            kind,
            setup.ranks,
            directory,
            setup.disk,
            setup.compute_s,
            port=port,
            overhead=overhead,
            habit=habit,
        )
        if network is not None:
            specification = replace(
                specification,
                namespaces=network.namespaces,
                device=DEVICE,
                master=address(0),
            )
        job = Job(specification, network)
        stack.callback(job.close)
        yield job


def is_right_subject(fault: Fault, subject: Subject) -> bool:
    for kind, ranks in fault.culprits:
        # A group is right if it contains all ranks with the fault.
        has_ranks = set(ranks) <= set(subject.ranks) if kind == "group" else ranks == subject.ranks
        if kind == subject.kind and has_ranks:
            return True
    return False


def describe(verdict: Verdict) -> str:
    return f"{verdict.syndrome}: {verdict.subject} [{'; '.join(verdict.evidence)}]"


def by_identity(verdicts: Collection[Verdict]) -> dict[tuple[Subject, Syndrome], Verdict]:
    return {(verdict.subject, verdict.syndrome): verdict for verdict in verdicts}


def attempt(fault: Fault, setup: Setup) -> dict[str, Any]:
    """Start a job, inject a fault into it, and judge the verdicts."""
    with running(setup, fault.job, fault.network) as job:
        monitor = job.monitor
        before: dict[tuple[Subject, Syndrome], Verdict] = {}
        deadline_s = time.monotonic() + BASELINE_S
        while monitor.diagnosis_state.window.newest < BASELINE_STEPS:
            before |= by_identity(monitor.diagnose())
            if time.monotonic() > deadline_s:
                job.errors.seek(0)
                raise SystemExit(
                    f"{fault.name}: the job made {monitor.step} steps in {BASELINE_S} s: "
                    f"{job.errors.read()}"
                )
        false_actions = len(monitor.action_ranks)
        standing = by_identity(before.values())
        began_s, began_step = time.monotonic(), monitor.step
        step_s = monitor.diagnosis_state.window.step_s()
        fault.inject(job)
        first: Verdict | None = None
        entry: dict[str, Any] = {
            "name": fault.name,
            "job": fault.job,
            "detected": False,
            "seconds": None,
            "steps": None,
        }
        others: dict[tuple[Subject, Syndrome], Verdict] = {}
        until_s = began_s + PATIENCE_S
        while time.monotonic() < until_s:
            verdicts = by_identity(monitor.diagnose())
            new = [verdict for key, verdict in verdicts.items() if key not in standing]
            if new and first is None:
                first = new[0]
                entry |= {
                    "detected": True,
                    "seconds": round(time.monotonic() - began_s, 2),
                    "steps": monitor.step - began_step,
                }
                until_s = time.monotonic() + SETTLE_S
            if first is not None:
                others |= {
                    key: verdict
                    for key, verdict in by_identity(new).items()
                    if not is_right_subject(fault, verdict.subject)
                }
        is_right_syndrome = first is not None and first.syndrome in fault.syndromes
        is_right_culprit = first is not None and is_right_subject(fault, first.subject)
        if first is not None and not is_right_culprit:
            others.pop((first.subject, first.syndrome), None)
        job.errors.seek(0)
        innocent = [
            ranks
            for ranks in monitor.action_ranks[false_actions:]
            if not any(set(ranks) <= set(culprits) for _, culprits in fault.culprits)
        ]
        return entry | {
            "syndrome_ok": is_right_syndrome,
            "culprit_ok": is_right_culprit,
            "verdict": describe(first) if first is not None else "",
            "others": [describe(verdict) for verdict in others.values()],
            "step_s": round(step_s, 4),
            "before": [describe(verdict) for verdict in before.values()],
            "baseline_steps": began_step,
            "evicted_innocent": len(innocent) + false_actions,
            "said": job.errors.read()[:400],
        }


def healthy(
    kind: str,
    setup: Setup,
    steps: int,
    seconds: float,
    busy: bool,
    habit: Habit = Habit.NONE,
) -> dict[str, Any]:
    """Train without an injected fault, and return the verdicts."""
    burners = []
    try:
        with running(setup, kind, habit=habit) as job:
            if busy:
                core = next(iter(os.sched_getaffinity(0)))
                code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
                burners = [subprocess.Popen([sys.executable, "-c", code])]
            verdicts: dict[tuple[Subject, Syndrome], Verdict] = {}
            until_s = time.monotonic() + seconds
            while job.monitor.step < steps and time.monotonic() < until_s:
                verdicts |= by_identity(job.monitor.diagnose())
            return {
                "job": f"{kind}, {habit}" if habit else kind,
                "busy": busy,
                "steps": job.monitor.step,
                "step_s": round(job.monitor.diagnosis_state.window.step_s(), 4),
                "verdicts": [describe(verdict) for verdict in verdicts.values()],
                "alerts": job.monitor.alerts,
                "evictions": len(job.monitor.action_ranks),
            }
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def overhead(setup: Setup, windows: int) -> dict[str, Any]:
    """Return what recording adds to a step, in processor time and in wall time."""
    with running(setup, "ddp", overhead=windows) as job:
        job.wait()
        windows_of = json.loads((Path(job.specification.directory) / "overhead.json").read_text())
    result = {}
    pairs = list(zip(windows_of["with"], windows_of["without"], strict=True))
    for index, name in ((1, "processor"), (0, "wall")):
        ratios = sorted(recorded[index] / plain[index] - 1 for recorded, plain in pairs)
        quarter = len(ratios) // 4
        result[name] = [
            round(value, 5)
            for value in (ratios[quarter], statistics.median(ratios), ratios[-1 - quarter])
        ]
    return result


def _throttle(job: Job) -> None:
    """Limit the faulty rank to a quarter of a processor, by a cgroup."""
    for top in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")):
        cgroup = top / f"keepstep-battery-{os.getpid()}"
        try:
            cgroup.mkdir(exist_ok=True)
            if (cgroup / "cpu.cfs_quota_us").exists():
                (cgroup / "cpu.cfs_period_us").write_text("20000")
                (cgroup / "cpu.cfs_quota_us").write_text("5000")
            else:
                (cgroup / "cpu.max").write_text("5000 20000")
            (cgroup / "cgroup.procs").write_text(str(job.processes[FAULTY]))
        except OSError:
            continue
        return
    raise SystemExit("a processor cgroup cannot be created on this machine")


def _unthrottle() -> None:
    for top in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")):
        cgroup = top / f"keepstep-battery-{os.getpid()}"
        if cgroup.exists():
            cgroup.rmdir()


def _on_network(change: Callable[[Network], None]) -> Inject:
    def inject(job: Job) -> None:
        assert job.network is not None
        change(job.network)

    return inject


def _defect(defect: Defect, value: float = 0.0) -> Inject:
    return lambda job: job.inject(defect, value)


def _cut(network: Network) -> None:
    network.link(FAULTY, PEER, cut=True)
    network.link(PEER, FAULTY, cut=True)


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
    faulty = [("rank", (FAULTY,))]
    link = [("link", (FAULTY, PEER))]
    either = [("link", (FAULTY, PEER)), ("link", (PEER, FAULTY))]
    unspecific = [("group", (FAULTY, PEER)), ("job", ()), *either]
    delay = _on_network(lambda network: network.link(FAULTY, PEER, delay_s=0.03))
    rate = _on_network(lambda network: network.link(FAULTY, PEER, rate=2e6))
    loss = _on_network(lambda network: network.link(FAULTY, PEER, lost=0.2))
    receiver, cut = _on_network(_slow_receiver), _on_network(_cut)
    stop: Inject = lambda job: job.send(signal.SIGSTOP)  # noqa: E731
    kill: Inject = lambda job: job.send(signal.SIGKILL)  # noqa: E731
    battery = []
    for kind in ("ddp", "fsdp", "pipeline"):
        battery += [
            Fault("stopped (SIGSTOP)", kind, stop, hang, faulty),
            Fault("infinite loop", kind, _defect(Defect.LOOP), hang, faulty),
            Fault("GIL held in C", kind, _defect(Defect.GIL), hang, faulty),
            Fault("killed (SIGKILL)", kind, kill, dead, faulty),
            Fault("exception in user code", kind, _defect(Defect.ERROR), dead, faulty),
            Fault("slow compute x2", kind, _defect(Defect.SLOW, 2.0), slow, faulty),
        ]
    for kind in ("ddp", "fsdp"):
        battery += [
            Fault("slow compute x1.3", kind, _defect(Defect.SLOW, 1.3), slow, faulty),
            Fault("slow compute x5", kind, _defect(Defect.SLOW, 5.0), slow, faulty),
            Fault(
                "slow data loader",
                kind,
                _defect(Defect.DATA_SLOW, 0.05),
                {Syndrome.DATA_STALL},
                faulty,
            ),
            Fault(
                "stalled data loader",
                kind,
                _defect(Defect.DATA_STALL),
                {Syndrome.DATA_STALL},
                faulty,
            ),
            Fault("mismatch of size", kind, _defect(Defect.MISMATCH_SIZE), mismatch, faulty),
            Fault(
                "mismatch of operation", kind, _defect(Defect.MISMATCH_OPERATION), mismatch, faulty
            ),
            Fault("mismatch of order", kind, _defect(Defect.MISMATCH_ORDER), mismatch, faulty),
        ]
    battery += [
        Fault("throttled processor", "ddp", _throttle, {Syndrome.THROTTLED, *slow}, faulty),
        Fault("slow disk", "ddp", _defect(Defect.SLOW_DISK), {Syndrome.CHECKPOINT_STALL}, faulty),
        Fault("slow link, delay", "pipeline", delay, slow_comm, either, True),
        Fault("slow link, rate", "pipeline", rate, slow_comm, link, True),
        Fault("lossy link", "pipeline", loss, slow_comm, either, True),
        Fault("slow receiver", "pipeline", receiver, slow_comm, [("rank", (PEER,))], True),
        Fault("cut link", "pipeline", cut, {Syndrome.COMMUNICATION_HANG}, either, True),
        Fault("slow link, delay", "ddp", delay, slow_comm, unspecific, True),
        Fault("cut link", "ddp", cut, {Syndrome.COMMUNICATION_HANG}, unspecific, True),
    ]
    return battery


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="Fewer jobs for each fault, fewer healthy steps.")
@click.option(
    "--only", multiple=True, help="Faults whose name or job contains this; also healthy, overhead."
)
@click.option("--ranks", default=4, help="Number of ranks of each job.")
@click.option("--repeat", default=1, help="Number of injections of each fault.")
@click.option("--compute", default=0.06, help="Processor seconds that each rank computes per step.")
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
        return not only or any(part in name for part in only for name in names)

    chosen = [
        fault for fault in faults() if wanted(fault.name, fault.job, f"{fault.name}/{fault.job}")
    ]
    if quick:
        by_name: dict[str, Fault] = {}
        for fault in chosen:
            by_name.setdefault(fault.name, fault)
        chosen = list(by_name.values())
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
        healthy_jobs = []
        for kind in ("ddp", "fsdp", "pipeline"):
            if wanted("healthy", f"healthy/{kind}"):
                for busy in (True,) if quick else (False, True):
                    healthy_jobs.append(
                        healthy(
                            kind, setup, 1000 if quick else 3000, 60.0 if quick else 300.0, busy
                        )
                    )
                    print(
                        json.dumps(healthy_jobs[-1], indent=1),
                        file=sys.stderr if as_json else sys.stdout,
                        flush=True,
                    )
        lumpy_jobs = []
        for habit in Habit:
            if habit and wanted("healthy", f"healthy/{habit}"):
                seconds = 90.0 if quick else 240.0
                lumpy_jobs.append(healthy(habit.job, setup, 3000, seconds, False, habit))
                print(
                    json.dumps(lumpy_jobs[-1], indent=1),
                    file=sys.stderr if as_json else sys.stdout,
                    flush=True,
                )
        overheads = overhead(setup, 8 if quick else 30) if wanted("overhead") else None
    result = {
        "faults": entries,
        "detected": f"{sum(entry['detected'] for entry in entries)}/{len(entries)}",
        "right_syndrome": f"{sum(entry['syndrome_ok'] for entry in entries)}/{len(entries)}",
        "right_culprit": f"{sum(entry['culprit_ok'] for entry in entries)}/{len(entries)}",
        "healthy": healthy_jobs,
        "lumpy": lumpy_jobs,
        "lumpy_most_alerts": max((len(job["alerts"]) for job in lumpy_jobs), default=0),
        "false_verdicts": sum(len(entry["before"]) for entry in entries)
        + sum(len(job["verdicts"]) for job in healthy_jobs),
        "healthy_steps": sum(entry["baseline_steps"] for entry in entries)
        + sum(job["steps"] for job in healthy_jobs),
        "false_evictions": sum(entry["evicted_innocent"] for entry in entries)
        + sum(job["evictions"] for job in (*healthy_jobs, *lumpy_jobs)),
        "overhead": overheads["processor"][1] if overheads else None,
        "overhead_detail": overheads,
        "left_out": left_out,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
