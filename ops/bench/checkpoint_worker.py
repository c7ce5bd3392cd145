"""Runs one rank of checkpoint.py, in a process forked from one that has imported this module.

The action is save, load, or async: save in the background several times, and copy the same bytes
meanwhile.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import keepstep.checkpoint.api  # Imported before measuring, as DCP is.
import keepstep.checkpoint.format.stored.files
import keepstep.checkpoint.saving.process_saver
from keepstep import checkpoint
from keepstep.checkpoint.dcp_stager import Stager
from keepstep.checkpoint.format.layout.descriptions import NOT_DESCRIBED
from keepstep.checkpoint.format.stored import cell_codec
from keepstep.checkpoint.format.stored.cell_codec import encode_cells, encoded_nbytes
from keepstep.checkpoint.live.state_mapping import capture
from keepstep.checkpoint.ranks.collective_plan import PlanCache, agree_on_save, boxes_reader
from keepstep.checkpoint.ranks.control_group import CONTROL_GROUPS
from ops.bench.processor_time import processor_s

# The first one pays for memory and processes.
BACKGROUND_SAVES = 6
ENCODINGS = 7


@dataclass(frozen=True)
class Work:
    """One rank's task."""

    action: str
    contender: str
    layout: str
    rank: int
    world: int
    directory: str
    megabytes: int
    store: str
    saves: int = 1
    device: str = "cpu"

    def own_file(self, kind: str) -> Path:
        """Return the path of this rank's file, for contenders with a file per rank."""
        return Path(self.directory) / f"{kind}-{self.world}-{self.rank}"

    def numbered(self, number: int) -> Work:
        """Return the work of one of several saves, which goes into a directory of its own."""
        directory = Path(self.directory) / f"save-{number}"
        directory.mkdir(exist_ok=True)
        return dataclasses.replace(self, directory=str(directory))


