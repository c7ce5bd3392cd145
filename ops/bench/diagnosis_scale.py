"""How well, how soon and at what cost the diagnosis judges simulated jobs of 1,024 to 16,384 ranks.

`python ops/bench/diagnosis_scale.py --json [--quick]`. The last line is one JSON object. A SIMULATION: traces come from
`ops/bench/traces.py`; the code that judges them is the one that runs beside real jobs. Seconds to the verdict are the trace's.

A fault counts as found if a verdict names its culprit (a link may be named by one of its ends only where it is the end's only link) with its
syndrome, within 20 steps; every other verdict counts against the precision, and on healthy traces as a false alarm.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from traces import NODE, Fault, Shape, Simulation, mixture  # noqa: E402

from keepstep.monitor.diagnosis.conclusion import (  # noqa: E402
    NO_DIAGNOSIS_STATE,
    DiagnosisState,
    conclude,
    diagnose,
)
from keepstep.monitor.diagnosis.digest import EMPTY_DIGEST_STATE, DigestState, digest  # noqa: E402
from keepstep.monitor.diagnosis.tables import Digest, merge  # noqa: E402
from keepstep.monitor.diagnosis.thresholds import Thresholds  # noqa: E402
from keepstep.monitor.records import JobRecords, joined  # noqa: E402
from keepstep.monitor.verdicts import Syndrome, Verdict  # noqa: E402

SHAPES = {1024: Shape(8, 16), 4096: Shape(8, 64), 16384: Shape(16, 128)}
FAULT_STEP, WITHIN, READ_EVERY_S, PATIENCE_S = 16, 20, 0.5, 60.0
THRESHOLDS = Thresholds()

SYNDROMES = {
    "dead process": (Syndrome.DEAD_PROCESS, "rank"),
    "dead node": (Syndrome.DEAD_PROCESS, "node"),
    "hang": (Syndrome.NON_COMMUNICATION_HANG, "rank"),
    "stuck collective": (Syndrome.COMMUNICATION_HANG, "group"),
    "stuck link": (Syndrome.COMMUNICATION_HANG, "link"),
    "mismatch": (Syndrome.MISMATCH, "rank"),
    "slow rank": (Syndrome.NON_COMMUNICATION_SLOW, "rank"),
    "slow node": (Syndrome.NON_COMMUNICATION_SLOW, "node"),
    "throttled node": (Syndrome.THROTTLED, "node"),
    "slow link": (Syndrome.COMMUNICATION_SLOW, "link"),
    "slow sender": (Syndrome.COMMUNICATION_SLOW, "sender"),
    "data stall": (Syndrome.DATA_STALL, "rank"),
    "corruption": (Syndrome.SILENT_CORRUPTION, "rank"),
    "loss not finite": (Syndrome.LOSS_NOT_FINITE, "rank"),
    "device error": (Syndrome.DEVICE_ERROR, "node"),
}

Trial = dict[str, Any]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Nothing on stdout but the last line.")
@click.option("--quick", is_flag=True, help="Fewer trials, and no accuracy at 16,384 ranks.")
@click.option(
    "--ranks",
    "sizes",
    type=int,
    multiple=True,
    help="Only jobs of this many ranks; may be given several times.",
)
@click.option("--trials", "count", type=int, help="Faults to inject at each size.")
@click.option("--seed", default=1)
def main(as_json: bool, quick: bool, sizes: tuple[int, ...], count: int | None, seed: int) -> None:
    console = Console(stderr=as_json, width=160)
    trials = {1024: 12, 4096: 3, 16384: 0} if quick else {1024: 60, 4096: 12, 16384: 4}
    healthy = {1024: 100, 4096: 20, 16384: 0} if quick else {1024: 2000, 4096: 100, 16384: 30}
    results: dict[str, Any] = {"simulation": True, "sizes": {}}
    for ranks, shape in SHAPES.items():
        if sizes and ranks not in sizes:
            continue
        outcome = accuracy(shape, trials[ranks] if count is None else count, seed, console)
        outcome |= false_alarms(shape, healthy[ranks], seed)
        outcome |= cost(shape, 2 if quick else 4, seed)
        results["sizes"][ranks] = outcome
        console.print(f"{ranks} ranks: {outcome}")
    done = results["sizes"]
    smallest, largest = min(done), max(done)
    for key in ("cpu_top", "cpu_nodes"):
        # 1 is linear in ranks.
        results[f"{key}_growth"] = round(
            done[largest][key] / done[smallest][key] / (largest / smallest), 3
        )
    console.print(report(done))
    print(json.dumps(results))


def report(sizes: dict[int, Any]) -> Table:
    table = Table(title="SIMULATED 3D-parallel jobs")
    columns = (
        "faults", "precision", "recall", "hang_s", "slow_steps", "healthy_steps", "false_alarms", "step_s",
        "cpu_top", "cpu_per_node", "cpu_nodes",
    )  # fmt: skip
    table.add_column("ranks")
    for column in columns:
        table.add_column(column)
    for ranks, outcome in sizes.items():
        table.add_row(str(ranks), *(str(outcome.get(column)) for column in columns))
    return table


def accuracy(shape: Shape, count: int, seed: int, console: Console) -> dict[str, Any]:
    """Inject faults drawn from the published mix, one a trial."""
    if not count:
        return {"faults": 0}
    rng = np.random.default_rng(seed)
    kinds: dict[str, list[Trial]] = defaultdict(list)
    for number, fault in enumerate(mixture(rng, count, shape, FAULT_STEP)):
        trial = inject(shape, fault, seed * 1000 + number)
        kinds[fault.kind].append(trial)
        if not trial["found"] or trial["wrong"]:
            console.print(f"{shape.ranks} ranks, {fault}: {trial}")
    every = [trial for some in kinds.values() for trial in some]
    right, wrong = (
        sum(trial["found"] for trial in every),
        sum(len(trial["wrong"]) for trial in every),
    )
    hangs = [trial["seconds"] for trial in every if trial["found"] and trial["hang"]]
    steps = [trial["steps"] for trial in every if trial["found"] and not trial["hang"]]
    return {
        "faults": len(every),
        "precision": round(right / max(1, right + wrong), 4),
        "recall": round(right / len(every), 4),
        "hang_s": [round(float(np.median(hangs)), 1), round(max(hangs), 1)] if hangs else None,
        "slow_steps": [float(np.median(steps)), max(steps)] if steps else None,
        "kinds": {
            kind: f"{sum(trial['found'] for trial in some)}/{len(some)}"
            for kind, some in sorted(kinds.items())
        },
    }


def inject(shape: Shape, fault: Fault, seed: int) -> Trial:
    """Follow one job from its start through a fault; stop at the right verdict, or when it should long have come."""
    job = Simulation(shape, fault, seed)
    past, verdicts = NO_DIAGNOSIS_STATE, ()
    wrong: set[str] = set()
    ring: list[np.ndarray] = []
    began_s = now_s = 0.0
    for step, records, now_s in job.steps():
        ring = overlap(ring, records)
        past, verdicts = diagnose(
            job.read(ring, now_s, job.dead(step)), job.metrics(now_s, step), past, now_s, THRESHOLDS
        )
        began_s = now_s if step < fault.step else began_s
        wrong |= wrongly(verdicts, fault, job, step)
        if any(is_right(one, fault, job) for one in verdicts) or step > fault.step + WITHIN:
            break
    hang = not np.isfinite(job.time_s).all()
    stopped_s = now_s
    while (
        hang
        and not any(is_right(one, fault, job) for one in verdicts)
        and now_s < stopped_s + PATIENCE_S
    ):
        now_s += READ_EVERY_S
        past, verdicts = diagnose(
            job.read(ring, now_s, job.dead(step)), job.metrics(now_s, step), past, now_s, THRESHOLDS
        )
        wrong |= wrongly(verdicts, fault, job, step)
    found = any(is_right(one, fault, job) for one in verdicts)
    step_s = max(past.window.step_s(), 1e-9)
    seconds = now_s - (job.fault_s if hang else began_s)
    return {
        "found": found,
        "hang": hang,
        "seconds": round(seconds, 2),
        "steps": round(seconds / step_s, 1) if hang else step - fault.step + 1,
        "wrong": sorted(wrong),
        "told": [] if found else [f"{one.syndrome}: {one.subject}" for one in verdicts],
    }


def overlap(ring: list[np.ndarray], records: list[np.ndarray]) -> list[np.ndarray]:
    """Return rings that still hold half of what was read before."""
    if not ring:
        return records
    return [joined([old[len(old) // 2 :], new]) for old, new in zip(ring, records, strict=True)]


def wrongly(verdicts: tuple[Verdict, ...], fault: Fault, job: Simulation, step: int) -> set[str]:
    return {
        f"{one.syndrome}: {one.subject}"
        for one in verdicts
        if step < fault.step or not is_right(one, fault, job)
    }


def is_right(verdict: Verdict, fault: Fault, job: Simulation) -> bool:
    """Return whether a verdict names the fault's culprit and syndrome."""
    syndrome, kind = SYNDROMES[fault.kind]
    if verdict.syndrome is not syndrome:
        return False
    stage = fault.rank // (job.shape.replicas * job.shape.tensor)
    apart = job.shape.replicas * job.shape.tensor
    other = fault.rank + apart if stage + 1 < job.shape.stages else fault.rank - apart
    subject = verdict.subject
    if kind == "rank":
        return subject.kind == "rank" and subject.ranks == (fault.rank,)
    if kind == "node":
        return subject.kind == "node" and subject.node == job.nodes[fault.rank]
    if kind == "link":
        return subject.kind == "link" and subject.ranks == (fault.rank, other)
    if kind == "sender":
        at_end = stage in (0, job.shape.stages - 1)
        return subject.ranks == ((fault.rank, other) if at_end else (fault.rank,))
    return (
        subject.kind == "group"
        and fault.rank in subject.ranks
        and len(subject.ranks) == job.shape.replicas
    )


