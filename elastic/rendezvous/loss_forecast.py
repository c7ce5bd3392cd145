"""Predicts a job's reaction to the loss of nodes: who goes on, from which state, who waits.

Pure. It asks the functions by which the leader decides. Reports that nodes send to the leader alone
are not in the coordinator; but a holder of the committed snapshot has it sealed and protected until
a newer one is committed. Commits are written to the coordinator after two seconds at most
(`commits`), so the job may go on from a newer step than predicted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.rank_assignment import (
    absent_holders,
    assign_groups,
    assign_ranks,
    completed_by_storage,
    eligible,
    newest_restorable,
    rank_limits,
)
from keepstep.elastic.rendezvous.records import Limits, Member, SnapshotCommit
from keepstep.elastic.rendezvous.standby import losses_until
from keepstep.elastic.rendezvous.view import JoinedNode, View


@dataclass(frozen=True, slots=True, kw_only=True)
class LossForecast:
    """A job's predicted reaction if nodes were lost now.

    Attributes:
        lost: these nodes.
        serving: those of them that serve the coordinator: nothing goes on before it is back.
        has_place: whether one of them is a member of the generation; else nothing changes.
        members: the nodes of the next generation, in the order of ranks; none if it must wait.
        taking_over: those of them that are on standby now.
        world_size: ranks of the next generation.
        missing_nodes: how many nodes more it would have to wait for; 0: it goes on at once, or the
            ranks of those that are left fit no mesh.
        waits_s: how long it would wait.
        step: the step after which it goes on; 0: from the beginning.
        source: where its state would come from, in words.
        repeated_steps: how many steps would be computed again.
        further_losses: how many nodes of each erasure group may be lost after that.
        reported_s: seconds since the coordinator got the snapshot that this rests on; None if that
            is unknown.
    """

    lost: tuple[str, ...]
    has_place: bool
    serving: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    taking_over: tuple[str, ...] = ()
    world_size: int = 0
    missing_nodes: int = 0
    waits_s: float = 0.0
    step: int = 0
    source: str = ""
    repeated_steps: int = 0
    further_losses: int = 0
    reported_s: float | None = None


def forecast_loss(view: View, lost: Collection[str], wall_s: float) -> LossForecast:
    """Return a job's predicted reaction if nodes were lost now.

    Args:
        view: the coordinator's content about the job.
        lost: names of the nodes.
        wall_s: wall-clock seconds.

    Raises:
        UsageError: the job has no such node, or no generation, or its leader has published no
            limits.
    """
    names = tuple(dict.fromkeys(lost))
    unknown = [node for node in names if node not in view.nodes]
    if unknown:
        raise UsageError(
            f"the job has no node {unknown[0]!r}; its nodes: {', '.join(sorted(view.nodes))}"
        )
    generation = view.generation
    limits = limits_of(view)
    if generation is None or limits is None:
        raise UsageError(
            "nobody knows yet what the job would do: it has no generation; ask again once it trains"
        )
    serving = tuple(node for node in names if view.nodes[node].record.serves_coordinator)
    if not serving and all(generation.member(node) is None for node in names):
        return LossForecast(lost=names, has_place=False)
    complete_view = _with_committed(view)
    after = replace(
        complete_view, nodes={n: j for n, j in complete_view.nodes.items() if n not in names}
    )
    resume = newest_restorable(after, generation) or completed_by_storage(after)
    step, source = _resume_point(after, resume)
    nodes = eligible(after)
    losses = losses_until(generation, after.nodes.keys(), wall_s)
    members = assign_ranks(generation.members, nodes, limits.max_nodes, rank_limits(after), losses)
    forecast = LossForecast(
        lost=names,
        has_place=True,
        serving=serving,
        waits_s=limits.waits_s if serving else 0.0,
        step=step,
        source=source,
        repeated_steps=_newest_step(view) - step,
        reported_s=wall_s - view.snapshot.at_s if view.snapshot and view.snapshot.at_s else None,
    )
    if len(members) < limits.min_nodes:
        missing = max(0, limits.min_nodes - len(nodes))
        return replace(forecast, missing_nodes=missing, waits_s=limits.waits_s)
    return replace(
        forecast,
        members=tuple(member.node for member in members),
        taking_over=tuple(m.node for m in members if generation.member(m.node) is None),
        world_size=sum(member.nproc for member in members),
        further_losses=_further_losses(members, after, limits),
    )


def describe_forecast(forecast: LossForecast) -> str:
    """Return a forecast as sentences, one a line."""
    lost = _listed(forecast.lost)
    if not forecast.has_place:
        verb = "is" if len(forecast.lost) == 1 else "are"
        return f"without {lost}, nothing changes: {lost} {verb} on standby"
    steps = f"{forecast.repeated_steps} step{'s' if forecast.repeated_steps != 1 else ''}"
    reported = (
        "" if forecast.reported_s is None else f", as reported {age(forecast.reported_s)} ago"
    )
    resumes = f"from {forecast.source}; {steps} would be computed again{reported}"
    if forecast.serving:
        server = forecast.serving[0]
        return (
            f"without {lost}, training would stand still: {server} serves the coordinator. The "
            f"other nodes would wait {forecast.waits_s:.0f} s for it, and then end\n"
            f"run the line of {server} again within that time: it would go on {resumes}"
        )
    if not forecast.members:
        wanted = (
            f"{forecast.missing_nodes} more node{'s' if forecast.missing_nodes != 1 else ''}"
            if forecast.missing_nodes
            else "nodes whose ranks fit the mesh"
        )
        return (
            f"without {lost}, the job would wait for {wanted}, and fail after "
            f"{forecast.waits_s:.0f} s\nit would go on {resumes}"
        )
    taken = (
        f"; {_listed(forecast.taking_over)} would take over, from standby"
        if forecast.taking_over
        else ""
    )
    ranks = f"{forecast.world_size} rank{'s' if forecast.world_size != 1 else ''}"
    then = (
        f"{forecast.further_losses} more of each group may be lost once that is protected"
        if forecast.further_losses
        else "no further loss can be made good from memory"
    )
    return (
        f"without {lost}, the job would go on at once with {ranks} on "
        f"{_listed(forecast.members)}{taken}\nit would go on {resumes}\n{then}"
    )


def age(seconds: float) -> str:
    """Return a time that has passed, for people, such as "4 s" or "12 min"."""
    passed_s = max(0.0, seconds)
    if passed_s < 120:
        return f"{passed_s:.0f} s"
    return f"{passed_s / 60:.0f} min" if passed_s < 7200 else f"{passed_s / 3600:.0f} h"


def _listed(nodes: Collection[str]) -> str:
    return ", ".join(nodes)


def limits_of(view: View) -> Limits | None:
    """Return the limits by which the job's leader decides; None if it has published none."""
    limits = view.leadership.limits if view.leadership is not None else None
    if limits is None or view.scale is None:
        return limits
    return replace(limits, min_nodes=view.scale.min_nodes, max_nodes=view.scale.max_nodes)


