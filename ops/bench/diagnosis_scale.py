"""Measures accuracy, delay and cost of the diagnosis on simulated jobs of 1,024 to 16,384 ranks.

`python ops/bench/diagnosis_scale.py --json [--quick]`. The last line is one JSON object. A
SIMULATION: `ops/bench/traces.py` makes the traces; the diagnosis is the code that diagnoses real
    jobs. Seconds to the verdict are in the trace's time.

A fault counts as found if a verdict has its culprit and syndrome within 20 steps (one end stands
for a link only if the link is that end's only one). Every other verdict counts against the
precision, and on healthy traces as a false alarm.
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
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="Fewer trials, and no accuracy at 16,384 ranks.")
@click.option(
    "--ranks",
    "sizes",
    type=int,
    multiple=True,
    help="Only jobs with this number of ranks; may be given several times.",
)
@click.option("--trials", "count", type=int, help="Number of faults to inject at each size.")
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
    by_ranks = results["sizes"]
    smallest, largest = min(by_ranks), max(by_ranks)
    for key in ("cpu_top", "cpu_nodes"):
        # 1 is linear in ranks.
        results[f"{key}_growth"] = round(
            by_ranks[largest][key] / by_ranks[smallest][key] / (largest / smallest), 3
        )
    console.print(report(by_ranks))
    print(json.dumps(results))


def report(sizes: dict[int, Any]) -> Table:
    table = Table(title="SIMULATED 3D-parallel jobs")
    columns = (
        "faults", "precision", "recall", "hang_s", "slow_steps", "healthy_steps", "false_alarms",
        "step_s", "cpu_top", "cpu_per_node", "cpu_nodes",
    )  # fmt: skip
    table.add_column("ranks")
    for column in columns:
        table.add_column(column)
    for ranks, outcome in sizes.items():
        table.add_row(str(ranks), *(str(outcome.get(column)) for column in columns))
    return table


def accuracy(shape: Shape, count: int, seed: int, console: Console) -> dict[str, Any]:
    """Inject faults drawn from published frequencies, one per trial."""
    if not count:
        return {"faults": 0}
    rng = np.random.default_rng(seed)
    kinds: dict[str, list[Trial]] = defaultdict(list)
    for number, fault in enumerate(mixture(rng, count, shape, FAULT_STEP)):
        trial = inject(shape, fault, seed * 1000 + number)
        kinds[fault.kind].append(trial)
        if not trial["found"] or trial["wrong"]:
            console.print(f"{shape.ranks} ranks, {fault}: {trial}")
    all_trials = [trial for trials in kinds.values() for trial in trials]
    right = sum(trial["found"] for trial in all_trials)
    wrong = sum(len(trial["wrong"]) for trial in all_trials)
    hangs = [trial["seconds"] for trial in all_trials if trial["found"] and trial["hang"]]
    steps = [trial["steps"] for trial in all_trials if trial["found"] and not trial["hang"]]
    return {
        "faults": len(all_trials),
        "precision": round(right / max(1, right + wrong), 4),
        "recall": round(right / len(all_trials), 4),
        "hang_s": [round(float(np.median(hangs)), 1), round(max(hangs), 1)] if hangs else None,
        "slow_steps": [float(np.median(steps)), max(steps)] if steps else None,
        "kinds": {
            kind: f"{sum(trial['found'] for trial in trials)}/{len(trials)}"
            for kind, trials in sorted(kinds.items())
        },
    }


def inject(shape: Shape, fault: Fault, seed: int) -> Trial:
    """Diagnose one job from its start through a fault, until the right verdict or a deadline."""
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
        wrong |= wrong_verdicts(verdicts, fault, job, step)
        if has_right_verdict(verdicts, fault, job) or step > fault.step + WITHIN:
            break
    hang = not np.isfinite(job.time_s).all()
    stopped_s = now_s
    while hang and not has_right_verdict(verdicts, fault, job) and now_s < stopped_s + PATIENCE_S:
        now_s += READ_EVERY_S
        past, verdicts = diagnose(
            job.read(ring, now_s, job.dead(step)), job.metrics(now_s, step), past, now_s, THRESHOLDS
        )
        wrong |= wrong_verdicts(verdicts, fault, job, step)
    found = has_right_verdict(verdicts, fault, job)
    step_s = max(past.window.step_s(), 1e-9)
    seconds = now_s - (job.fault_s if hang else began_s)
    return {
        "found": found,
        "hang": hang,
        "seconds": round(seconds, 2),
        "steps": round(seconds / step_s, 1) if hang else step - fault.step + 1,
        "wrong": sorted(wrong),
        "verdicts": [] if found else list(map(describe, verdicts)),
    }


def overlap(ring: list[np.ndarray], records: list[np.ndarray]) -> list[np.ndarray]:
    """Return rings that still contain half of the records of the last reading."""
    if not ring:
        return records
    return [joined([old[len(old) // 2 :], new]) for old, new in zip(ring, records, strict=True)]


def describe(verdict: Verdict) -> str:
    return f"{verdict.syndrome}: {verdict.subject}"


def wrong_verdicts(
    verdicts: tuple[Verdict, ...], fault: Fault, job: Simulation, step: int
) -> set[str]:
    return {
        describe(verdict)
        for verdict in verdicts
        if step < fault.step or not is_right(verdict, fault, job)
    }


def has_right_verdict(verdicts: tuple[Verdict, ...], fault: Fault, job: Simulation) -> bool:
    return any(is_right(verdict, fault, job) for verdict in verdicts)


def is_right(verdict: Verdict, fault: Fault, job: Simulation) -> bool:
    """Whether a verdict has the fault's culprit and syndrome."""
    syndrome, kind = SYNDROMES[fault.kind]
    if verdict.syndrome is not syndrome:
        return False
    stage = fault.rank // (job.shape.replicas * job.shape.tensor)
    stage_ranks = job.shape.replicas * job.shape.tensor
    is_last_stage = stage + 1 == job.shape.stages
    other = fault.rank - stage_ranks if is_last_stage else fault.rank + stage_ranks
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
    alarms: set[str] = set()
    ring: list[np.ndarray] = []
    for step, records, now_s in job.steps():
        ring = overlap(ring, records)
        past, verdicts = diagnose(
            job.read(ring, now_s, frozenset()), job.metrics(now_s, step), past, now_s, THRESHOLDS
        )
        alarms |= {f"step {step} {describe(verdict)}" for verdict in verdicts}
        if step == steps:
            break
    return {
        "healthy_steps": steps,
        "false_alarms": len(alarms),
        **({"alarms": sorted(alarms)[:5]} if alarms else {}),
    }


