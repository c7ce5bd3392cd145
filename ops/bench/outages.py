"""Measures how many steps are computed again after the coordinator was away, and how long none is.

`python ops/bench/outages.py --json [--quick]`. The last line is one JSON object: for each case its
kind, how many seconds the coordinator was away and how many members it has, `recomputed`, the steps
that a rank has completed twice, and `gap_s`, the longest time without a step. A job that does not
go on has the gap null, all of its steps recomputed, and a reason. The exit status is 1 if more than
one step was computed again in any case.

Three nodes train over gloo with a snapshot after each step, and a checkpoint every 20 steps. All of
the coordinator's members are stopped (SIGSTOP), killed and started again with their data or with
none, or cut off from the nodes, both ways or one; or every process of all nodes is sent SIGTERM,
and the nodes are started again. The faults are those of `ops/bench/chaos`. In the last two cases
a node that serves the coordinator is killed, and its line is run again: it alone (`members` 1), or
with the two others (`members` 3). Cuts need root, /dev/net/tun and ip; `left_out` names them where
that is missing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).parent)
if HERE in sys.path:
    sys.path.remove(HERE)
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"

import click  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from examples.local_cluster import read_steps, script  # noqa: E402
from keepstep.elastic.rendezvous.records import NodePhase  # noqa: E402
from keepstep.private_files import write_file  # noqa: E402
from ops.bench.chaos.cluster import JOB, NAMES, ChaosCluster  # noqa: E402
from ops.bench.chaos.faults import Harm, Injected  # noqa: E402
from ops.bench.chaos.progress import NoProgress, Patience, Watcher  # noqa: E402
from ops.bench.chaos.schedule import KINDS, Ability, Fault, JobPlan  # noqa: E402
from ops.bench.switched_network import is_possible as can_have_network  # noqa: E402

OUTAGES = (
    "coordinator_stop", "coordinator_away", "coordinator_lost", "coordinator_unreachable",
    "requests_lost", "answers_lost", "all_group_term",
)  # fmt: skip
SERVING_NODE, MEMBERS_NODE = "serving_node_killed", "members_node_killed"
"""Kinds of jobs whose first node serves the coordinator, alone or with the others."""
SECONDS, QUICK_SECONDS = (2.0, 5.0, 10.0, 30.0, 60.0), (10.0,)
MEMBERS, QUICK_MEMBERS = (1, 3), (1,)
ALLOWED = 1
_PORT = 29400
_LEASE_TTL_S = 5.0
_QUIET_S = _LEASE_TTL_S
"""For so long nothing may change before a case counts as over: a lease that has ended shows."""
_STEPS = 10
"""How many steps a job makes between two cases, at least."""
_PLAN = JobPlan(is_elastic=True, has_objects=False, workers=1, spares=0, checkpoint_every=20)

Line = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Case:
    """One outage: its kind, how long it lasts, and how many members the coordinator has."""

    kind: str
    seconds: float
    members: int


class OutageCluster(ChaosCluster):
    """The job, which records the steps that it has completed."""

    def script(self) -> list[str]:
        """Return the training script and its arguments."""
        return script(
            "train.py", "--steps", "1000000", "--width", "64", "--layers", "2", "--context", "64",
            "--global-batch", "6", "--pause", "0.05", "--log", str(self.records),
            "--checkpoint", self.storage.url, "--checkpoint-every", str(_PLAN.checkpoint_every),
        )  # fmt: skip

    def start_all(self) -> None:
        """Start all nodes."""
        for node in NAMES:
            self.start(node)


class ServingCluster(OutageCluster):
    """The job whose first nodes serve the coordinator."""

    serving = 1

    @property
    def names(self) -> str:
        """The nodes that serve it, as for `--rdzv-endpoint`."""
        return ",".join(self.places.endpoint(place, _PORT) for place in range(self.serving))

    @property
    def url(self) -> str:
        """The coordinator's URL."""
        return f"keepstep://{self.names}"

    def command(self, node: str, *options: str) -> list[str]:
        """Return the command line of a node's agent."""
        command = super().command(node, *options)
        place = command.index("--store")
        command[place : place + 2] = ["--rdzv-endpoint", self.names]
        return command


