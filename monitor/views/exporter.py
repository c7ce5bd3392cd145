"""Exports a daemon's state as Prometheus series.

Names follow the conventions of Prometheus: base units, `_total` for counters, `_ratio` for shares.
A daemon exports the ranks and the measures of its own node only, so every series exists once if all
daemons of a tree are scraped. Series of the whole job come from the daemon that diagnoses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from keepstep.monitor.contracts import JobStatus
from keepstep.monitor.node.node_series import metrics_from_json, node_series
from keepstep.monitor.records import Ending
from keepstep.monitor.verdicts import Syndrome
from keepstep.monitor.views.pages import job_status_json, reported
from keepstep.monitor.watch.watch import Watch

_REPORTED = {
    "loss": ("keepstep_job_loss", "Newest loss that the loop reports, the median of the ranks."),
    "gradient_norm": (
        "keepstep_job_gradient_norm",
        "Newest norm of the gradients that the loop reports.",
    ),
    "tokens_per_s": (
        "keepstep_job_tokens_per_second",
        "Tokens of all ranks in a step, by the median time of the newest steps.",
    ),
}
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(watch: Watch, job: str, job_status: JobStatus | None) -> bytes:
    """Return all series in Prometheus' text format. Called on the thread that owns the watch."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(watch, job, job_status))
    return generate_latest(registry)


def series(watch: Watch, job: str, job_status: JobStatus | None) -> list[Metric]:
    """Return all series. Called on the thread that owns the watch."""
    return list(_Collector(watch, job, job_status).collect())


