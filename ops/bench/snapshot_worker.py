"""Runs one rank, on a node of its own, of snapshot.py.

`snapshot_worker.py RANK WORLD SERVER STORE DIRECTORY DEVICE` reads requests as JSON lines from
standard input, and writes one answer for each to standard output. `committed` lines only report a
commit, and have no answer.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any

# This directory has modules with the names of others, which it must not hide.
sys.path.remove(str(Path(__file__).parent))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, GPTConfig, initialize
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from keepstep.checkpoint.live.capture import LiveStateReader
from keepstep.checkpoint.live.copier import Snapshotter
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient

RANK, WORLD = int(sys.argv[1]), int(sys.argv[2])
SERVER, STORE, DIRECTORY = sys.argv[3], sys.argv[4], Path(sys.argv[5])
ON_GPU = sys.argv[6] == "cuda"
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
CONTEXT, SAMPLES = (1024, 8) if ON_GPU else (128, 4)
# On the host tensors are smaller than in real models, so that a snapshot's cost per tensor counts
# more.
CONFIG = (
    GPTConfig(width=2048, layers=8, heads=16, context=CONTEXT)
    if ON_GPU
    else GPTConfig(width=1024, layers=4, heads=16, context=CONTEXT)
)


class Requests:
    """Reads the benchmark's requests, and the newest commit that it has reported."""

    def __init__(self) -> None:
        self.queue: Queue[dict[str, Any] | None] = Queue()
        self.changed = threading.Condition()
        self.committed = -1
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for_commit(self, step: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.committed >= step)

    def _read(self) -> None:
        for line in sys.stdin:
            request = json.loads(line)
            if "committed" in request:
                with self.changed:
                    self.committed = request["committed"]
                    self.changed.notify_all()
            else:
                self.queue.put(request)
        self.queue.put(None)