class MembersCluster(ServingCluster):
    """The job whose nodes serve the coordinator together."""

    serving = len(NAMES)


class Job:
    """A job while it runs, and what is done to it."""

    def __init__(self, cluster: OutageCluster, watcher: Watcher) -> None:
        self._cluster, self._watcher = cluster, watcher
        self._patience = Patience()
        self._harm = Harm(cluster, watcher, self._patience)
        self._settled: tuple[object, float] = (None, 0.0)

    def start(self) -> None:
        """Start all nodes, and wait until they have committed steps."""
        self._cluster.start_all()
        begun_s = time.monotonic()
        self._settle()
        self._patience.measured(time.monotonic() - begun_s)

    def suffer(self, case: Case) -> dict[str, Any]:
        """Let an outage happen, and measure it once the job has gone on for a while.

        Raises:
            NoProgress: the job does not go on.
        """
        begun_s = time.monotonic()
        injected = self._inject(case)
        self._patience.wait_until(
            "nodes that were sent SIGTERM have left",
            lambda: all(self._cluster.agents[node].poll() is not None for node in injected.leaving),
        )
        time.sleep(case.seconds)
        injected.end()
        self._settle()
        lines = read_steps(self._cluster.records)
        return {"recomputed": recomputed(lines, begun_s), "gap_s": round(gap_s(lines, begun_s), 1)}

    def steps(self) -> int:
        """Return how many steps the job has ever completed."""
        return len({line["step"] for line in read_steps(self._cluster.records)})

    def _inject(self, case: Case) -> Injected:
        if case.kind not in (SERVING_NODE, MEMBERS_NODE):
            return self._harm.inject(Fault(0, case.kind, 0, 1, case.seconds, 0.5))
        self._cluster.kill(NAMES[0])

        def end() -> None:
            self._cluster.start(NAMES[0])
            self._watcher.restart()

        return Injected(end=end)

    def _settle(self) -> None:
        """Wait until all nodes have made and committed steps, and nothing changes any more."""
        from_wall_s, from_s = time.time(), time.monotonic()

        def is_settled() -> bool:
            view = self._watcher.view
            leases = {node: joined.record.lease for node, joined in view.nodes.items()}
            state = (view.secret, view.generation_number, leases, view.is_closing)
            now_s = time.monotonic()
            if state != self._settled[0]:
                self._settled = (state, now_s)
            return (
                now_s > max(self._settled[1], from_s) + _QUIET_S
                and view.generation is not None
                and len(view.generation.members) == len(NAMES)
                and not view.is_closing
                and set(view.nodes) == set(NAMES)
                and all(j.record.phase is NodePhase.RUNNING for j in view.nodes.values())
                and view.snapshot is not None
                and view.snapshot.at_s > from_wall_s
                and self._steps_since(from_s) >= _STEPS
            )

        self._patience.wait_until("all nodes make and commit steps", is_settled)

    def _steps_since(self, at_s: float) -> int:
        lines = read_steps(self._cluster.records)
        return sum(line["at_s"] > at_s and line["rank"] == 0 for line in lines)


def recomputed(lines: Iterable[Line], since_s: float) -> int:
    """Return how many steps a rank has completed again since a moment, the most of all ranks."""
    reached: dict[float, float] = defaultdict(int)
    again = Counter[float]()
    for line in sorted(lines, key=lambda line: line["at_s"]):
        if line["step"] <= reached[line["rank"]] and line["at_s"] >= since_s:
            again[line["rank"]] += 1
        reached[line["rank"]] = max(reached[line["rank"]], line["step"])
    return max(again.values(), default=0)


def gap_s(lines: Iterable[Line], since_s: float) -> float:
    """Return the longest time since a moment in which no rank has completed a step, in seconds."""
    times = sorted(line["at_s"] for line in lines if line["at_s"] > since_s)
    return max(later - sooner for sooner, later in pairwise([since_s, *times]))


