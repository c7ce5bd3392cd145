"""Verdicts with nodes named as the job's runtime names them. Pure.

A daemon knows its node by the host's name, the runtime by the name that it gave a member; and a host may be two members, in tests
and on large machines. Whoever replaces a node needs the member's name, so ranks decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from monitor.verdicts import Subject, Verdict


def placed(verdicts: Iterable[Verdict], places: Mapping[int, str]) -> tuple[Verdict, ...]:
    """Return the verdicts with each rank's node as `places` has it."""
    return tuple(replace(verdict, subject=_placed(verdict.subject, places)) for verdict in verdicts)


def _placed(subject: Subject, places: Mapping[int, str]) -> Subject:
    found = {places.get(rank, "") for rank in subject.ranks}
    node = found.pop() if len(found) == 1 else ""
    if subject.kind != "node":
        return replace(subject, node=node)
    everyone = tuple(sorted(rank for rank, where in places.items() if where == node))
    if node and everyone == tuple(sorted(subject.ranks)):
        return replace(subject, node=node)
    # What is one node to the daemon is several members, or a part of one: no single member may be blamed for it.
    return Subject("group", subject.ranks, node)
