"""Runs one job of diagnosis.py: `python diagnosis_worker.py SPECIFICATION`.

The process imports PyTorch once and forks one child per rank. The ranks train a small model until
they are killed. A file that all map (`Control`) names the rank with a defect and the defect.
Compute is real: products of small matrices, as many as take `compute_s` processor seconds; a slow
rank continues until its work has taken the factor of the normal time. A step consists of data from
a `DataLoader`, forward, backward, the gradient's norm over all ranks, and the optimizer; after
every fifth step all ranks save a file to a disk. After every two hundredth step rank 0 of a
replicated job evaluates alone for some seconds while the others wait; all ranks of a sharded job
evaluate together. A job may also have a habit that is healthy and looks like a fault (`Habit`).
"""

from __future__ import annotations

import ctypes
import io
import json
import mmap
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

# This directory has modules with the names of others, which it must not hide.
HERE = str(Path(__file__).parent)
if sys.path[0] == HERE:
    sys.path.remove(HERE)

SAVE_EVERY = 5
MICROBATCHES = 4
EVALUATE_EVERY = 200
EVALUATION_S = 4.0
_SET_PARENT_DEATH_SIGNAL = 1
HABIT_EVERY = 60
"""Steps from one long pause of a habit to the next."""


class Defect(IntEnum):
    """A defect of a rank."""

    NONE = 0
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


class Habit(StrEnum):
    """Activities of healthy jobs that may be taken for a fault."""

    NONE = ""
    UNEVEN_STAGES = "uneven stages"
    """One stage has 13 layers, the others 10."""
    BUSY_EXPERT = "busy expert"
    """From step 60 on an expert gets 1.35 times the tokens."""
    SLOW_BATCHES = "slow first batches"
    LONG_SAVES = "long saves"
    """A pause of rank 0, while the others wait."""
    RECOMPILES = "recompiles"
    """A pause of all ranks, which take different times for it."""
    LONG_EVALUATIONS = "evaluations on one rank"
    VARIABLE_LENGTHS = "variable lengths"
    ACCUMULATION = "accumulation with no_sync"

    @property
    def job(self) -> str:
        """The kind of job that has it."""
        return "pipeline" if self is Habit.UNEVEN_STAGES else "ddp"


class Control:
    """The rank with a defect, and the defect, in a file that all processes map."""

    _FORMAT = struct.Struct("<iid")

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self._FORMAT.size)

    def write(self, rank: int, defect: Defect, value: float) -> None:
        self._FORMAT.pack_into(self._memory, 0, rank, defect, value)

    def read(self, rank: int) -> tuple[Defect, float]:
        faulty_rank, defect, value = self._FORMAT.unpack_from(self._memory, 0)
        return (Defect(defect), value) if faulty_rank == rank else (Defect.NONE, 0.0)