def play(cases: Sequence[Case], directory: Path, console: Console) -> Iterator[dict[str, Any]]:
    """Yield the results of cases of one number of members; another job is begun after a failure."""
    remaining = list(cases)
    abilities = {Ability.FILES} | ({Ability.NETWORK} if can_have_network() else set())
    while remaining:
        case = remaining[0]
        kinds = {SERVING_NODE: ServingCluster, MEMBERS_NODE: MembersCluster}
        kind = kinds.get(case.kind, OutageCluster)
        place = directory / f"{case.kind}-{case.members}-{len(remaining)}"
        own_etcd = 0 if case.kind in kinds else case.members
        with (
            kind(place, _PLAN, abilities, _LEASE_TTL_S, own_etcd) as cluster,
            Watcher(cluster.url, JOB) as watcher,
        ):
            job = Job(cluster, watcher)
            job.start()
            while remaining:
                case = remaining.pop(0)
                measured: dict[str, Any]
                try:
                    measured = job.suffer(case)
                except NoProgress as error:
                    console.print(cluster.output()[-6000:], highlight=False, markup=False)
                    measured = {"recomputed": job.steps(), "gap_s": None, "reason": str(error)}
                result = {
                    "kind": case.kind, "seconds": case.seconds, "members": case.members, **measured
                }  # fmt: skip
                console.print(result)
                yield result
                if measured["gap_s"] is None:
                    break


@click.command()
@click.option("--json", "only_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="Outages of 10 s, of a coordinator of one member.")
@click.option(
    "--kind", "kinds", type=click.Choice([*OUTAGES, SERVING_NODE, MEMBERS_NODE]), multiple=True,
    default=(*OUTAGES, SERVING_NODE, MEMBERS_NODE), help="Only this kind; may be repeated.",
)  # fmt: skip
@click.option("--seconds", type=float, multiple=True, help="Only of this length; may be repeated.")
@click.option(
    "--members", type=int, multiple=True, help="Only with this many members; may be repeated."
)
@click.option("--keep", type=click.Path(path_type=Path), help="Keep all logs in this directory.")
def main(
    only_json: bool,
    quick: bool,
    kinds: tuple[str, ...],
    seconds: tuple[float, ...],
    members: tuple[int, ...],
    keep: Path | None,
) -> None:
    console = Console(stderr=only_json)
    has_network = can_have_network()
    left_out = {
        kind: f"needs {Ability.NETWORK}"
        for kind in kinds
        if kind in KINDS and KINDS[kind].needs and not has_network
    }
    seconds = seconds or (QUICK_SECONDS if quick else SECONDS)
    members = members or (QUICK_MEMBERS if quick else MEMBERS)
    possible = [kind for kind in kinds if kind not in left_out]
    runs = [
        [Case(kind, s, count) for kind in possible if kind in KINDS for s in seconds]
        for count in members
    ]
    runs += [
        [Case(kind, s, served_by) for s in seconds]
        for kind, served_by in ((SERVING_NODE, 1), (MEMBERS_NODE, len(NAMES)))
        if kind in possible
    ]
    # All contexts end as after an error, so that nothing of the job outlives this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    base = keep or Path(tempfile.mkdtemp(prefix="keepstep-outages-"))
    base.mkdir(parents=True, exist_ok=True)
    secret_file = base / "secret"
    write_file(secret_file, secrets.token_hex(32).encode())
    os.environ["KEEPSTEP_SECRET_FILE"] = str(secret_file)
    results: list[dict[str, Any]] = []
    try:
        for cases in runs:
            # Each job has networks of its own, and threads of libraries stay in their first one.
            with multiprocessing.get_context("fork").Pool(1) as pool:
                results += pool.apply(_play, (cases, base, only_json))
    finally:
        if keep is None:
            shutil.rmtree(base, ignore_errors=True)
    worst = max((result["recomputed"] for result in results), default=0)
    console.print(_table(results))
    print(json.dumps({"cases": results, "recomputed_worst": worst, "left_out": left_out}))
    sys.exit(worst > ALLOWED)


def _play(cases: Sequence[Case], directory: Path, only_json: bool) -> list[dict[str, Any]]:
    return list(play(cases, directory, Console(stderr=only_json)))


def _table(results: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="outages of the coordinator")
    for name in ("kind", "seconds", "members", "recomputed", "gap_s"):
        table.add_column(name)
    for result in results:
        table.add_row(*(str(result[column.header]) for column in table.columns))
    return table


if __name__ == "__main__":
    main()
