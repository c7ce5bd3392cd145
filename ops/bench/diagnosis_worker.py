"""One job of the battery: `python diagnosis_worker.py SPECIFICATION` imports PyTorch once and becomes as many ranks as wanted.

The ranks train a small model until they are killed; what they do wrong, and from when on, is written into a page that all share (`Control`).
Compute is real: products of small matrices, as many as take `compute_s` of a processor; a slow rank goes on multiplying until its
work has taken the factor of what it took. Each step: data from a `DataLoader`, forward, backward, the gradient's norm over
all ranks, optimizer; every fifth step all save something to a disk. After every two hundredth rank 0 of a replicated job evaluates by
itself for some seconds while the others wait, and all of a sharded one together.
"""

from __future__ import annotations

import ctypes
import io
import json
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

# The benchmark beside this file is called as a module of the package is.
HERE = str(Path(__file__).parent)
if sys.path[0] == HERE:
    sys.path.remove(HERE)

SAVE_EVERY = 5
MICROBATCHES = 4
EVALUATE_EVERY = 200
EVALUATION_S = 4.0
_SET_PARENT_DEATH_SIGNAL = 1


class Ill(IntEnum):
    """What a rank does wrong by itself."""

    NOTHING = 0
    LOOP = 1
    GIL = 2
    SLOW = 3
    DATA_SLOW = 4
    DATA_STALL = 5
    MISMATCH_SIZE = 6
    MISMATCH_OPERATION = 7
    MISMATCH_ORDER = 8
    SLOW_DISK = 9
    ERROR = 10


class Control:
    """Who has what, in a file that all map: read once a step."""

    _FORM = struct.Struct("<iid")

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self._FORM.size)

    def write(self, rank: int, ill: Ill, value: float) -> None:
        self._FORM.pack_into(self._memory, 0, rank, ill, value)

    def read(self, rank: int) -> tuple[Ill, float]:
        who, ill, value = self._FORM.unpack_from(self._memory, 0)
        return (Ill(ill), value) if who == rank else (Ill.NOTHING, 0.0)


@dataclass(frozen=True)
class Specification:
    """A job.

    Args:
        job: "ddp", "fsdp" or "pipeline".
        ranks: how many.
        directory: for rings, control file, answers.
        disk: directory on a disk, for checkpoints.
        compute_s: of each rank in a step.
        namespaces: the ranks' network namespaces; empty for loopback.
        device: the interface that gloo uses.
        master: address of rank 0.
        port: for the rendezvous.
        overhead: windows to measure with recording and without; 0 to train for ever.
    """

    job: str
    ranks: int
    directory: str
    disk: str
    compute_s: float
    namespaces: list[str] = field(default_factory=list)
    device: str = "lo"
    master: str = "127.0.0.1"
    port: int = 29500
    overhead: int = 0

    def told(self) -> str:
        return json.dumps(asdict(self))


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def main() -> None:
    _end_with_parent()
    specification = Specification(**json.loads(sys.argv[1]))
    os.environ.update(
        OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=specification.device, MASTER_ADDR=specification.master,
        MASTER_PORT=str(specification.port), WORLD_SIZE=str(specification.ranks), KEEPSTEP_JOB="battery",
        KEEPSTEP_MONITOR_DIR=specification.directory, PYTHONWARNINGS="ignore",
    )  # fmt: skip
    import torch
    import torch.distributed.fsdp

    import keepstep.monitor.telemetry.attachment

    torch.set_num_threads(1)
    products = _calibrated(specification.compute_s)
    children = []
    for rank in range(specification.ranks):
        child = os.fork()
        if child == 0:
            _end_with_parent()
            status = 1
            try:
                _be(rank, specification, products)
                status = 0
            except Exception as error:  # noqa: BLE001 - a rank that fails says so and ends as processes do
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                keepstep.monitor.telemetry.attachment.detach()  # What `atexit` does where the interpreter ends by itself.
                os._exit(status)
        children.append(child)
    print(json.dumps(children), flush=True)
    for child in children:
        os.waitpid(child, 0)


def _calibrated(compute_s: float) -> int:
    import torch

    one = torch.rand(96, 96)
    times = []
    for _ in range(20):
        began_s = time.process_time()
        for _ in range(20):
            one @ one
        times.append((time.process_time() - began_s) / 20)
    return max(1, int(compute_s / min(times)))


def _be(rank: int, specification: Specification, products: int) -> None:
    if specification.namespaces:
        sys.path.insert(0, HERE)
        from switched_network import enter

        enter(specification.namespaces[rank])
    os.environ.update(RANK=str(rank), KEEPSTEP_NODE=f"node-{rank}")

    def say_briefly(_: object, error: BaseException, __: object) -> None:
        print(f"rank {rank}: {str(error).splitlines()[0][:200]}", file=sys.stderr, flush=True)

    sys.excepthook = say_briefly
    import torch
    import torch.distributed as dist

    from keepstep import monitor

    torch.manual_seed(rank)
    dist.init_process_group("gloo")
    monitor.attach()
    work = Work(products, rank, Control(Path(specification.directory) / "control"))
    step = {"ddp": _replicated, "fsdp": _sharded, "pipeline": _pipeline}[specification.job](
        rank, specification, work
    )
    saved = Path(specification.disk) / f"rank-{rank}"
    number = 0

    def turn() -> None:
        nonlocal number
        number += 1
        work.look()
        step()
        if number % SAVE_EVERY == 0:
            _save(saved, work)

    if specification.overhead:
        _compare(turn, rank, specification)
        return
    while True:
        turn()


