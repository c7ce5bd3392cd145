"""Saving and loading without agents or snapshot servers: two functions, collective if there is a process group.

Ranks exchange what they hold (names and boxes, as JSON) once per save; tensor bytes go from each rank straight to storage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from checkpoint.chunking import plan_chunks
from checkpoint.errors import CheckpointError, LayoutMismatch
from checkpoint.format import StoredObject, StoredStep
from checkpoint.layout import Box, Entry, Json, ShardIndex
from checkpoint.live import (
    Capturer,
    LiveState,
    LiveTensor,
    allocate,
    as_bytes,
    describe,
    restore,
    restore_options,
)
from checkpoint.planner import plan_reads
from checkpoint.reader import StoredCheckpoint, list_steps
from checkpoint.storage import open_storage
from checkpoint.writer import publish, write_part

_VALUES = "values"

State = Mapping[str, object]


def save(url: str, state: State, *, step: int, generation: int = 0) -> None:
    """Store a checkpoint of `step` under `url`; it is complete, durable and verified to be so when this returns.

    Args:
        url: a path, `file://`, `s3://bucket/prefix` or `gs://bucket/prefix`.
        state: modules, optimizers of their parameters, tensors (sharded or not), JSON values and mappings of these, by name. With one module
            its tensors are `model/<name>` and its optimizer's `optim/<name>/<slot>`.
        step: number of completed steps.
        generation: distinguishes attempts at one step; the greatest is the one that loads.

    Raises:
        CheckpointExists: this step and generation is already there.
        CheckpointError: a rank could not write; every rank raises.
    """
    live = _capture(state)
    mine = _indexed(live)
    indexes = [ShardIndex.from_json(json.loads(data)) for data in _exchange(_encode(mine.to_json()))]
    rank = dist.get_rank() if _is_collective() else 0
    plan = plan_chunks(indexes)
    storage = open_storage(url)
    stored = StoredStep(step, generation)
    tensors = {tensor.key: tensor for tensor in live.tensors}
    outcome: Json
    try:
        part = write_part(
            storage, stored, plan, [rank], lambda key, box: _box(tensors[key], indexes, box), name=rank
        )
        outcome = {"part": part.to_json()}
    except CheckpointError as error:
        outcome = {"error": f"rank {rank}: {error}"}
    outcomes = _agree(outcome)
    published: Json = {}
    if rank == 0:
        documents = {name: value for index in indexes for name, value in index.documents.items()}
        try:
            parts = [StoredObject.from_json(one["part"]) for one in outcomes]
            publish(storage, stored, parts, plan.tensors, documents)
        except CheckpointError as error:
            published = {"error": str(error)}
    _agree(published)


def load(url: str, state: State, *, step: int | None = None, strict: bool = True) -> int:
    """Fill `state` from a checkpoint under `url`, whatever layout it was saved in; return its step.

    Args:
        url: as for `save`.
        state: as for `save`; modules, optimizers and tensors are filled in place. Mutable mappings get their JSON values.
        step: which one; None: the newest.
        strict: refuse if names do not agree; else fill what both have.

    Raises:
        CheckpointMissing: there is none.
        LayoutMismatch: it does not fit; the message lists what.
        CheckpointDamaged: stored bytes were changed or lost.
    """
    if step is None and _is_collective():
        newest = torch.tensor([-1])
        if dist.get_rank() == 0:
            newest[0] = next((stored.step for stored in list_steps(url)), -1)
        dist.broadcast(newest, src=0)
        step = int(newest.item()) if newest.item() >= 0 else None
    source = StoredCheckpoint.open(url, step)
    for model, optimizers in _modules(state):
        allocate(model, optimizers, source.tensors)
    restore(_capture(state), source, strict=strict)
    for model, optimizers in _modules(state):
        restore_options(model, optimizers, source.documents)
    _fill_values(state, source.documents.get(_VALUES, {}))
    return source.step


def _modules(state: State) -> list[tuple[nn.Module, list[Optimizer]]]:
    """Return the state's module with its optimizers."""
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
    if len(modules) > 1:
        raise LayoutMismatch("the state has several modules; put them into one nn.ModuleDict, or save under several URLs")
    if optimizers and not modules:
        raise LayoutMismatch("the state has an optimizer but not the module whose parameters name its state; add it")
    return [(modules[0], optimizers)] if modules else []


def _capture(state: State) -> LiveState:
    tensors: list[LiveTensor] = []
    values: dict[str, Json] = {}
    documents: dict[str, Json] = {}
    for model, optimizers in _modules(state):
        captured = Capturer(model, optimizers).capture()
        tensors += captured.tensors
        documents.update(captured.documents)
    _walk(state, "", tensors, values)
    return LiveState(tuple(tensors), {**documents, _VALUES: values})


def _walk(state: State, prefix: str, tensors: list[LiveTensor], values: dict[str, Json]) -> None:
    for name, value in state.items():
        key = f"{prefix}{name}"
        if isinstance(value, torch.Tensor):
            tensors.append(describe(key, value))
        elif isinstance(value, Mapping):
            _walk(value, f"{key}/", tensors, values)
        elif not isinstance(value, nn.Module | Optimizer):
            values[key] = value


def _fill_values(state: State, values: Mapping[str, Json], prefix: str = "") -> None:
    for name, value in list(state.items()):
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            _fill_values(value, values, f"{key}/")
        elif key in values and isinstance(state, dict):
            state[name] = values[key]


def _indexed(live: LiveState) -> ShardIndex:
    entries = tuple(
        Entry(t.key, t.dtype, t.global_shape, t.box, 0, t.data.numel() * t.data.element_size())
        for t in live.tensors
    )
    return ShardIndex(0, entries, live.documents)


def _box(tensor: LiveTensor, indexes: Sequence[ShardIndex], box: Box) -> npt.NDArray[np.uint8]:
    """Return the bytes of a box that this rank holds."""
    if box.intersect(tensor.box) != box:
        # Standalone saving has no way to peers' memory: a grid whose chunks cross shards needs the snapshot servers.
        holders = len(plan_reads([(tensor.key, box)], indexes))
        raise CheckpointError(
            f"{tensor.key}: a chunk at {box.offset} spans {holders} ranks' shards; save it under `keepstep run`"
        )
    part = tensor.data[box.within(tensor.box).slices].contiguous().cpu()
    raw = np.frombuffer(as_bytes(part), np.uint8)
    return raw.reshape(*box.shape, part.element_size())


def _is_collective() -> bool:
    return dist.is_available() and dist.is_initialized()


def _encode(content: Json) -> bytes:
    return json.dumps(content).encode()


def _exchange(mine: bytes) -> list[bytes]:
    """Give every rank every rank's bytes."""
    if not _is_collective():
        return [mine]
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)], device=device))
    longest = max(int(size.item()) for size in sizes)
    padded = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8).to(device)
    gathered = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [
        bytes(data.cpu().numpy()[: int(size.item())]) for data, size in zip(gathered, sizes, strict=True)
    ]


def _agree(outcome: Json) -> list[Json]:
    """Tell every rank how it went everywhere; raise everywhere if it failed anywhere."""
    outcomes: list[Json] = [json.loads(data) for data in _exchange(_encode(outcome))]
    failed = [one["error"] for one in outcomes if "error" in one]
    if failed:
        raise CheckpointError(failed[0])
    return outcomes