@dataclass(frozen=True)
class Specification:
    """Describes a job.

    Args:
        job: "ddp", "fsdp" or "pipeline".
        ranks: number of ranks.
        directory: directory for rings, control file and results.
        disk: directory on a disk for checkpoints.
        compute_s: processor seconds that each rank computes per step.
        namespaces: the ranks' network namespaces; empty for loopback.
        device: the network interface that gloo uses.
        master: address of rank 0.
        port: port of the process group's store.
        overhead: number of windows with and without recording; 0: train until killed.
        habit: of the job.
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
    habit: Habit = Habit.NONE

    def encode(self) -> str:
        return json.dumps(asdict(self))


def _end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def main() -> None:
    _end_with_parent()
    specification = Specification(**json.loads(sys.argv[1]))
    os.environ.update(
        OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=specification.device,
        MASTER_ADDR=specification.master, MASTER_PORT=str(specification.port),
        WORLD_SIZE=str(specification.ranks), KEEPSTEP_JOB="battery",
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
                _run_rank(rank, specification, products)
                status = 0
            except Exception as error:  # noqa: BLE001 - as an interpreter would
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                # `os._exit` skips `atexit`, which would do this.
                keepstep.monitor.telemetry.attachment.detach()
                os._exit(status)
        children.append(child)
    print(json.dumps(children), flush=True)
    for child in children:
        os.waitpid(child, 0)


def _calibrated(compute_s: float) -> int:
    """Return the number of products that take `compute_s` processor seconds."""
    import torch

    matrix = torch.rand(96, 96)
    times = []
    for _ in range(20):
        began_s = time.process_time()
        for _ in range(20):
            matrix @ matrix
        times.append((time.process_time() - began_s) / 20)
    return max(1, int(compute_s / min(times)))


def _run_rank(rank: int, specification: Specification, products: int) -> None:
    if specification.namespaces:
        sys.path.insert(0, HERE)
        from switched_network import enter

        enter(specification.namespaces[rank])
    os.environ.update(RANK=str(rank), KEEPSTEP_NODE=f"node-{rank}")

    def print_briefly(_: object, error: BaseException, __: object) -> None:
        print(f"rank {rank}: {str(error).splitlines()[0][:200]}", file=sys.stderr, flush=True)

    sys.excepthook = print_briefly
    import torch
    import torch.distributed as dist

    from keepstep import monitor

    torch.manual_seed(rank)
    dist.init_process_group("gloo")
    monitor.attach()
    work = Work(
        products,
        rank,
        Control(Path(specification.directory) / "control"),
        Habit(specification.habit),
    )
    step = {"ddp": _replicated, "fsdp": _sharded, "pipeline": _pipeline}[specification.job](
        rank, specification, work
    )
    path = Path(specification.disk) / f"rank-{rank}"
    number = 0

    def run_step() -> None:
        nonlocal number
        number += 1
        work.read_defect()
        work.begin_step(number)
        step()
        if number % SAVE_EVERY == 0:
            _save(path, work)

    if specification.overhead:
        _compare(run_step, rank, specification)
        return
    while True:
        run_step()


class Work:
    """The compute of a rank, with its defect."""

    def __init__(self, products: int, rank: int, control: Control, habit: Habit) -> None:
        import torch

        self.products, self.rank, self.control = products, rank, control
        self.habit, self.number, self.load = habit, 0, 1.0
        self._random = random.Random(rank)
        self.defect, self.value = Defect.NONE, 0.0
        self._matrix = torch.rand(96, 96)

    def read_defect(self) -> None:
        """Read this rank's defect for the next step."""
        self.defect, self.value = self.control.read(self.rank)

    def begin_step(self, number: int) -> None:
        """Set this rank's load in the next step; compile if that is due."""
        self.number = number
        match self.habit:
            case Habit.UNEVEN_STAGES:
                self.load = 1.3 if self.rank == 2 else 1.0
            case Habit.BUSY_EXPERT:
                self.load = 1.35 if self.rank == 3 and number >= HABIT_EVERY else 1.0
            case Habit.VARIABLE_LENGTHS:
                self.load = self._random.lognormvariate(0.0, 0.4)
            case Habit.RECOMPILES if self.is_pause_due():
                until_s = time.monotonic() + 6.0 + 2.0 * self.rank
                while time.monotonic() < until_s:
                    self._matrix @ self._matrix
            case _:
                pass

    def is_pause_due(self) -> bool:
        """Return whether a habit's long pause is in this step."""
        return self.number % HABIT_EVERY == 0

    def do(self, share: float) -> None:
        """Do a share of the step's compute, or show the defect."""
        if self.defect is Defect.LOOP:
            while True:
                pass
        if self.defect is Defect.GIL:
            ctypes.PyDLL(None).sleep(600)
        if self.defect is Defect.ERROR:
            raise ValueError("an unexpected batch")
        began_s = time.monotonic()
        for _ in range(max(1, int(self.products * share * self.load))):
            self._matrix @ self._matrix
        if self.defect is Defect.SLOW:
            until_s = began_s + self.value * (time.monotonic() - began_s)
            while time.monotonic() < until_s:
                self._matrix @ self._matrix


def _batches(work: Work) -> Iterator[Any]:
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    class Samples(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            paused_in = 0
            while True:
                is_slow = work.habit is Habit.SLOW_BATCHES and work.rank == 1
                if is_slow and work.is_pause_due() and paused_in != work.number:
                    paused_in = work.number
                    time.sleep(5.5)
                if work.defect is Defect.DATA_SLOW:
                    time.sleep(work.value)
                if work.defect is Defect.DATA_STALL:
                    os.read(os.pipe()[0], 1)
                yield torch.rand(256)

    return iter(DataLoader(Samples(), batch_size=4))


def _norm(work: Work, parameters: list[Any]) -> None:
    """Reduce the gradient's norm over all ranks; with a mismatch defect call something else."""
    import torch
    import torch.distributed as dist

    values = torch.zeros(64 if work.defect is Defect.MISMATCH_SIZE else 16)
    if work.defect is Defect.MISMATCH_ORDER:
        return
    if work.defect is Defect.MISMATCH_OPERATION:
        dist.broadcast(values, src=0)
        return
    dist.all_reduce(values)


def _route(work: Work) -> None:
    """Send tokens to experts and back: the last rank's expert gets as many more as its load."""
    import torch
    import torch.distributed as dist

    ranks, tokens = dist.get_world_size(), 64
    hot = int(tokens * (1.35 if work.number >= HABIT_EVERY else 1.0))
    sent = [hot if rank == ranks - 1 else tokens for rank in range(ranks)]
    received = [sent[work.rank]] * ranks
    at_experts = torch.empty(sum(received), 64)
    dist.all_to_all_single(at_experts, torch.rand(sum(sent), 64), received, sent)
    dist.all_to_all_single(torch.empty(sum(sent), 64), at_experts, sent, received)


def _blocks() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)
    )


