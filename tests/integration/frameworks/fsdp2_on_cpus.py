"""Makes Accelerate shard a model over a gloo group of CPUs, which it does on devices alone."""

from accelerate import DistributedType, PartialState


def shard_on_cpus() -> None:
    """Give the process group the name that makes Accelerate look at its FSDP plug-in."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