class Work:
    """The compute of a rank, and what ails it."""

    def __init__(self, products: int, rank: int, control: Control) -> None:
        import torch

        self.products, self.rank, self.control = products, rank, control
        self.ill, self.value = Ill.NOTHING, 0.0
        self._one = torch.rand(96, 96)

    def look(self) -> None:
        """See what ails this rank in the step to come."""
        self.ill, self.value = self.control.read(self.rank)

    def do(self, share: float) -> None:
        """Do a share of the step's compute, or go astray in it."""
        if self.ill is Ill.LOOP:
            while True:
                pass
        if self.ill is Ill.GIL:
            ctypes.PyDLL(None).sleep(600)
        if self.ill is Ill.ERROR:
            raise ValueError("a batch that nobody expected")
        began_s = time.monotonic()
        for _ in range(max(1, int(self.products * share))):
            self._one @ self._one
        if self.ill is Ill.SLOW:
            until_s = began_s + self.value * (time.monotonic() - began_s)
            while time.monotonic() < until_s:
                self._one @ self._one


def _batches(work: Work) -> Iterator[Any]:
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    class Samples(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            while True:
                if work.ill is Ill.DATA_SLOW:
                    time.sleep(work.value)
                if work.ill is Ill.DATA_STALL:
                    os.read(os.pipe()[0], 1)
                yield torch.rand(256)

    return iter(DataLoader(Samples(), batch_size=4))


def _norm(work: Work, parameters: list[Any]) -> None:
    """All ranks' gradient norm, or what a rank takes for it that parted from the others."""
    import torch
    import torch.distributed as dist

    told = torch.zeros(64 if work.ill is Ill.MISMATCH_SIZE else 16)
    if work.ill is Ill.MISMATCH_ORDER:
        return
    if work.ill is Ill.MISMATCH_OPERATION:
        dist.broadcast(told, src=0)
        return
    dist.all_reduce(told)


def _blocks() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)
    )


def _replicated(rank: int, specification: Specification, work: Work) -> Callable[[], None]:
    from torch import nn

    model = nn.parallel.DistributedDataParallel(_blocks())

    def evaluate() -> None:
        # Where steps are timed, there is none.
        until_s = time.monotonic() + (
            EVALUATION_S if rank == 0 and not specification.overhead else 0.0
        )
        while time.monotonic() < until_s:
            _evaluate(model.module, work)

    return _training(model, work, evaluate)


def _sharded(rank: int, specification: Specification, work: Work) -> Callable[[], None]:
    from torch.distributed.fsdp import fully_shard

    model = _blocks()
    for at in (0, 2, 4):
        fully_shard(model[at])
    fully_shard(model)

    def evaluate() -> None:
        for _ in range(10):
            _evaluate(model, work)

    return _training(model, work, evaluate)


def _evaluate(model: Any, work: Work) -> None:
    import torch

    with torch.no_grad():
        model(torch.rand(4, 256))
    work.do(1.0)


def _training(model: Any, work: Work, evaluate: Callable[[], None]) -> Callable[[], None]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = _batches(work)
    number = 0

    def step() -> None:
        nonlocal number
        batch = next(batches)
        loss = model(batch).square().mean()
        work.do(1.0)
        loss.backward()
        _norm(work, list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        if number % EVALUATE_EVERY == 0:
            evaluate()

    return step


def _pipeline(rank: int, specification: Specification, work: Work) -> Callable[[], None]:
    """Stages that send what they made to the next one, and gradients back (GPipe's schedule)."""
    import torch
    import torch.distributed as dist

    last = specification.ranks - 1
    model = _blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = _batches(work)
    rows = 32

    def step() -> None:
        inputs, outputs = [], []
        batch = next(batches).mean() if rank == 0 else None
        for _ in range(MICROBATCHES):
            if rank:
                given = torch.empty(rows, 256)
                dist.recv(given, rank - 1)
                given.requires_grad_()
            else:
                given = torch.full((rows, 256), float(batch))
            work.do(0.4 / MICROBATCHES)
            made = model(given)
            inputs.append(given)
            outputs.append(made)
            if rank < last:
                dist.send(made.detach(), rank + 1)
        for given, made in zip(reversed(inputs), reversed(outputs), strict=True):
            gradient = torch.ones(rows, 256)
            if rank < last:
                dist.recv(gradient, rank + 1)
            work.do(0.6 / MICROBATCHES)
            made.backward(gradient)
            if rank:
                assert given.grad is not None
                dist.send(given.grad, rank - 1)
        _norm(work, list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()

    return step


class _SlowFile(io.FileIO):
    """A file on a disk on which everything waits for the platter: each few bytes are written through."""

    def write(self, told: Any) -> int:
        view = memoryview(told).cast("B")
        for begin in range(0, len(view), 4096):
            super().write(view[begin : begin + 4096])
            os.fsync(self.fileno())
        return len(view)


def _save(path: Path, work: Work) -> None:
    import torch

    state = {"weights": torch.zeros(2**16)}
    if work.ill is Ill.SLOW_DISK:
        with _SlowFile(path, "wb") as file:
            torch.save(state, file)
    else:
        torch.save(state, path)


def _compare(turn: Callable[[], None], rank: int, specification: Specification) -> None:
    """Measure steps with recording and without, in turn; rank 0 writes what they took."""
    import torch.distributed as dist

    from keepstep import monitor
    from keepstep.monitor.telemetry.attachment import detach

    def window(count: int) -> tuple[float, float]:
        dist.barrier()
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        for _ in range(count):
            turn()
        return (time.monotonic() - began_s) / count, (time.process_time() - began_cpu_s) / count

    found: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    window(10)
    for number in range(specification.overhead):
        # Either goes first as often as the other.
        for way in ("with", "without") if number % 2 else ("without", "with"):
            (monitor.attach if way == "with" else detach)()
            window(1)
            found[way].append(window(10))
    monitor.attach()
    window(5)
    if rank == 0:
        (Path(specification.directory) / "overhead.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