def false_alarms(shape: Shape, steps: int, seed: int) -> dict[str, Any]:
    """Count verdicts on a healthy, noisy job."""
    if not steps:
        return {"healthy_steps": 0, "false_alarms": None}
    job = Simulation(shape, None, seed + 77)
    past: DiagnosisState = NO_DIAGNOSIS_STATE
    told: set[str] = set()
    ring: list[np.ndarray] = []
    for step, records, now_s in job.steps():
        ring = overlap(ring, records)
        past, verdicts = diagnose(
            job.read(ring, now_s, frozenset()), job.metrics(now_s, step), past, now_s, THRESHOLDS
        )
        told |= {f"step {step} {one.syndrome}: {one.subject}" for one in verdicts}
        if step == steps:
            break
    return {
        "healthy_steps": steps,
        "false_alarms": len(told),
        **({"alarms": sorted(told)[:5]} if told else {}),
    }


def cost(shape: Shape, steps: int, seed: int) -> dict[str, Any]:
    """Measure processor seconds per second of trace, read every half second: at the top of the tree, and on all nodes together.

    Nodes are digested four racks at a time (256 nodes), as one process would not be in production; that spares this process the call
    per node, and is told as `cpu_nodes`. One node's own digest is measured apart, as `cpu_per_node`.
    """
    job = Simulation(shape, None, seed + 99)
    past: DiagnosisState = NO_DIAGNOSIS_STATE
    memory: dict[int, DigestState] = {}
    alone: DigestState = EMPTY_DIGEST_STATE
    ring: list[np.ndarray] = []
    spent = {"top": 0.0, "nodes": 0.0, "one": 0.0}
    from_s = until_s = 0.0
    for step, records, end_s in job.steps():
        ring = overlap(ring, records)
        if step <= 4:
            # Warm up: the histories must hold some whole steps.
            seen = job.read(ring, end_s, frozenset())
            parts = racks(seen, memory)
            past, _ = conclude(
                merge(parts, seen.communicators),
                seen.communicators,
                job.nodes,
                {},
                past,
                end_s,
                THRESHOLDS,
            )
            alone, _ = digest(list(seen.ranks.values())[:NODE], seen.communicators, alone)
            from_s = until_s = end_s
            continue
        if step > 4 + steps:
            break
        for now_s in np.arange(until_s + READ_EVERY_S, end_s, READ_EVERY_S):
            seen = as_of(job.read(ring, float(now_s), frozenset()), float(now_s))
            began = time.process_time()
            parts = racks(seen, memory)
            spent["nodes"] += time.process_time() - began
            began = time.process_time()
            alone, _ = digest(list(seen.ranks.values())[:NODE], seen.communicators, alone)
            spent["one"] += time.process_time() - began
            began = time.process_time()
            told = merge(parts, seen.communicators)
            past, _ = conclude(
                told, seen.communicators, job.nodes, {}, past, float(now_s), THRESHOLDS
            )
            spent["top"] += time.process_time() - began
            until_s = float(now_s)
    seconds = until_s - from_s
    return {
        "step_s": round(past.window.step_s(), 2),
        "records_per_s": int(sum(map(len, records)) / max(past.window.step_s(), 1e-9)),
        "cpu_top": round(spent["top"] / seconds, 4),
        "cpu_nodes": round(spent["nodes"] / seconds, 4),
        "cpu_per_node": round(spent["one"] / seconds, 5),
    }


def racks(seen: JobRecords, memory: dict[int, DigestState]) -> list[Digest]:
    """Return the digests of 256 nodes at a time."""
    ranks, parts = list(seen.ranks.values()), []
    for first in range(0, len(ranks), 256 * NODE):
        memory[first], part = digest(
            ranks[first : first + 256 * NODE],
            seen.communicators,
            memory.get(first, EMPTY_DIGEST_STATE),
        )
        parts.append(part)
    return parts


def as_of(job: JobRecords, now_s: float) -> JobRecords:
    """Return what the rings held at an earlier moment."""
    ranks = {}
    for rank, one in job.ranks.items():
        here_s = one.read_at_s
        records = one.records[one.records["enqueued_s"] <= here_s]
        records["ended_s"][records["ended_s"] > here_s] = 0.0
        ranks[rank] = replace(one, records=records)
    return JobRecords(ranks, job.communicators)


if __name__ == "__main__":
    main()
