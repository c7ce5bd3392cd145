"""Measures how long a job makes no steps after a worker or a node is killed.

`python ops/bench/recovery.py --json [--quick] [--only cpu]`. The last line is one JSON object.
keepstep, torchrun and torchft run on one machine; torchft is measured if `.[bench]` is installed.
Every contender trains the same GPT with the same global batch on four gloo workers; each rank
appends the time of every completed step to a file, and the gaps are computed from these files.
`overhead_s` is a gap less the median of the steps before the kill, and `phases` are the parts of
keepstep's. A lost node starts again once the others have made a step: a machine's start takes no
core of theirs. `cpu_share` is the processor time of keepstep's own processes on one node, and of
etcd, while nothing fails and every step is a snapshot, over that of the workers; `cpu_ms_per_step`
are its parts. `two_nodes` has the same of two nodes, each of which keeps the other's parity. With
`--only cpu` only these are measured.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import click
import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from examples.local_cluster import JobOver, LocalCluster, read_steps  # noqa: E402
from ops.bench.contenders import NODES, torchft  # noqa: E402
from ops.bench.processes import Processes  # noqa: E402
from ops.bench.processor_time import seconds_by_role  # noqa: E402

WORKER = ROOT / "ops" / "bench" / "recovery_worker.py"
WORLD, KILL_AT = 4, 40
WINDOW = 25
DEADLINE_S = 120.0
TORCHRUN_PORT = 29417

MEASURES = ("gap_s", "overhead_s", "full_s", "lost_steps")
PHASES = ("noticed", "agreed", "groups", "restored", "first_step")
"""Until the failure is detected, the next generation opened, its process groups made, the state
restored, and a step done, by the last of all ranks."""

Line = dict[str, float]
Measure = dict[str, Any]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="One kill of each kind instead of three.")
@click.option("--only", type=click.Choice(["cpu"]), help="Only processor time; nothing is killed.")
def main(as_json: bool, quick: bool, only: str | None) -> None:
    console = Console(stderr=as_json)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    if only is not None:
        print(json.dumps(processor_shares(40 if quick else 120)))
        return
    repeats = 1 if quick else 3
    results: dict[str, Any] = {
        "keepstep": {
            "worker": median(keepstep_worker, repeats, console),
            "node": median(keepstep_node, repeats, console),
        },
        "standby": median(keepstep_standby, repeats, console),
        "torchft": {"worker": median(torchft_worker, repeats, console)},
        "torchrun": {
            "worker": median(torchrun_worker, repeats, console),
            "node": median(torchrun_node, 1, console),
        },
    }
    plain_s, keepstep_s, ratio = healthy(3 if quick else 9)
    results["step_s"] = {"plain": round(plain_s, 4), "keepstep": round(keepstep_s, 4)}
    results["healthy_ratio"] = round(ratio, 4)
    results |= processor_shares(40 if quick else 120)
    shown = {**results, "keepstep": {**results["keepstep"], "node, standby": results["standby"]}}
    table = Table(title="seconds (medians)")
    for name in ("contender", "killed", *MEASURES, *PHASES):
        table.add_column(name)
    for contender in ("torchrun", "torchft", "keepstep"):
        for killed, measure in shown[contender].items():
            table.add_row(
                contender,
                killed,
                *(str(measure.get(key)) for key in MEASURES),
                *(str(measure.get("phases", {}).get(phase, "")) for phase in PHASES),
            )
    console.print(table)
    console.print(
        f"healthy step: plain torch {plain_s:.4f} s, keepstep {keepstep_s:.4f} s, ratio {ratio:.4f}"
    )
    console.print(
        f"processor time: {results['cpu_share']:.4f} of the workers' is keepstep's, in ms a step: "
        f"{results['cpu_ms_per_step']}"
    )
    print(json.dumps(results))


def median(measure: Callable[[Path], Measure], repeats: int, console: Console) -> Measure:
    """Return the medians of several kills."""
    measures: list[Measure] = []
    for _ in range(repeats):
        directory = Path(tempfile.mkdtemp(prefix="keepstep-bench-"))
        try:
            measures.append(measure(directory))
        except Exception as error:  # noqa: BLE001 - the failure is this contender's result
            logs = " ".join(
                path.read_text(errors="replace")[-300:] for path in directory.glob("*.log")
            )
            reason = f"{error} {logs}"[-600:]
            measures.append({**dict.fromkeys(MEASURES), "reason": reason})
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        console.print(f"{measure.__name__}: {measures[-1]}")
    succeeded = [result for result in measures if result["gap_s"] is not None]
    if not succeeded:
        return measures[0]
    medians: Measure = {
        key: round(statistics.median(result[key] for result in succeeded), 3) for key in MEASURES
    }
    parts = [result["phases"] for result in succeeded if "phases" in result]
    if parts:
        medians["phases"] = {
            phase: round(statistics.median(part[phase] for part in parts), 3) for phase in PHASES
        }
    return medians


def judge(lines: list[Line], killed_at_s: float) -> Measure:
    """Compute the gaps from the steps of incarnations of the job that began after the kill."""
    before = [line for line in lines if line["at_s"] <= killed_at_s]
    new = after(lines, killed_at_s)
    full = [line for line in new if line["world_size"] == WORLD]
    # All ranks may have completed a step that was in progress at the kill.
    reached = max(line["step"] for line in lines if line not in new)
    gap_s = new[0]["at_s"] - killed_at_s
    return {
        "gap_s": gap_s,
        "overhead_s": gap_s - step_before_s(before),
        "full_s": full[0]["at_s"] - killed_at_s,
        "lost_steps": max(0.0, reached - min(line["step"] for line in new) + 1),
    }


def step_before_s(lines: list[Line]) -> float:
    """Return the median seconds between the steps of rank 0."""
    at_s = [line["at_s"] for line in lines if line["rank"] == 0]
    return statistics.median(later - sooner for sooner, later in itertools.pairwise(at_s))


def phases(cluster: LocalCluster, killed_at_s: float) -> Measure:
    """Return the parts of the recovery from a kill, in seconds.

    Nothing if the job does not have them: a node that returns at once may begin another generation
    before the leader has noted the times.
    """
    wall_s = killed_at_s + time.time() - time.monotonic()
    try:
        view = cluster.wait_until(
            lambda view: any(recovery.after_failure for recovery in view.history.recoveries), 5.0
        )
    except (TimeoutError, JobOver):
        return {}
    recovery = next(found for found in view.history.recoveries if found.after_failure)
    times = (
        wall_s, recovery.detected_at_s, recovery.opened_at_s, recovery.ready_at_s,
        recovery.restored_at_s, recovery.stepped_at_s,
    )  # fmt: skip
    parts = itertools.pairwise(times)
    return {"phases": {n: later - sooner for n, (sooner, later) in zip(PHASES, parts, strict=True)}}


class Job(Protocol):
    """Whose processes make the steps."""

    @property
    def is_over(self) -> bool:
        """Whether the steps that are waited for cannot come any more."""
        ...

    def output(self) -> str:
        """Return the end of its output."""
        ...


def wait_for(
    job: Job,
    directory: Path,
    condition: Callable[[list[Line]], bool],
    every_s: float = 0.05,
    limit_s: float = DEADLINE_S,
) -> list[Line]:
    """Read the lines of a job's ranks until a condition holds; return the lines.

    Raises:
        JobOver: it did not hold while there was a job; the message has the job's last output.
        TimeoutError: it did not hold in time.
    """
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        # Asked before the lines are read, so that the last of them count.
        is_over = job.is_over
        lines = read_steps(directory)
        if condition(lines):
            return lines
        if is_over:
            raise JobOver(
                f"the job has ended before its ranks reached the condition:\n{job.output()}"
            )
        time.sleep(every_s)
    raise TimeoutError(f"the ranks did not reach the condition within {limit_s:.0f} s")


def steps_reached(step: int) -> Callable[[list[Line]], bool]:
    return lambda lines: len({line["rank"] for line in lines if line["step"] >= step}) == WORLD


def after(lines: list[Line], killed_at_s: float) -> list[Line]:
    """Return the lines of incarnations of the job that began after the kill."""
    epochs = {line["epoch"] for line in lines if line["at_s"] <= killed_at_s}
    return [line for line in lines if line["epoch"] not in epochs]


def renewed(killed_at_s: float) -> Callable[[list[Line]], bool]:
    """Return whether all ranks of a new incarnation have made a step."""

    def has_renewed(lines: list[Line]) -> bool:
        new = after(lines, killed_at_s)
        return bool(new) and len({line["rank"] for line in new}) >= new[0]["world_size"]

    return has_renewed


def recovered(killed_at_s: float) -> Callable[[list[Line]], bool]:
    """Return whether a new incarnation has made some steps with all ranks."""

    def has_recovered(lines: list[Line]) -> bool:
        full = [line for line in after(lines, killed_at_s) if line["world_size"] == WORLD]
        return len(full) >= 2 * WORLD

    return has_recovered


def kill_rank(directory: Path, rank: int) -> float:
    pid = int(next(line["pid"] for line in reversed(read_steps(directory)) if line["rank"] == rank))
    at_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return at_s


def torchrun(directory: Path, mode: str, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3", *options,
        str(WORKER), mode, str(directory),
    ]  # fmt: skip


def torchrun_worker(directory: Path) -> Measure:
    command = torchrun(directory, "torchrun", "--standalone", "--nproc-per-node", str(WORLD))
    with closing(Processes(directory)) as job:
        job.run(0, "torchrun", command)
        wait_for(job, directory, steps_reached(KILL_AT))
        at_s = kill_rank(directory, 3)
        return judge(wait_for(job, directory, recovered(at_s)), at_s)


def torchrun_node(directory: Path) -> Measure:
    command = torchrun(
        directory, "torchrun", "--nnodes", "1:2", "--nproc-per-node", "2",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{TORCHRUN_PORT}",
        "--rdzv-id", "bench", "--local-addr", "127.0.0.1",
    )  # fmt: skip
    with closing(Processes(directory)) as job:
        job.run(0, "node-0", command)
        # The first agent serves the store, so it must start first; the second is killed.
        wait_for(
            job,
            directory,
            lambda _: any(
                connection.laddr.port == TORCHRUN_PORT
                for connection in psutil.net_connections("tcp")
            ),
        )
        job.run(1, "node-1", command)
        wait_for(job, directory, steps_reached(KILL_AT))
        at_s = time.monotonic()
        job.kill(1)
        wait_for(job, directory, renewed(at_s))
        job.run(1, "node-1", command)
        return judge(wait_for(job, directory, recovered(at_s)), at_s)


def torchft_worker(directory: Path) -> Measure:
    with torchft(directory, WORKER) as job:
        for node in range(NODES):
            job.start(node)
        wait_for(job, directory, steps_reached(KILL_AT))
        at_s = kill_rank(directory, 3)
        job.start_group(3)

        def full(lines: list[Line]) -> list[Line]:
            return [
                line
                for line in lines
                if line["rank"] == 3 and line["at_s"] > at_s and line["world_size"] == WORLD
            ]

        lines = wait_for(job, directory, lambda lines: bool(full(lines)))
        survivors = [line for line in lines if line["at_s"] > at_s and line["rank"] != 3]
        first = {line["rank"]: line["at_s"] for line in reversed(survivors)}
        gap_s = max(first.values()) - at_s
        return {
            "gap_s": gap_s,
            "overhead_s": gap_s - step_before_s([line for line in lines if line["at_s"] <= at_s]),
            "full_s": full(lines)[0]["at_s"] - at_s,
            "lost_steps": 0.0,
        }


def keepstep(directory: Path, nodes: int) -> LocalCluster:
    return LocalCluster(
        "bench", [str(WORKER), "keepstep", str(directory)],
        nnodes=f"1:{nodes}", workers=WORLD // nodes, log=directory / "agents",
    )  # fmt: skip


def keepstep_worker(directory: Path) -> Measure:
    with keepstep(directory, 1) as cluster:
        cluster.start("node-0")
        # The spare becomes ready after the job has started; wait for it.
        wait_for(
            cluster,
            directory,
            lambda lines: (
                steps_reached(KILL_AT)(lines) and len(cluster.workers_of("node-0")) > WORLD
            ),
        )
        at_s = kill_rank(directory, 3)
        measure = judge(wait_for(cluster, directory, recovered(at_s)), at_s)
        return measure | phases(cluster, at_s)


def keepstep_node(directory: Path) -> Measure:
    with keepstep(directory, 2) as cluster:
        for node in ("node-0", "node-1"):
            cluster.start(node, "--rdzv-conf", "last_call_timeout=30")
        wait_for(cluster, directory, steps_reached(KILL_AT))
        at_s = cluster.kill("node-1")
        wait_for(cluster, directory, renewed(at_s))
        cluster.start("node-1", "--rdzv-conf", "last_call_timeout=30")
        measure = judge(wait_for(cluster, directory, recovered(at_s)), at_s)
        return measure | phases(cluster, at_s)


def keepstep_standby(directory: Path) -> Measure:
    """Kill a node whose place another one takes, which was beyond the maximum until then."""
    with keepstep(directory, 2) as cluster:
        for node in ("node-0", "node-1"):
            cluster.start(node, "--rdzv-conf", "last_call_timeout=30")
        first = cluster.wait_until(lambda view: view.generation is not None, DEADLINE_S)
        assert first.generation is not None
        victim = first.generation.members[1].node
        cluster.start("node-2", "--rdzv-conf", "last_call_timeout=30")
        cluster.wait_until(
            lambda view: "node-2" in view.nodes and view.nodes["node-2"].record.warm, DEADLINE_S
        )
        # Not while the standby node's processes still begin.
        begin = max(line["step"] for line in read_steps(directory)) + WINDOW
        wait_for(cluster, directory, steps_reached(max(KILL_AT, int(begin))))
        at_s = cluster.kill(victim)
        measure = judge(wait_for(cluster, directory, recovered(at_s)), at_s)
        return measure | phases(cluster, at_s)


def healthy(pairs: int) -> tuple[float, float, float]:
    """Return the step times of plain torch and of keepstep with snapshots, and their ratio.

    keepstep takes a snapshot after every step.

    Both jobs run, and their workers are stopped and continued in turn, so that a drift of the
    machine affects both equally. A window is as long as the interval of keepstep's stored
    checkpoints; the order within a pair alternates, and the ratio is the median over pairs.
    """
    directories = {
        mode: Path(tempfile.mkdtemp(prefix="keepstep-bench-")) for mode in ("plain", "keepstep")
    }
    try:
        with (
            closing(Processes(directories["plain"])) as plain,
            keepstep(directories["keepstep"], 1) as cluster,
        ):
            options = ("--standalone", "--nproc-per-node", str(WORLD))
            plain.run(0, "plain", torchrun(directories["plain"], "plain", *options))
            cluster.start("node-0", "--spares", "0")
            jobs: dict[str, Job] = {"plain": plain, "keepstep": cluster}
            for mode, directory in directories.items():
                wait_for(jobs[mode], directory, steps_reached(10))
            workers = {mode: pids(directory) for mode, directory in directories.items()}
            signal_all(workers["keepstep"], signal.SIGSTOP)
            step_s: dict[str, list[float]] = {mode: [] for mode in directories}
            for number in range(pairs):
                order = ("plain", "keepstep") if number % 2 else ("keepstep", "plain")
                for mode, other in (order, order[::-1]):
                    signal_all(workers[other], signal.SIGSTOP)
                    signal_all(workers[mode], signal.SIGCONT)
                    step_s[mode].append(window(jobs[mode], directories[mode]))
            signal_all([*workers["plain"], *workers["keepstep"]], signal.SIGCONT)
    finally:
        for directory in directories.values():
            shutil.rmtree(directory, ignore_errors=True)
    pairs_s = zip(step_s["plain"], step_s["keepstep"], strict=True)
    ratios = [keepstep_s / plain_s for plain_s, keepstep_s in pairs_s]
    return (
        statistics.median(step_s["plain"]),
        statistics.median(step_s["keepstep"]),
        statistics.median(ratios),
    )


def processor_shares(steps: int) -> Measure:
    """Return the processor time of keepstep's processes other than workers, of one node and of two.

    Args:
        steps: how many steps a window has, each with a snapshot.
    """
    one_node, two_nodes = processor_share(1, steps), processor_share(2, steps)
    return {**one_node, "two_nodes": two_nodes}


def processor_share(nodes: int, steps: int) -> Measure:
    """Return the processor time of keepstep's processes other than workers, a step and in all."""
    directory = Path(tempfile.mkdtemp(prefix="keepstep-bench-"))
    try:
        with keepstep(directory, nodes) as cluster:
            for number in range(nodes):
                cluster.start(f"node-{number}", "--rdzv-conf", "last_call_timeout=30")
            # Spares are warm by then.
            begin = last_step(wait_for(cluster, directory, steps_reached(KILL_AT)))
            before = processor_seconds(cluster)
            reached = steps_reached(begin + steps)
            end = last_step(wait_for(cluster, directory, reached, every_s=1.0))
            after = processor_seconds(cluster)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    ms = {role: 1000 * (after[role] - before[role]) / (end - begin) for role in after}
    workers_ms = ms.pop("worker")
    return {
        "cpu_share": round(sum(ms.values()) / workers_ms, 4),
        "cpu_ms_per_step": {
            "worker": round(workers_ms, 1), **{role: round(value, 2) for role, value in ms.items()}
        },
    }  # fmt: skip


def processor_seconds(cluster: LocalCluster) -> dict[str, float]:
    return seconds_by_role((agent.pid for agent in cluster.agents.values()), cluster.etcd_pid)


def last_step(lines: list[Line]) -> int:
    return int(max(line["step"] for line in lines))


def window(job: Job, directory: Path) -> float:
    """Return the mean step time of the next window, which begins after two steps."""
    begin = max(line["step"] for line in read_steps(directory)) + 2
    # Reading the files disturbs the measurement, so it is done seldom.
    lines = wait_for(job, directory, steps_reached(int(begin) + WINDOW), every_s=0.5)
    at_s = {line["step"]: line["at_s"] for line in lines if line["rank"] == 0}
    return (at_s[begin + WINDOW] - at_s[begin]) / WINDOW


def pids(directory: Path) -> list[int]:
    return sorted({int(line["pid"]) for line in read_steps(directory)})


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


if __name__ == "__main__":
    main()
