"""Scenarios that the workers of the tests run: `python scenarios.py NAME`."""

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from keepstep import monitor
from keepstep.monitor.records import Measure


def announce(word: str) -> None:
    print(word, flush=True)


def wait() -> None:
    sys.stdin.readline()


def user_calls(rank: int) -> None:
    ones = torch.ones(4)
    many = torch.ones(8)
    dist.all_reduce(ones)
    handle = dist.all_reduce(ones, async_op=True)
    assert handle is not None
    handle.wait()
    dist.all_gather([torch.empty(4), torch.empty(4)], ones)
    dist.all_gather_into_tensor(many, ones)
    dist.reduce_scatter(ones, [torch.ones(4), torch.ones(4)])
    dist.reduce_scatter_tensor(ones, many)
    dist.broadcast(ones.to(torch.bfloat16), src=1)
    dist.reduce(ones, dst=1)
    dist.gather(ones, [torch.empty(4), torch.empty(4)] if rank == 0 else None, dst=0)
    dist.scatter(ones, [torch.ones(4), torch.ones(4)] if rank == 1 else None, src=1)
    dist.all_to_all_single(torch.empty(8), many)
    dist.barrier()
    dist.monitored_barrier()
    dist.all_gather_object([None, None], {"rank": rank})


def pairs(rank: int) -> None:
    other = 1 - rank
    sent_tensor, received_tensor = torch.ones(4), torch.empty(4)
    if rank == 0:
        dist.send(sent_tensor, other)
        dist.recv(received_tensor, other)
    else:
        dist.recv(received_tensor, other)
        dist.send(sent_tensor, other)
    sent = dist.isend(sent_tensor, other)
    received = dist.irecv(received_tensor, other)
    assert sent is not None
    assert received is not None
    received.wait()
    sent.wait()
    work = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent_tensor, other), dist.P2POp(dist.irecv, received_tensor, other)]
    )
    for handle in work:
        handle.wait()
    unwaited = dist.isend(sent_tensor, other)
    dist.recv(received_tensor, other)
    dist.barrier()
    # gloo cancels a send whose handle is dropped too early.
    del unwaited


def subgroups(rank: int) -> None:
    both = dist.new_group([0, 1], group_desc="both")
    alone = [dist.new_group([0]), dist.new_group([1])]
    dist.all_reduce(torch.ones(2), group=both)
    dist.all_reduce(torch.ones(2), group=alone[rank])
    dist.broadcast(torch.ones(2), group=both, group_src=1)
    if rank == 0:
        dist.recv(torch.empty(2), group=both)
    else:
        dist.send(torch.ones(2), 0, group=both)
    monitor.measure(Measure.REPLICA_CHECKSUM, 2**32 - 1, both)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def train(trained: nn.Module) -> None:
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    trained(torch.ones(4, 16)).sum().backward()
    optimizer.step()


def ddp(rank: int) -> None:
    train(nn.parallel.DistributedDataParallel(model()))


def fsdp(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    trained = model()
    fully_shard(trained)
    train(trained)


def tensor_parallel(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    train(parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))


def pipeline(rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(nn.Linear(16, 16), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(
        stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).sum()
    )
    if rank == 0:
        schedule.step(torch.ones(8, 16))
    else:
        schedule.step(target=torch.ones(8, 16))


PATHS: tuple[Callable[[int], None], ...] = (
    user_calls,
    pairs,
    subgroups,
    ddp,
    fsdp,
    tensor_parallel,
    pipeline,
)


def everything() -> None:
    monitor.attach()
    dist.init_process_group("gloo")
    for number, act in enumerate(PATHS, 1):
        monitor.begin_step(number)
        act(dist.get_rank())
    monitor.begin_step(len(PATHS) + 1)
    announce("done")
    wait()
    os._exit(0)


def hang() -> None:
    """Rank 1 stops taking part; the tests handle the others."""
    monitor.attach()
    dist.init_process_group("gloo")
    # Kept: a thread of gloo's that drops a tensor last of all waits for the GIL, with gloo's lock.
    tensor = torch.ones(4)
    for _ in range(5):
        dist.all_reduce(tensor)
    pending = None
    if dist.get_rank() == 0:
        pending = dist.irecv(torch.empty(4), 1)
    announce("ready")
    if dist.get_rank() == 1:
        ctypes.PyDLL(None).sleep(600)
    try:
        dist.all_reduce(tensor)
    except RuntimeError:
        announce("failed")
    wait()
    assert pending is not None
    os._exit(0)


def overtaken() -> None:
    """Rank 0 holds the GIL in C while its all-reduce continues in the backend's threads."""
    monitor.attach()
    dist.init_process_group("gloo")
    # The only operation: a thread of gloo's that drops one before it might wait for the GIL.
    tensor = torch.ones(4)
    if dist.get_rank() == 0:
        handle = dist.all_reduce(tensor, async_op=True)
        announce("called")
        ctypes.PyDLL(None).sleep(600)
        assert handle is not None
    else:
        wait()
        dist.all_reduce(tensor)
        wait()
    os._exit(0)


def generations() -> None:
    """A process group that is created again continues its numbers; a new generation restarts them.

    The new generation has its own ring.
    """
    recorder = monitor.attach(generation=1)
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(4))
        dist.destroy_process_group()
    announce("first")
    wait()
    recorder.reopen(replace(recorder.identity, generation=2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(4))
    announce("second")
    wait()
    os._exit(0)


def odd() -> None:
    """Calls that are invalid, and calls that only look like operations."""
    monitor.attach()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    import torch.testing._internal.distributed.fake_pg  # Registers the back end.

    fake = dist.new_group([0], backend="fake")
    dist.all_reduce(torch.ones(4, device="meta"), group=fake)
    dist.all_reduce(torch.ones(4), group=fake)
    dist.all_reduce(torch.ones(4, 4).to_sparse())
    with contextlib.suppress(RuntimeError):
        dist.reduce_scatter_tensor(torch.ones(3), torch.ones(4))
    announce("done")
    wait()
    os._exit(0)


class Saving(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        # In the loader's process: this must not be recorded in the worker's ring.
        torch.save(index, os.devnull)
        return torch.ones(16)


def loop() -> None:
    """Run a loop without any call of the monitor; it starts processes that are not recorded."""
    dist.init_process_group("gloo")
    trained = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(trained.parameters())
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    for batch in torch.utils.data.DataLoader(
        Saving(), batch_size=2, num_workers=1, multiprocessing_context="fork"
    ):
        trained(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(torch.ones(1))
    torch.save(trained.state_dict(), os.devnull)
    gc.collect()
    announce("done")
    wait()
    # Ends like the interpreter, but without waiting for gloo's threads.
    import atexit

    atexit._run_exitfuncs()
    os._exit(0)


def trains() -> None:
    """Train without end; after `wait`, the rank named by PARTS reduces more than the others."""
    dist.init_process_group("gloo")
    monitor.attach()
    trained = nn.parallel.DistributedDataParallel(model())
    parts = os.environ.get("PARTS") == str(dist.get_rank())
    for _ in range(5):
        train(trained)
        dist.all_reduce(torch.ones(4))
    announce("ready")
    wait()
    while True:
        train(trained)
        dist.all_reduce(torch.ones(8 if parts else 4))


def paced() -> None:
    """Train without end, a step in some twenty milliseconds."""
    dist.init_process_group("gloo")
    monitor.attach()
    trained = nn.parallel.DistributedDataParallel(model())
    announce("ready")
    while True:
        train(trained)
        time.sleep(0.02)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
