"""Small telemetry rings for tests: what they are of, what is put in them, and damage."""

from keepstep.monitor.records import Kind, Operation
from keepstep.monitor.telemetry.ring import (
    Ring,
    RingSizes,
    WorkerIdentity,
)

SMALL = RingSizes(operations=256, marks=256, table_nbytes=512)
IDENTITY = WorkerIdentity("job", 3, "node-a", generation=2, world_size=8)


def operate(ring: Ring, number: int, ended_s: float = 0.0) -> int:
    return ring.operations.begin(
        Kind.OPERATION,
        Operation.ALL_REDUCE,
        number=number,
        step=1,
        enqueued_s=float(number),
        ended_s=ended_s,
        nbytes=64,
    )


def damaged(ring: Ring, at: int, data: bytes) -> None:
    with open(ring.path, "r+b") as file:
        file.seek(at)
        file.write(data)
