"""Holds what one agent runs, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.checkpoint.snapshot.server.limits import RateLimits
from keepstep.elastic.rendezvous.kept_state import Keeping
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.worker.messages import Command


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """The configuration of one agent.

    Args:
        job: the job's name.
        node: this node's name.
        host: where other nodes reach this one.
        workers: how many workers run here.
        command: what they run.
        policy: the job's limits.
        environment: the workers' environment.
        run_directory: for sockets; private, and removed when the agent ends.
        digest: what all nodes of the job must agree on, in short.
        domain: what this node fails together with (a rack, a switch); "" if nothing is known.
        lease_ttl_s: how long after its last sign of life the node is declared gone.
        drain_timeout_s: how long workers may take to drain while nothing is broken.
        abort_timeout_s: how long they may take once something broke.
        grace_s: how long the node may take to leave in good order.
        spares: how many spare processes are kept warm.
        limits: the snapshot server's rates.
        is_recorded: whether workers record themselves for `keepstep monitor`.
        serves_coordinator: whether the coordinator runs here, and ends with this agent.
        keeping: how long the next agent of this node finds what is in memory, and by what.
    """

    job: str
    node: str
    host: str
    workers: int
    command: Command
    policy: RendezvousPolicy
    environment: Mapping[str, str]
    run_directory: Path
    digest: str
    domain: str = ""
    lease_ttl_s: float = 5.0
    drain_timeout_s: float = 300.0
    abort_timeout_s: float = 5.0
    grace_s: float = 30.0
    spares: int = 1
    limits: RateLimits = field(default_factory=RateLimits)
    is_recorded: bool = False
    serves_coordinator: bool = False
    keeping: Keeping = field(default_factory=Keeping)
