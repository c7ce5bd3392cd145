"""Runs one rank of checkpoint.py; rank 0 prints a JSON line.

`checkpoint_worker.py ACTION CONTENDER LAYOUT RANK WORLD DIRECTORY MEGABYTES STORE`
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

# This directory has a `checkpoint.py`, which must not hide other modules.
sys.path.remove(str(Path(__file__).parent))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import keepstep.checkpoint.api  # Imported before measuring, as DCP is.
import keepstep.checkpoint.stored.files  # noqa: F401
from keepstep import checkpoint

ACTION, CONTENDER, LAYOUT = sys.argv[1:4]
RANK, WORLD = int(sys.argv[4]), int(sys.argv[5])
DIRECTORY, MEGABYTES, STORE = sys.argv[6], int(sys.argv[7]), sys.argv[8]


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of a usual model: matrices, and as many small vectors."""
    tensor_shapes: dict[str, tuple[int, ...]] = {}
    width = 1024
    layers = max(1, MEGABYTES * 2**20 // (4 * 12 * width * width))
    for layer in range(layers):
        tensor_shapes |= {
            f"blocks.{layer}.qkv": (3 * width, width), f"blocks.{layer}.out": (width, width),
            f"blocks.{layer}.up": (4 * width, width), f"blocks.{layer}.down": (width, 4 * width),
            f"blocks.{layer}.norm_1": (width,), f"blocks.{layer}.norm_2": (width,),
            f"blocks.{layer}.bias": (4 * width,),
        }  # fmt: skip
    return tensor_shapes


def state(*, fill: bool) -> dict[str, torch.Tensor]:
    """Return all tensors: sharded by rows (FSDP), for "tp" by columns where possible, or whole."""
    mesh = init_device_mesh("cpu", (WORLD,))
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes().items():
        value = torch.randn(shape, generator=generator) if fill else torch.zeros(shape)
        is_whole = LAYOUT == "replicas" or (LAYOUT == "tp" and len(shape) == 1)
        placement = Replicate() if is_whole else Shard(1 if LAYOUT == "tp" else 0)
        tensors[name] = distribute_tensor(value, mesh, [placement], src_data_rank=None)
    return tensors


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_file(kind: str) -> Path:
    return Path(DIRECTORY) / f"{kind}-{WORLD}-{RANK}"


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save(tensors: dict[str, torch.Tensor]) -> float:
    """Save durably; return for how many seconds training would be blocked."""
    began = time.monotonic()
    match CONTENDER:
        case "keepstep":
            checkpoint.save(DIRECTORY, tensors, step=1)
            return time.monotonic() - began
        case "dcp":
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(DIRECTORY, sync_files=True))
            return time.monotonic() - began
        case "dcp_async":
            future = dcp.async_save(
                tensors, storage_writer=dcp.FileSystemWriter(DIRECTORY, sync_files=True)
            )
            blocked = time.monotonic() - began
            future.result()
            return blocked
        case "torch_save":
            path = own_file("torch")
            torch.save({name: local(tensor) for name, tensor in tensors.items()}, path)
            flush(path)
            return time.monotonic() - began
        case "dcp_s3":
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

            dcp.save(tensors, storage_writer=FsspecWriter(DIRECTORY, sync_files=False))
            return time.monotonic() - began
        case "orbax":
            import orbax.checkpoint as orbax

            arrays = {name: local(tensor).numpy() for name, tensor in tensors.items()}
            orbax.PyTreeCheckpointer().save(Path(DIRECTORY) / "orbax", arrays)
            for path in sorted(Path(DIRECTORY).rglob("*")):
                flush(path)  # Orbax does not flush.
            return time.monotonic() - began
        case "safetensors":
            from safetensors.torch import save_file

            path = own_file("safetensors")
            save_file({name: local(tensor).contiguous() for name, tensor in tensors.items()}, path)
            flush(path)
            return time.monotonic() - began
    raise AssertionError(CONTENDER)


def load(tensors: dict[str, torch.Tensor]) -> None:
    match CONTENDER:
        case "keepstep":
            checkpoint.load(DIRECTORY, tensors)
        case "dcp" | "dcp_async":
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(DIRECTORY))
        case "dcp_s3":
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

            dcp.load(tensors, storage_reader=FsspecReader(DIRECTORY))
        case "orbax":
            import orbax.checkpoint as orbax

            for name, array in (
                orbax.PyTreeCheckpointer().restore(Path(DIRECTORY) / "orbax").items()
            ):
                local(tensors[name]).copy_(torch.from_numpy(array))
        case "torch_save":
            for name, tensor in torch.load(own_file("torch")).items():
                local(tensors[name]).copy_(tensor)
        case "safetensors":
            from safetensors.torch import load_file

            for name, tensor in load_file(own_file("safetensors")).items():
                local(tensors[name]).copy_(tensor)


def read_bytes() -> int:
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])


def total(number: float) -> float:
    sum_over_ranks = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(sum_over_ranks)
    return float(sum_over_ranks.item())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(STORE, WORLD), rank=RANK, world_size=WORLD)
    tensors = state(fill=ACTION == "save")
    needed = total(sum(local(tensor).nbytes for tensor in tensors.values()))
    result: dict[str, Any] = {}
    dist.barrier()
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read_before, began = read_bytes(), time.monotonic()
    if ACTION == "save":
        blocked = save(tensors)
        dist.barrier()
        result = {"blocked_s": blocked, "durable_s": time.monotonic() - began}
    else:
        load(tensors)
        dist.barrier()
        # The kernel's counter does not include reads from sockets.
        distinct = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        ratio = None if "://" in DIRECTORY else total(read_bytes() - read_before) / distinct
        result = {"load_s": time.monotonic() - began, "read_ratio": ratio}
        expected = state(fill=True)
        assert all(
            torch.equal(local(tensors[name]), local(tensor)) for name, tensor in expected.items()
        )
    result["peak_extra_bytes"] = total(
        (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before) * 1024
    )
    result["nbytes"] = needed
    if RANK == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    # Tensors still refer to process groups, which may abort the process at the interpreter's exit.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