class Trainer:
    """Trains a sharded model and takes its snapshots."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        mesh = init_device_mesh(DEVICE.type, (WORLD,))
        with torch.device("meta"):
            self.model = GPT(CONFIG)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.model.to_empty(device=DEVICE)
        initialize(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        shape = (SAMPLES // WORLD, CONTEXT)
        self.batch = tuple(torch.randint(0, 256, shape, device=DEVICE) for _ in range(2))
        self.state_reader = LiveStateReader(self.model, [self.optimizer])
        self.client = SnapshotClient(SERVER, bytes.fromhex(os.environ["SECRET"]))
        self.snapshotter: Snapshotter | None = None
        # The stager keeps its staging buffers between saves: shared ones, or those of a GPU, which
        # are page-locked and filled during the step.
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=ON_GPU,
                use_shared_memory=not ON_GPU,
                use_async_staging=ON_GPU,
                use_non_blocking_copy=ON_GPU,
            )
        )
        if torch.__version__ < "2.13":
            # PyTorch 2.11 and 2.12 free them after every save, and then fail at the second.
            self.stager._state_dict_stager.close = lambda: None  # type: ignore[method-assign]
        self.saving_group = dist.new_group(backend="gloo")
        self.number = self.taken = 0

    def enter(self, generation: int) -> None:
        if self.snapshotter is not None:
            self.snapshotter.close()
        self.snapshotter = Snapshotter(self.client, generation, RANK, DEVICE)
        self.requests.committed, self.taken = -1, -1

    @property
    def nbytes(self) -> int:
        return sum(
            tensor.data.numel() * tensor.data.element_size()
            for tensor in self.state_reader.capture().tensors
        )

    def snapshot(self) -> None:
        assert self.snapshotter is not None
        live = self.state_reader.capture()
        self.snapshotter.start(self.number, live.tensors, live.documents)
        self.taken = self.number

    def window(self, mode: str, steps: int) -> dict[str, Any]:
        assert self.snapshotter is not None
        taken, seconds, blocked = 0, [], []
        future: Any = None
        staging: Any = None
        writer = FileSystemWriter(DIRECTORY / "dcp", sync_files=False)
        for _ in range(steps):
            began = time.monotonic()
            self.optimizer.zero_grad()
            loss = self.model(self.batch)
            agreement = self.agree() if mode == "lazy" else None
            loss.backward()
            before_wait = time.monotonic()
            if staging is not None:
                staging.result()
            agreed = False
            if agreement is not None:
                self.snapshotter.wait()
                ready, work = agreement
                work.wait()
                agreed = bool(ready.item())
            at_write = time.monotonic()
            self.optimizer.step()
            self.number += 1
            after_write = time.monotonic()
            if mode == "lazy" and agreed:
                self.snapshot()
                taken += 1
            elif mode == "sync":
                self.requests.wait_for_commit(self.taken)
                self.snapshot()
                self.snapshotter.wait()
            elif mode == "dcp_async":
                if future is not None:
                    _uploaded(future)
                state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
                future = dcp.async_save(
                    state,
                    storage_writer=writer,
                    process_group=self.saving_group,
                    async_stager=self.stager,
                )
                staging = getattr(future, "staging_completion", None)
            blocked.append(at_write - before_wait + time.monotonic() - after_write)
            if ON_GPU:
                torch.cuda.current_stream().synchronize()
            seconds.append(time.monotonic() - began)
        if future is not None:
            _uploaded(future)
        self.snapshotter.wait()
        self.requests.wait_for_commit(self.taken)
        shutil.rmtree(DIRECTORY / "dcp", ignore_errors=True)
        return {"seconds": seconds, "blocked": blocked, "taken": taken}

    def agree(self) -> tuple[torch.Tensor, dist.Work]:
        """Start the ranks' agreement on a snapshot, which runs during the backward pass.

        As in `keepstep.elastic.trainer`, they take one if all know that the last is committed.
        """
        ready = torch.tensor([int(self.requests.committed >= self.taken)])
        return ready, dist.all_reduce(ready, dist.ReduceOp.MIN, async_op=True)

    def single(self) -> dict[str, Any]:
        """Take a snapshot while nothing else runs."""
        assert self.snapshotter is not None
        self.requests.wait_for_commit(self.taken)
        self.number += 1
        began = time.monotonic()
        self.snapshot()
        self.snapshotter.wait()
        return {"began_s": began, "sealed_s": time.monotonic(), "step": self.number}

    def memcpy(self) -> dict[str, Any]:
        """Copy all state to memory allocated before, on one thread, in one call."""
        sources = [tensor.data for tensor in self.state_reader.capture().tensors]
        targets = [torch.zeros_like(source, device="cpu", pin_memory=ON_GPU) for source in sources]

        def copy() -> None:
            torch._foreach_copy_(targets, sources, non_blocking=ON_GPU)
            if ON_GPU:
                torch.cuda.synchronize()

        best = min(_timed(copy) for _ in range(5))
        return {"seconds": best, "nbytes": self.nbytes}


def _uploaded(future: Any) -> None:
    """Wait until DCP has written a checkpoint."""
    getattr(future, "upload_completion", future).result()


def _timed(act: Any) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


@torch.no_grad()
def _memcpy(trainer: Trainer) -> dict[str, Any]:
    return trainer.memcpy()


def main() -> None:
    torch.set_num_threads(1)
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if ON_GPU else "gloo",
        store=dist.FileStore(STORE, WORLD),
        rank=RANK,
        world_size=WORLD,
    )
    requests = Requests()
    trainer = Trainer(requests)
    while (request := requests.queue.get()) is not None:
        answer: dict[str, Any] = {}
        match request["do"]:
            case "enter":
                trainer.enter(request["generation"])
            case "window":
                answer = trainer.window(request["mode"], request["steps"])
            case "single":
                answer = trainer.single()
            case "memcpy":
                answer = _memcpy(trainer)
        print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