def _replicated(rank: int, specification: Specification, work: Work) -> Callable[[], None]:
    from torch import nn

    model = nn.parallel.DistributedDataParallel(_blocks())

    def evaluate() -> None:
        # When steps are timed, nothing is evaluated.
        evaluates = rank == 0 and not specification.overhead
        evaluation_s = 20.0 if work.habit is Habit.LONG_EVALUATIONS else EVALUATION_S
        until_s = time.monotonic() + (evaluation_s if evaluates else 0.0)
        while time.monotonic() < until_s:
            _evaluate(model.module, work)

    return _training(model, work, evaluate)


def _sharded(rank: int, specification: Specification, work: Work) -> Callable[[], None]:
    from torch.distributed.fsdp import fully_shard

    model = _blocks()
    for index in (0, 2, 4):
        fully_shard(model[index])
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
    evaluate_every = HABIT_EVERY if work.habit is Habit.LONG_EVALUATIONS else EVALUATE_EVERY

    def step() -> None:
        nonlocal number
        batch = next(batches)
        if work.habit is Habit.ACCUMULATION:
            for _ in range(MICROBATCHES - 1):
                with model.no_sync():
                    model(batch).square().mean().backward()
                work.do(0.5)
        if work.habit is Habit.BUSY_EXPERT:
            _route(work)
        loss = model(batch).square().mean()
        work.do(1.0)
        loss.backward()
        _norm(work, list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        if number % evaluate_every == 0:
            evaluate()

    return step


def _pipeline(rank: int, specification: Specification, work: Work) -> Callable[[], None]:
    """Return a step of pipeline stages that send activations forward and gradients back (GPipe)."""
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
                received = torch.empty(rows, 256)
                dist.recv(received, rank - 1)
                received.requires_grad_()
            else:
                received = torch.full((rows, 256), float(batch))
            work.do(0.4 / MICROBATCHES)
            output = model(received)
            inputs.append(received)
            outputs.append(output)
            if rank < last:
                dist.send(output.detach(), rank + 1)
        for received, output in zip(reversed(inputs), reversed(outputs), strict=True):
            gradient = torch.ones(rows, 256)
            if rank < last:
                dist.recv(gradient, rank + 1)
            work.do(0.6 / MICROBATCHES)
            output.backward(gradient)
            if rank:
                assert received.grad is not None
                dist.send(received.grad, rank - 1)
        _norm(work, list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()

    return step


class _SlowFile(io.FileIO):
    """A file that flushes every 4 KiB to the disk."""

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        for begin in range(0, len(view), 4096):
            super().write(view[begin : begin + 4096])
            os.fsync(self.fileno())
        return len(view)


class _PausingFile(io.FileIO):
    """A file whose first write takes long, as on a busy store."""

    _PAUSE_S = 20.0
    _has_paused = False

    def write(self, content: Any) -> int:
        if not self._has_paused:
            self._has_paused = True
            time.sleep(self._PAUSE_S)
        return super().write(content) or 0


def _save(path: Path, work: Work) -> None:
    import torch

    state = {"weights": torch.zeros(2**16)}
    if work.habit is Habit.LONG_SAVES and work.is_pause_due() and work.rank == 0:
        with _PausingFile(path, "wb") as file:
            torch.save(state, file)
    elif work.defect is Defect.SLOW_DISK:
        with _SlowFile(path, "wb") as file:
            torch.save(state, file)
    else:
        torch.save(state, path)


def _compare(run_step: Callable[[], None], rank: int, specification: Specification) -> None:
    """Measure steps with and without recording, alternating; rank 0 writes the durations."""
    import torch.distributed as dist

    from keepstep import monitor
    from keepstep.monitor.telemetry.attachment import detach

    def window(count: int) -> tuple[float, float]:
        dist.barrier()
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        for _ in range(count):
            run_step()
        return (time.monotonic() - began_s) / count, (time.process_time() - began_cpu_s) / count

    durations: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    window(10)
    for number in range(specification.overhead):
        # Each goes first equally often.
        for variant in ("with", "without") if number % 2 else ("without", "with"):
            (monitor.attach if variant == "with" else detach)()
            window(1)
            durations[variant].append(window(10))
    monitor.attach()
    window(5)
    if rank == 0:
        (Path(specification.directory) / "overhead.json").write_text(json.dumps(durations))
    dist.barrier()


if __name__ == "__main__":
    main()
