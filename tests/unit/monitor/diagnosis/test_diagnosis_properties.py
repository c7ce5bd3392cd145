"""Properties of diagnosis on any trace.

Verdicts do not depend on names, units, clocks, or on how records are read.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.monitor.diagnosis.conclusion import NO_DIAGNOSIS_STATE, conclude, diagnose
from keepstep.monitor.diagnosis.digest import EMPTY_DIGEST_STATE, digest
from keepstep.monitor.diagnosis.tables import Digest, merge
from keepstep.monitor.diagnosis.thresholds import Thresholds
from keepstep.monitor.records import Communicator, JobRecords, RankRecords
from keepstep.monitor.verdicts import Subject, Verdict
from ops.bench.traces import Jitter, Shape, Simulation
from tests.examples import examples
from tests.unit.monitor.diagnosis.longer_jobs import thresholds_of_longer_job
from tests.unit.monitor.diagnosis.trace_text import Trace, load

CASES = {path.stem: path for path in sorted((Path(__file__).parent / "cases").glob("*.txt"))}
TIMES = ("enqueued_s", "started_s", "ended_s")
any_case = st.sampled_from(sorted(CASES))


def judged(
    job: JobRecords, at_s: float, thresholds: Thresholds | None = None
) -> tuple[Verdict, ...]:
    return diagnose(job, {}, NO_DIAGNOSIS_STATE, at_s, thresholds or Thresholds())[1]


def summarize(verdicts: tuple[Verdict, ...]) -> set[tuple[str, Subject]]:
    return {(verdict.syndrome, verdict.subject) for verdict in verdicts}


def altered(trace: Trace, alter: Callable[[RankRecords], RankRecords]) -> JobRecords:
    job = trace.job()
    return replace(job, ranks={rank: alter(records) for rank, records in job.ranks.items()})


@given(case=any_case, data=st.data())
def test_permuting_ranks_permutes_verdicts(case: str, data: st.DataObject) -> None:
    trace = load(CASES[case])
    job = trace.job()
    order = data.draw(st.permutations(sorted(job.ranks)))
    permuted_rank = dict(zip(sorted(job.ranks), order, strict=True))
    ranks = {}
    for rank, group in job.ranks.items():
        records = group.records.copy()
        has_peer = records["peer"] >= 0
        records["peer"][has_peer] = [
            permuted_rank[peer] for peer in records["peer"][has_peer].tolist()
        ]
        ranks[permuted_rank[rank]] = replace(group, rank=permuted_rank[rank], records=records)
    communicators = {
        identity: Communicator(
            identity, group.name, tuple(sorted(permuted_rank[rank] for rank in group.ranks))
        )
        for identity, group in job.communicators.items()
    }

    def renamed(subject: Subject) -> Subject:
        members = [permuted_rank[rank] for rank in subject.ranks]
        return replace(subject, ranks=tuple(members if subject.kind == "link" else sorted(members)))

    permuted = judged(JobRecords(ranks, communicators), trace.read_s)
    assert summarize(permuted) == {
        (syndrome, renamed(subject)) for syndrome, subject in summarize(judged(job, trace.read_s))
    }


@given(case=any_case, factor=st.floats(0.05, 50))
def test_scaling_time_scales_verdicts(case: str, factor: float) -> None:
    trace = load(CASES[case])

    def longer(one: RankRecords) -> RankRecords:
        records = one.records.copy()
        for name in TIMES:
            records[name] *= factor
        return replace(
            one, records=records, read_at_s=one.read_at_s * factor, offset_s=one.offset_s * factor
        )

    plain = {(one.syndrome, one.subject): one for one in judged(trace.job(), trace.read_s)}
    scaled = judged(altered(trace, longer), trace.read_s * factor, thresholds_of_longer_job(factor))
    assert summarize(scaled) == set(plain)
    for one in scaled:
        before = plain[one.syndrome, one.subject]
        assert one.cost_s_per_step == pytest.approx(before.cost_s_per_step * factor, rel=1e-6)
        if one.syndrome not in ("device error", "memory about to run out"):
            assert one.since_s == pytest.approx(before.since_s * factor, rel=1e-6, abs=1e-6)


@given(
    case=any_case,
    shifts=st.lists(st.floats(-1e4, 1e4), min_size=4, max_size=4),
    is_known=st.booleans(),
)
def test_shifting_clocks_changes_nothing(case: str, shifts: list[float], is_known: bool) -> None:
    """With `is_known`, offsets follow; without, clocks are wrong, and verdicts are equal."""
    trace = load(CASES[case])
    shift_of = dict(zip(sorted(set(trace.nodes.values())), shifts, strict=False))

    def shifted(one: RankRecords) -> RankRecords:
        records, shift_s = one.records.copy(), shift_of[one.node]
        for name in TIMES:
            # 0.0 means "not yet" and stays; a time that is 0.0 by chance is moved aside.
            records[name] = np.where(records[name] != 0, records[name] + shift_s + 2e4, 0.0)
        offset_s = one.offset_s - shift_s - 2e4 if is_known else 0.0
        return replace(
            one, records=records, read_at_s=one.read_at_s + shift_s + 2e4, offset_s=offset_s
        )

    plain, other = judged(trace.job(), trace.read_s), judged(altered(trace, shifted), trace.read_s)
    assert summarize(other) == summarize(plain)
    if is_known:
        since = {(one.syndrome, one.subject): one.since_s for one in plain}
        for one in other:
            assert one.since_s == pytest.approx(since[one.syndrome, one.subject], abs=1e-6)


@settings(max_examples=examples(30))
@given(case=any_case, data=st.data())
def test_any_tree_of_digests_gives_the_same_verdicts(case: str, data: st.DataObject) -> None:
    trace = load(CASES[case])
    job = trace.job()
    parts = [digest([item], job.communicators)[1] for item in job.ranks.values()]
    while len(parts) > 1:
        first = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        second = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        parts.append(merge((first, second), job.communicators))
    nodes = {rank: item.node for rank, item in job.ranks.items()}
    _, verdicts = conclude(
        parts[0], job.communicators, nodes, {}, NO_DIAGNOSIS_STATE, trace.read_s, Thresholds()
    )
    expected = judged(job, trace.read_s)
    assert summarize(verdicts) == summarize(expected)
    costs = {(item.syndrome, item.subject): item.cost_s_per_step for item in expected}
    assert all(
        item.cost_s_per_step == pytest.approx(costs[item.syndrome, item.subject])
        for item in verdicts
    )


@settings(max_examples=examples(30))
@given(data=st.data())
def test_reading_at_any_times_accounts_for_everything_once(data: st.DataObject) -> None:
    trace = load(CASES["non_communication_slow"])
    expected = digest(trace.job().ranks.values(), trace.job().communicators)[1]
    moments = sorted(data.draw(st.lists(st.floats(0.5, trace.read_s), max_size=12)))
    keep_s = data.draw(st.floats(0.0, 20.0))
    memory, parts, before_s = EMPTY_DIGEST_STATE, [], 0.0
    for moment in [*moments, trace.read_s]:
        # A ring holds at least what is new since the last reading, and some of what was read
        # before.
        job = trace.job(moment, before_s - keep_s)
        memory, part = digest(job.ranks.values(), job.communicators, memory)
        parts.append(part)
        before_s = moment
    merged = merge(parts_of_steps(parts), trace.job().communicators)
    first = np.isin(expected.steps["step"], merged.steps["step"])
    # The first step of a reading is only partly known, so steps may begin later than in one
    # reading.
    assert len(merged.steps) >= len(expected.steps) - 4
    for name in ("own_s", "duration_s"):
        np.testing.assert_allclose(merged.steps[name], expected.steps[name][first], atol=1e-9)
    np.testing.assert_array_equal(merged.steps["role"], expected.steps["role"][first])
    assert merged.transfers["count"].sum() == expected.transfers["count"].sum()


def parts_of_steps(parts: list[Digest]) -> list[Digest]:
    """Return the increments alone: a digest must not hold several snapshots of one rank."""
    return [replace(part, ranks=part.ranks[:0], frontiers=part.frontiers[:0]) for part in parts]


def test_healthy_noisy_job_has_no_verdicts() -> None:
    # Twice the noise of the benchmark, and a delay of a third of a step every few steps.
    job = Simulation(
        Shape(2, 2, 4),
        None,
        7,
        Jitter(operation=0.08, step=0.12, rank=0.02, hiccup_probability=2e-4),
    )
    past, ring = NO_DIAGNOSIS_STATE, []
    for step, records, now_s in job.steps():
        ring = (
            [
                np.concatenate([old[len(old) // 2 :], new])
                for old, new in zip(ring, records, strict=True)
            ]
            if ring
            else records
        )
        past, verdicts = diagnose(
            job.read(ring, now_s, frozenset()), job.metrics(now_s, step), past, now_s, Thresholds()
        )
        assert verdicts == (), f"step {step}"
        if step == 600:
            break
    assert past.window.newest >= 597


def test_memory_does_not_grow_with_time() -> None:
    job = Simulation(Shape(2, 2, 4), None, 8)
    past, sizes = NO_DIAGNOSIS_STATE, []
    for step, records, now_s in job.steps():
        past, _ = diagnose(job.read(records, now_s, frozenset()), {}, past, now_s, Thresholds())
        window = past.window
        tables = (
            window.rows,
            window.own.values,
            window.links.values,
            window.transfers.values,
            past.frontiers,
            past.memory.cuts,
        )
        pending = window.pending
        held = (
            pending.steps,
            pending.collectives,
            pending.messages,
            pending.transfers,
            past.curves.pending,
            past.memory.steps,
        )
        sizes.append(sum(table.size for table in (*tables, *held)))
        if step == 120:
            break
    assert max(sizes[60:]) <= max(sizes[20:60]) * 1.05
