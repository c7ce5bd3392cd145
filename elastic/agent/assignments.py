"""Derives the workers' assignments from a generation. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.elastic.rendezvous.records import Generation, Member
from keepstep.elastic.worker.messages import Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """The common part of one node's assignments in a job.

    Args:
        job: the job's name.
        secret: the job's secret.
        server: the address of the node's snapshot server, for local processes.
        max_restarts: the failures in a row without progress that the job survives.
    """

    job: str
    secret: bytes = field(repr=False)
    server: str
    max_restarts: int


def assignments_of(
    generation: Generation, member: Member, context: JobContext
) -> tuple[Assignment, ...]:
    """Return the assignments of one node's workers, by local rank.

    Args:
        generation: the generation to enter.
        member: the node's place in it.
        context: what they have in common.
    """
    return tuple(
        Assignment(
            generation=generation.generation,
            node=member.node,
            rank=rank,
            world_size=generation.world_size,
            local_rank=local_rank,
            local_world_size=member.nproc,
            node_rank=generation.members.index(member),
            node_count=len(generation.members),
            store_host=generation.store_host,
            store_port=generation.store_port,
            server=context.server,
            secret=context.secret.hex(),
            job=context.job,
            max_restarts=context.max_restarts,
            resume=generation.resume,
            failures_per_s=generation.failures_per_s,
        )
        for local_rank, rank in enumerate(member.ranks)
    )