class _Collector(Collector):
    """Builds all families at every scrape, so there are no series of ranks that no longer exist."""

    def __init__(self, watch: Watch, job: str, job_status: JobStatus | None) -> None:
        self._watch = watch
        self._job = job
        self._job_status = job_status

    def collect(self) -> Iterator[Metric]:
        yield from self._monitor()
        yield from self._ranks()
        own = self._watch.nodes.get(self._watch.node)
        if own is not None and own.metrics:
            yield from node_series(metrics_from_json(own.metrics), self._job, self._watch.node)
        if self._watch.diagnoses:
            yield from self._verdicts()
            yield from self._whole_job()

    def _monitor(self) -> Iterator[Metric]:
        info = InfoMetricFamily("keepstep_monitor", "The monitor daemon.", labels=["job", "node"])
        info.add_metric([self._job, self._watch.node], {"version": version("keepstep")})
        yield info
        own = self._watch.nodes.get(self._watch.node)
        used = CounterMetricFamily(
            "keepstep_monitor_cpu_seconds",
            "Processor time used by the monitor itself.",
            labels=["job", "node"],
        )
        used.add_metric([self._job, self._watch.node], own.monitor_cpu_s if own else 0.0)
        yield used
        faults = CounterMetricFamily(
            "keepstep_monitor_faults",
            "Failures of components of the monitor.",
            labels=["job", "node", "part"],
        )
        for part, count in sorted(self._watch.faults.items()):
            faults.add_metric([self._job, self._watch.node, part], count)
        yield faults
        missing = GaugeMetricFamily(
            "keepstep_monitor_missing_children",
            "Child daemons that do not answer.",
            labels=["job", "node"],
        )
        missing.add_metric([self._job, self._watch.node], len(self._watch.child_registry.missing))
        yield missing

    def _ranks(self) -> Iterator[Metric]:
        labels = ["job", "node", "rank"]
        up = GaugeMetricFamily(
            "keepstep_rank_up", "Whether the rank's process exists.", labels=labels
        )
        step = GaugeMetricFamily(
            "keepstep_rank_step", "Current optimizer step of the rank.", labels=labels
        )
        took = GaugeMetricFamily(
            "keepstep_rank_step_duration_seconds",
            "Time of the rank's last completed step.",
            labels=labels,
        )
        silent = GaugeMetricFamily(
            "keepstep_rank_silence_seconds",
            "Time since the rank's last progress of any kind.",
            labels=labels,
        )
        for history in self._watch.rank_views.ranks():
            state = history.state
            if state.node != self._watch.node:
                continue
            names = [self._job, state.node, str(state.rank)]
            up.add_metric(names, float(state.is_alive))
            step.add_metric(names, history.highest_step)
            # A finished rank makes no progress, which is no problem.
            if state.ending != Ending.FINISHED:
                silent.add_metric(names, max(0.0, state.read_at_s - state.progress_at_s))
            table = self._watch.rank_views.tables[state.rank]
            if table.last_step:
                took.add_metric(names, table.last_step_s)
        yield from (up, step, took, silent)

    def _verdicts(self) -> Iterator[Metric]:
        labels = ["job", "syndrome", "subject", "advice"]
        active = GaugeMetricFamily(
            "keepstep_verdict_active",
            "Verdicts that hold, with the confidence as value.",
            labels=labels,
        )
        cost = GaugeMetricFamily(
            "keepstep_verdict_step_cost_seconds",
            "Additional time of every step because of it; infinite for a hang.",
            labels=labels,
        )
        for entry in self._watch.log.holding:
            verdict = entry.verdict
            names = [self._job, str(verdict.syndrome), str(verdict.subject), str(verdict.advice)]
            active.add_metric(names, verdict.confidence)
            cost.add_metric(names, verdict.cost_s_per_step)
        noted = GaugeMetricFamily(
            "keepstep_verdict_note_active",
            "Verdicts that a person has muted or acknowledged: do not alert of them.",
            labels=[*labels, "note"],
        )
        wall_s = time.time()
        for entry in self._watch.log.holding:
            verdict = entry.verdict
            note = self._watch.log.note_on(verdict, wall_s)
            if note is not None:
                names = [str(verdict.syndrome), str(verdict.subject), str(verdict.advice)]
                noted.add_metric([self._job, *names, str(note.kind)], 1.0)
        yield from (active, cost, noted)
        opened = CounterMetricFamily(
            "keepstep_verdicts", "Verdicts opened so far.", labels=["job", "syndrome"]
        )
        for syndrome in Syndrome:
            opened.add_metric([self._job, str(syndrome)], self._watch.log.opened.get(syndrome, 0))
        yield opened

    def _whole_job(self) -> Iterator[Metric]:
        typical = self._watch.rank_views.typical_step_s()
        if typical is not None:
            yield _gauge(
                "keepstep_job_step_duration_seconds",
                "Median time of the newest steps.",
                self._job,
                typical,
            )
        for name, value in reported(self._watch.rank_views.ranks(), typical).items():
            if value is not None:
                yield _gauge(*_REPORTED[name], self._job, value)
        count = len(self._watch.rank_views.ranks())
        yield _gauge("keepstep_job_ranks", "Monitored ranks.", self._job, count)
        job_status, status_json = self._job_status, job_status_json(self._job_status, typical)
        if job_status is None or status_json is None:
            return
        yield _gauge(
            "keepstep_job_generation",
            "Current generation of the job.",
            self._job,
            job_status.generation,
        )
        recoveries = CounterMetricFamily(
            "keepstep_job_recoveries", "Changes of generation.", labels=["job"]
        )
        recoveries.add_metric([self._job], len(job_status.recoveries))
        yield recoveries
        for name, help_text, value in (
            (
                "keepstep_job_snapshot_step",
                "Newest step committed in memory.",
                job_status.snapshot_step,
            ),
            ("keepstep_job_checkpoint_step", "Newest step in storage.", job_status.checkpoint_step),
        ):
            if value is not None:
                yield _gauge(name, help_text, self._job, value)
        yield _gauge(
            "keepstep_job_goodput_ratio",
            "Share of wall time that produced kept steps.",
            self._job,
            status_json["goodput"]["share"],
        )
        spent = GaugeMetricFamily(
            "keepstep_job_wall_time_seconds",
            "Wall time by use.",
            labels=["job", "into"],
        )
        for into, seconds in status_json["goodput"]["parts"].items():
            spent.add_metric([self._job, into], seconds)
        yield spent


def _gauge(name: str, help_text: str, job: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=["job"])
    family.add_metric([job], value)
    return family