def cost(shape: Shape, steps: int, seed: int) -> dict[str, Any]:
    """Measure processor seconds per second of trace, which is read every half second.

    `cpu_top` is the top of the tree; `cpu_nodes` is all nodes together, digested 256 nodes (four
    racks) per call, unlike in production, to save the call per node; `cpu_per_node` is the digest
    of one node, measured separately.
    """
    job = Simulation(shape, None, seed + 99)
    past: DiagnosisState = NO_DIAGNOSIS_STATE
    memory: dict[int, DigestState] = {}
    node_state: DigestState = EMPTY_DIGEST_STATE
    ring: list[np.ndarray] = []
    spent = {"top": 0.0, "nodes": 0.0, "node": 0.0}
    from_s = until_s = 0.0
    for step, records, end_s in job.steps():
        ring = overlap(ring, records)
        if step <= 4:
            # Warm up: the histories must contain some complete steps.
            rings = job.read(ring, end_s, frozenset())
            parts = racks(rings, memory)
            past, _ = conclude(
                merge(parts, rings.communicators),
                rings.communicators,
                job.nodes,
                {},
                past,
                end_s,
                THRESHOLDS,
            )
            node_state, _ = digest(
                list(rings.ranks.values())[:NODE], rings.communicators, node_state
            )
            from_s = until_s = end_s
            continue
        if step > 4 + steps:
            break
        for now_s in np.arange(until_s + READ_EVERY_S, end_s, READ_EVERY_S):
            rings = as_of(job.read(ring, float(now_s), frozenset()), float(now_s))
            began = time.process_time()
            parts = racks(rings, memory)
            spent["nodes"] += time.process_time() - began
            began = time.process_time()
            node_state, _ = digest(
                list(rings.ranks.values())[:NODE], rings.communicators, node_state
            )
            spent["node"] += time.process_time() - began
            began = time.process_time()
            merged = merge(parts, rings.communicators)
            past, _ = conclude(
                merged, rings.communicators, job.nodes, {}, past, float(now_s), THRESHOLDS
            )
            spent["top"] += time.process_time() - began
            until_s = float(now_s)
    seconds = until_s - from_s
    return {
        "step_s": round(past.window.step_s(), 2),
        "records_per_s": int(sum(map(len, records)) / max(past.window.step_s(), 1e-9)),
        "cpu_top": round(spent["top"] / seconds, 4),
        "cpu_nodes": round(spent["nodes"] / seconds, 4),
        "cpu_per_node": round(spent["node"] / seconds, 5),
    }


def racks(rings: JobRecords, memory: dict[int, DigestState]) -> list[Digest]:
    """Return the digests, each of 256 nodes."""
    ranks, parts = list(rings.ranks.values()), []
    for first in range(0, len(ranks), 256 * NODE):
        memory[first], part = digest(
            ranks[first : first + 256 * NODE],
            rings.communicators,
            memory.get(first, EMPTY_DIGEST_STATE),
        )
        parts.append(part)
    return parts


def as_of(job: JobRecords, now_s: float) -> JobRecords:
    """Return what the rings contained at an earlier time."""
    ranks = {}
    for rank, ring in job.ranks.items():
        read_at_s = ring.read_at_s
        records = ring.records[ring.records["enqueued_s"] <= read_at_s]
        records["ended_s"][records["ended_s"] > read_at_s] = 0.0
        ranks[rank] = replace(ring, records=records)
    return JobRecords(ranks, job.communicators)


if __name__ == "__main__":
    main()