def _with_committed(view: View) -> View:
    """Return the view in which all holders of the committed snapshot report it."""
    commit = view.snapshot
    if commit is None:
        return view
    nodes = dict(view.nodes)
    for holder in commit.holders:
        joined = nodes.get(holder.node)
        if joined is None or joined.record.server != holder.server:
            continue
        record = joined.record
        nodes[holder.node] = JoinedNode(
            replace(
                record,
                sealed=tuple({*record.sealed, commit.snapshot}),
                protected=tuple({*record.protected, commit.snapshot}),
            ),
            joined.created,
        )
    return replace(view, nodes=nodes)


def _newest_step(view: View) -> int:
    """Return the newest step that is known to have been computed."""
    committed = view.snapshot.snapshot.step if view.snapshot is not None else 0
    stored = view.checkpoint.step if view.checkpoint is not None else 0
    return max(committed, stored, *(joined.record.step for joined in view.nodes.values()))


def _resume_point(view: View, resume: SnapshotCommit | None) -> tuple[int, str]:
    """Return the step after which the job goes on, and where its state comes from."""
    if resume is not None:
        step = resume.snapshot.step
        if resume.stored:
            return step, f"step {step}, from memory and {resume.stored}"
        if absent_holders(view, resume):
            return step, f"step {step}, from memory and parity"
        return step, f"step {step}, from memory"
    if view.checkpoint is not None:
        return view.checkpoint.step, f"step {view.checkpoint.step}, from {view.checkpoint.url}"
    return 0, "the beginning"


def _further_losses(members: tuple[Member, ...], view: View, limits: Limits) -> int:
    _, parity = assign_groups(members, view, limits.group_size, limits.parity)
    return parity