def shapes(megabytes: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a usual model: matrices, and as many small vectors."""
    tensor_shapes: dict[str, tuple[int, ...]] = {}
    width = 1024
    layers = max(1, megabytes * 2**20 // (4 * 12 * width * width))
    for layer in range(layers):
        tensor_shapes |= {
            f"blocks.{layer}.qkv": (3 * width, width), f"blocks.{layer}.out": (width, width),
            f"blocks.{layer}.up": (4 * width, width), f"blocks.{layer}.down": (width, 4 * width),
            f"blocks.{layer}.norm_1": (width,), f"blocks.{layer}.norm_2": (width,),
            f"blocks.{layer}.bias": (4 * width,),
        }  # fmt: skip
    return tensor_shapes


def state(work: Work, *, fill: bool) -> dict[str, torch.Tensor]:
    """Return all tensors: sharded by rows (FSDP), for "tp" by columns where possible, or whole."""
    mesh = init_device_mesh(work.device, (work.world,))
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes(work.megabytes).items():
        value = torch.randn(shape, generator=generator) if fill else torch.zeros(shape)
        is_whole = work.layout == "replicas" or (work.layout == "tp" and len(shape) == 1)
        placement = Replicate() if is_whole else Shard(1 if work.layout == "tp" else 0)
        tensors[name] = distribute_tensor(
            value.to(work.device), mesh, [placement], src_data_rank=None
        )
    return tensors


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save(work: Work, tensors: dict[str, torch.Tensor], number: int) -> float:
    """Save durably, as one of several; return for how many seconds training would be blocked."""
    began = time.monotonic()
    if work.contender == "keepstep":
        checkpoint.save(work.directory, tensors, step=number)
        return time.monotonic() - began
    if number > 1:
        work = work.numbered(number)
    match work.contender:
        case "raw":
            if work.rank == 0:
                write_raw(work, tensors)
            return time.monotonic() - began
        case "dcp":
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(work.directory, sync_files=True))
            return time.monotonic() - began
        case "dcp_async":
            future = dcp.async_save(
                tensors, storage_writer=dcp.FileSystemWriter(work.directory, sync_files=True)
            )
            blocked = time.monotonic() - began
            future.result()
            return blocked
        case "torch_save":
            path = work.own_file("torch")
            torch.save({name: local(tensor) for name, tensor in tensors.items()}, path)
            flush(path)
            return time.monotonic() - began
        case "dcp_s3":
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

            dcp.save(tensors, storage_writer=FsspecWriter(work.directory, sync_files=False))
            return time.monotonic() - began
        case "orbax":
            import orbax.checkpoint as orbax

            arrays = {name: local(tensor).numpy() for name, tensor in tensors.items()}
            orbax.PyTreeCheckpointer().save(Path(work.directory) / "orbax", arrays)
            for path in sorted(Path(work.directory).rglob("*")):
                flush(path)  # Orbax does not flush.
            return time.monotonic() - began
        case "safetensors":
            from safetensors.torch import save_file

            path = work.own_file("safetensors")
            save_file({name: local(tensor).contiguous() for name, tensor in tensors.items()}, path)
            flush(path)
            return time.monotonic() - began
    raise AssertionError(work.contender)


def write_raw(work: Work, tensors: dict[str, torch.Tensor]) -> None:
    """Write as many bytes as all ranks hold to one file, one after the other, and flush it."""
    path = work.own_file("raw")
    with path.open("wb", buffering=0) as file:
        for _ in range(work.world):
            for tensor in tensors.values():
                content = memoryview(local(tensor).numpy().reshape(-1).view(np.uint8))
                while content:
                    content = content[file.write(content) :]
        os.fsync(file.fileno())


def save_several_times(work: Work, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the seconds of the first save, and the median of those after it, if there are any.

    The tensors change in between.
    """
    blocked, durable = [], []
    for number in range(1, work.saves + 1):
        if number > 1:
            for tensor in tensors.values():
                tensor.add_(1)
            if work.rank == 0:
                os.sync()
        dist.barrier()
        began = time.monotonic()
        blocked.append(save(work, tensors, number))
        dist.barrier()
        durable.append(time.monotonic() - began)
    result: dict[str, Any] = {"blocked_s": blocked[0], "durable_s": durable[0]}
    if work.saves > 1:
        result["again_s"] = statistics.median(durable[1:])
    return result


def start_in_background(
    contender: str,
) -> Callable[[dict[str, torch.Tensor], str], Callable[[], object]]:
    """Return a function that starts to save, and returns one that waits until it is durable."""
    if contender == "keepstep":
        return lambda tensors, path: checkpoint.save(path, tensors, step=1, block=False).wait
    if contender == "torch_checkpointing":
        from torch_checkpointing import CheckpointManager

        manager = CheckpointManager(CheckpointManager.Config.with_async_save())

        def start_manager(tensors: dict[str, torch.Tensor], path: str) -> Callable[[], object]:
            future = manager.save(path, {"state": tensors})
            with manager.lock():  # It copies in a thread; the state may change afterwards.
                return future.result

        return start_manager
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

    # A form is where DCP writes (a thread or a process), and what memory it copies into.
    where, _, memory = contender.removeprefix("dcp_").partition("_")
    # Its thread's collectives would meet this thread's in one group.
    group = dist.new_group()
    stager: Any = None
    if memory == "keepstep":
        stager = Stager()
    elif memory:
        stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=memory == "pinned",
                use_shared_memory=memory == "shared",
                use_async_staging=False,
                use_non_blocking_copy=memory == "pinned",
            )
        )
        if torch.__version__ < "2.13":
            # PyTorch 2.11 and 2.12 free its buffers after every save, and then fail at the second.
            stager._state_dict_stager.close = lambda: None  # type: ignore[method-assign]

    def start(tensors: dict[str, torch.Tensor], path: str) -> Callable[[], object]:
        future: Any = async_save(
            tensors,
            storage_writer=dcp.FileSystemWriter(path, sync_files=True),
            process_group=group,
            async_checkpointer_type=AsyncCheckpointerType(where),
            async_stager=stager,
        )
        return lambda: getattr(future, "upload_completion", future).result()

    return start


