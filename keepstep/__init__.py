"""keepstep: fault-tolerant elastic training for PyTorch.

`join` wraps a training loop; `keepstep.checkpoint` saves and loads without one; `keepstep.monitor`
records a worker. Names load their modules at first use: agents and helper processes import this
package too, and run without PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep import checkpoint, monitor
    from keepstep.elastic.data.micro_batches import MicroBatch
    from keepstep.elastic.data.mixture import Mixture
    from keepstep.elastic.data.packed import Packed, PackedRow
    from keepstep.elastic.data.sharded_stream import ShardedStream
    from keepstep.elastic.data.shuffled import Shuffled
    from keepstep.elastic.data.split_stream import SplitStream
    from keepstep.elastic.errors import (
        DeviceUnavailable,
        ElasticError,
        InvariantViolated,
        JobFailed,
        LeaseLost,
        ProcessUnusable,
        ReplicasDiverged,
        StepRejected,
        StoreUnavailable,
        UsageError,
    )
    from keepstep.elastic.trainer.attach import attach
    from keepstep.elastic.trainer.attached import Attached
    from keepstep.elastic.trainer.bad_steps import BadSteps, RejectedStep
    from keepstep.elastic.trainer.events import (
        Callbacks,
        CheckpointStored,
        GenerationEntered,
        Recovered,
        SnapshotCommitted,
    )
    from keepstep.elastic.trainer.guard import Guard
    from keepstep.elastic.trainer.job import Job
    from keepstep.elastic.trainer.join import join
    from keepstep.elastic.trainer.process_groups import World
    from keepstep.elastic.trainer.start_from import StartFrom
    from keepstep.elastic.trainer.state import State, Stateful
    from keepstep.elastic.trainer.step import Step

_MODULES = ("checkpoint", "monitor")
_HOMES = {
    "Attached": "keepstep.elastic.trainer.attached",
    "BadSteps": "keepstep.elastic.trainer.bad_steps",
    "Callbacks": "keepstep.elastic.trainer.events",
    "CheckpointStored": "keepstep.elastic.trainer.events",
    "DeviceUnavailable": "keepstep.elastic.errors",
    "ElasticError": "keepstep.elastic.errors",
    "GenerationEntered": "keepstep.elastic.trainer.events",
    "Guard": "keepstep.elastic.trainer.guard",
    "InvariantViolated": "keepstep.elastic.errors",
    "Job": "keepstep.elastic.trainer.job",
    "JobFailed": "keepstep.elastic.errors",
    "LeaseLost": "keepstep.elastic.errors",
    "MicroBatch": "keepstep.elastic.data.micro_batches",
    "Mixture": "keepstep.elastic.data.mixture",
    "Packed": "keepstep.elastic.data.packed",
    "PackedRow": "keepstep.elastic.data.packed",
    "ProcessUnusable": "keepstep.elastic.errors",
    "Recovered": "keepstep.elastic.trainer.events",
    "RejectedStep": "keepstep.elastic.trainer.bad_steps",
    "ReplicasDiverged": "keepstep.elastic.errors",
    "ShardedStream": "keepstep.elastic.data.sharded_stream",
    "Shuffled": "keepstep.elastic.data.shuffled",
    "SnapshotCommitted": "keepstep.elastic.trainer.events",
    "SplitStream": "keepstep.elastic.data.split_stream",
    "StartFrom": "keepstep.elastic.trainer.start_from",
    "State": "keepstep.elastic.trainer.state",
    "Stateful": "keepstep.elastic.trainer.state",
    "Step": "keepstep.elastic.trainer.step",
    "StepRejected": "keepstep.elastic.errors",
    "StoreUnavailable": "keepstep.elastic.errors",
    "UsageError": "keepstep.elastic.errors",
    "World": "keepstep.elastic.trainer.process_groups",
    "attach": "keepstep.elastic.trainer.attach",
    "join": "keepstep.elastic.trainer.join",
}

__all__ = [
    "Attached",
    "BadSteps",
    "Callbacks",
    "CheckpointStored",
    "DeviceUnavailable",
    "ElasticError",
    "GenerationEntered",
    "Guard",
    "InvariantViolated",
    "Job",
    "JobFailed",
    "LeaseLost",
    "MicroBatch",
    "Mixture",
    "Packed",
    "PackedRow",
    "ProcessUnusable",
    "Recovered",
    "RejectedStep",
    "ReplicasDiverged",
    "ShardedStream",
    "Shuffled",
    "SnapshotCommitted",
    "SplitStream",
    "StartFrom",
    "State",
    "Stateful",
    "Step",
    "StepRejected",
    "StoreUnavailable",
    "UsageError",
    "World",
    "attach",
    "checkpoint",
    "join",
    "monitor",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"keepstep.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'keepstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