def save_in_background(work: Work, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Save several times; return for how long the slowest rank was blocked, and copied."""
    start = start_in_background(work.contender)
    is_own = work.contender == "keepstep"
    on_gpu = work.device == "cuda"
    warm = {
        name: torch.ones_like(local(tensor), device="cpu", pin_memory=on_gpu)
        for name, tensor in tensors.items()
    }
    blocked, copied, cpu_ratios, writing, durable = [], [], [], [], []
    for number in range(BACKGROUND_SAVES):
        dist.barrier()
        began, cpu_0 = time.monotonic(), time.process_time()
        for name, tensor in tensors.items():
            warm[name].copy_(local(tensor), non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize()
        cpu_1 = time.process_time()
        copied.append(greatest(time.monotonic() - began))
        writer_0 = children_s() if is_own else 0.0
        dist.barrier()
        began, cpu_2 = time.monotonic(), time.process_time()
        wait = start(tensors, f"{work.directory}/{number}")
        cpu_3, returned = time.process_time(), time.monotonic()
        blocked.append(greatest(returned - began))
        cpu_ratios.append(greatest((cpu_3 - cpu_2) / (cpu_1 - cpu_0)))
        wait()
        durable.append(greatest(time.monotonic() - returned))
        if is_own:
            writing.append(total(children_s() - writer_0))
    own = {}
    # A GPU's tensors are encoded from the copies that another process has.
    if is_own and not on_gpu:
        checksums = checksums_s(tensors)
        own = {
            "background_s": statistics.median(durable[1:]),
            "checksum_share": greatest(checksums) / statistics.median(durable[1:]),
            "checksum_cpu_share": total(checksums) / statistics.median(writing[1:]),
        }
    return {
        **own,
        "first_blocked_s": blocked[0],
        "blocked_s": statistics.median(blocked[1:]),
        "memcpy_s": statistics.median(copied[1:]),
        "ratio": statistics.median(b / c for b, c in zip(blocked[1:], copied[1:], strict=True)),
        "cpu_ratio": statistics.median(cpu_ratios[1:]),
    }


def load(work: Work, tensors: dict[str, torch.Tensor]) -> None:
    match work.contender:
        case "keepstep":
            checkpoint.load(work.directory, tensors)
        case "dcp" | "dcp_async":
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(work.directory))
        case "dcp_s3":
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

            dcp.load(tensors, storage_reader=FsspecReader(work.directory))
        case "orbax":
            import orbax.checkpoint as orbax

            for name, array in (
                orbax.PyTreeCheckpointer().restore(Path(work.directory) / "orbax").items()
            ):
                local(tensors[name]).copy_(torch.from_numpy(array))
        case "torch_save":
            for name, tensor in torch.load(work.own_file("torch")).items():
                local(tensors[name]).copy_(tensor)
        case "safetensors":
            from safetensors.torch import load_file

            for name, tensor in load_file(work.own_file("safetensors")).items():
                local(tensors[name]).copy_(tensor)


def children_s() -> float:
    """Return the processor seconds of the processes that this one has started and that run."""
    return processor_s(psutil.Process().children(recursive=True))


def checksums_s(tensors: Mapping[str, torch.Tensor]) -> float:
    """Return the processor seconds that a rank's checksums take in a save of these tensors.

    One thread encodes the chunks that the rank writes with checksums, of what memory holds and of
    the cells that are stored, and without any; then each chunk is copied at once.
    """
    group = CONTROL_GROUPS.of()
    agreed = agree_on_save(lambda: capture(tensors, NOT_DESCRIBED, None), None, PlanCache(), group)
    read_box, own = boxes_reader(agreed, group), agreed.plan.own
    sizes = [encoded_nbytes(own.tensors[chunk.key], chunk.box.shape) for chunk in own.chunks]
    memory = np.zeros(max(sizes, default=0), np.uint8)

    def encode() -> float:
        began = time.process_time()
        for chunk, nbytes in zip(own.chunks, sizes, strict=True):
            values = read_box(chunk.key, chunk.box)
            encode_cells(own.tensors[chunk.key], values, memory[:nbytes], with_content=True)
        return time.process_time() - began

    nothing = SimpleNamespace(crc32c=lambda data, value=0: 0)
    taken = []
    for _ in range(ENCODINGS):
        with_checksums = encode()
        with (
            patch.object(cell_codec, "crc32c", nothing),
            patch.object(cell_codec, "_BAND_NBYTES", sys.maxsize),
        ):
            taken.append(with_checksums - encode())
    return statistics.median(taken)


def read_bytes() -> int:
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])


def total(number: float) -> float:
    sum_over_ranks = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(sum_over_ranks)
    return float(sum_over_ranks.item())


def greatest(number: float) -> float:
    greatest_of_ranks = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(greatest_of_ranks, dist.ReduceOp.MAX)
    return float(greatest_of_ranks.item())


def run(work: Work, environment: Mapping[str, str], result: Connection) -> None:
    """Do one rank's work; send its figures, or its error."""
    os.environ.update(environment)
    try:
        result.send(measure(work))
    except BaseException:
        result.send(traceback.format_exc())
        raise
    if work.action == "async" and work.contender == "keepstep":
        keepstep.checkpoint.saving.process_saver.PROCESS_SAVER.close()
    # Tensors still refer to process groups, which may abort the process at the interpreter's exit.
    sys.stdout.flush()
    os._exit(0)


def measure(work: Work) -> dict[str, Any]:
    torch.set_num_threads(1)
    if work.device == "cuda":
        torch.cuda.set_device(work.rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if work.device == "cuda" else "gloo",
        store=dist.FileStore(work.store, work.world),
        rank=work.rank,
        world_size=work.world,
    )
    tensors = state(work, fill=work.action != "load")
    needed = total(sum(local(tensor).nbytes for tensor in tensors.values()))
    result: dict[str, Any] = {}
    dist.barrier()
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read_before, began = read_bytes(), time.monotonic()
    if work.action == "async":
        result = save_in_background(work, tensors)
    elif work.action == "save":
        result = save_several_times(work, tensors)
    else:
        load(work, tensors)
        dist.barrier()
        # The kernel's counter does not include reads from sockets.
        distinct = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        ratio = None if "://" in work.directory else total(read_bytes() - read_before) / distinct
        result = {"load_s": time.monotonic() - began, "read_ratio": ratio}
        expected = state(work, fill=True)
        assert all(
            torch.equal(local(tensors[name]), local(tensor)) for name, tensor in expected.items()
        )
    result["peak_extra_bytes"] = total(
        (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before) * 1024
    )
    result["nbytes"] = needed
    dist.barrier()
    return result
