"""For users of `torch.distributed.checkpoint`: `dcp.save`, `dcp.async_save` and `dcp.load` on this format, with no other change.

```python
dcp.save(state, storage_writer=Writer("s3://bucket/run7", step=1000))
dcp.load(state, storage_reader=Reader("s3://bucket/run7"))
```

Tensors keep the names that DCP gives them. What is no tensor must be JSON: nothing that is stored is pickled. (DCP itself moves its plans
between ranks as pickles, and takes values that are no tensors as pickles in memory.)
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.planner import WriteItemType as Kind
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from keepstep.checkpoint.errors import CheckpointError, LayoutMismatch
from keepstep.checkpoint.layout.boxes import Box, Entry, Json, ShardIndex
from keepstep.checkpoint.layout.source import BoxRequest
from keepstep.checkpoint.live.optimizer_options import is_json
from keepstep.checkpoint.live.tensors import as_bytes, dtype_name, torch_dtype
from keepstep.checkpoint.stored.chunking import ChunkPlan, StoredTensor, plan_chunks
from keepstep.checkpoint.stored.format import StoredObject, StoredStep
from keepstep.checkpoint.stored.reader import StoredCheckpoint
from keepstep.checkpoint.stored.storage import open_storage
from keepstep.checkpoint.stored.writer import publish, write_part

_VALUES = "dcp/values"
_PATHS = "dcp/paths"
_PART_INDEX = MetadataIndex("part")


@dataclass(frozen=True, slots=True)
class _RankPlan:
    """What one rank writes, of the plan for all."""

    rank: int
    plan: ChunkPlan


class Writer(StorageWriter):
    """A storage writer for `dcp.save` and `dcp.async_save`.

    Args:
        url: where to; as for `checkpoint.save`. DCP's `checkpoint_id` takes its place if given.
        step: number of completed steps.
        generation: distinguishes attempts at one step.
    """

    def __init__(self, url: str | os.PathLike[str], *, step: int, generation: int = 0) -> None:
        super().__init__()
        self._url = os.fspath(url)
        self._stored = StoredStep(step, generation)
        self._tensors: dict[str, StoredTensor] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save."""
        if checkpoint_id:
            self._url = os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See `StorageWriter`."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See `StorageWriter`."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Divide the chunks among the ranks: each writes what it holds."""
        indexes = [
            ShardIndex(0, tuple(_entry(i) for i in plan.items if i.type != Kind.BYTE_IO), {})
            for plan in plans
        ]
        whole = plan_chunks(indexes, within_shards=True)
        self._tensors = whole.tensors
        shares = []
        for rank, plan in enumerate(plans):
            mine = {chunk.key for chunk in whole.chunks[rank]}
            tensors = {key: tensor for key, tensor in whole.tensors.items() if key in mine}
            shares.append(
                replace(
                    plan,
                    storage_data=_RankPlan(
                        rank, ChunkPlan(tensors, ((),) * rank + (whole.chunks[rank],))
                    ),
                )
            )
        return shares

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks."""
        share: _RankPlan = plan.storage_data
        items: dict[str, list[WriteItem]] = defaultdict(list)
        results = []
        for item in plan.items:
            if item.type == Kind.BYTE_IO:
                results.append(WriteResult(item.index, 0, {"value": _value(planner, item)}))
            else:
                items[item.index.fqn].append(item)
        resolved: dict[int, torch.Tensor] = {}

        def read_box(key: str, box: Box) -> npt.NDArray[np.uint8]:
            for item in items[key]:
                held = _box(item)
                if held.intersect(box) == box:
                    if id(item) not in resolved:
                        data = planner.resolve_data(item)
                        assert isinstance(data, torch.Tensor)
                        resolved[id(item)] = data.detach().cpu()
                    part = resolved[id(item)][box.within(held).slices].contiguous()
                    return np.frombuffer(as_bytes(part), np.uint8).reshape(
                        *box.shape, part.element_size()
                    )
            raise AssertionError("chunks lie within shards")

        storage = open_storage(self._url)
        part = write_part(
            storage, self._stored, share.plan, [share.rank], read_box, name=share.rank
        )
        sizes = {
            item.index: item.tensor_storage_size() or 0
            for of_key in items.values()
            for item in of_key
        }
        results += [WriteResult(index, nbytes, None) for index, nbytes in sizes.items()]
        results.append(WriteResult(_PART_INDEX, 0, {"part": part.to_json()}))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint."""
        parts: list[StoredObject] = []
        values: dict[str, Json] = {}
        for result in (one for of_rank in results for one in of_rank):
            if result.storage_data and "part" in result.storage_data:
                parts.append(StoredObject.from_json(result.storage_data["part"]))
            elif result.storage_data:
                values[result.index.fqn] = result.storage_data["value"]
        paths = {name: list(path) for name, path in (metadata.planner_data or {}).items()}
        publish(
            open_storage(self._url),
            self._stored,
            parts,
            self._tensors,
            {_VALUES: values, _PATHS: paths},
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a URL that can be written to."""
        return _is_url(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """See `StorageWriter`."""
        return StorageMeta(checkpoint_id=self._url)


class Reader(StorageReader):
    """A storage reader for `dcp.load`: of what `Writer` wrote, whatever the layout was.

    Args:
        url: where from; DCP's `checkpoint_id` takes its place if given.
        step: which one; None: the newest.
    """

    def __init__(self, url: str | os.PathLike[str], *, step: int | None = None) -> None:
        super().__init__()
        self._url = os.fspath(url)
        self._step = step
        self._opened: StoredCheckpoint | None = None

    @property
    def _source(self) -> StoredCheckpoint:
        # Only one rank reads the metadata for DCP; each opens the checkpoint for itself.
        if self._opened is None:
            self._opened = StoredCheckpoint.open(self._url, self._step)
        return self._opened

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load."""
        self._opened = None
        if checkpoint_id:
            self._url = os.fspath(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Describe the checkpoint as DCP does; every tensor is one piece, of which planners take what they need."""
        described: dict[str, Any] = {
            key: TensorStorageMetadata(
                TensorProperties(dtype=torch_dtype(spec.dtype)),
                torch.Size(spec.shape),
                [ChunkStorageMetadata(torch.Size([0] * len(spec.shape)), torch.Size(spec.shape))],
            )
            for key, spec in self._source.tensors.items()
        }
        described.update(
            {name: BytesStorageMetadata() for name in self._source.documents.get(_VALUES, {})}
        )
        paths = {name: tuple(path) for name, path in self._source.documents.get(_PATHS, {}).items()}
        # The step travels with the metadata: all ranks must read the same one, whatever appears meanwhile.
        chosen = [self._source.stored.step, self._source.stored.generation]
        return Metadata(described, planner_data=paths, storage_data=chosen)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """See `StorageReader`."""
        if self._opened is None and metadata.storage_data is not None:
            self._opened = StoredCheckpoint.open(self._url, *metadata.storage_data)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See `StorageReader`."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See `StorageReader`."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for, straight into its tensors where they lie in one piece."""
        requests: list[BoxRequest] = []
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        targets = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                data = io.BytesIO()
                torch.save(self._source.documents[_VALUES][name], data)
                data.seek(0)
                planner.load_bytes(item, data)
                continue
            target = planner.resolve_tensor(item).detach()
            targets.append((item, target))
            stored = torch_dtype(self._source.tensors[name].dtype)
            buffer = target
            if not (
                target.is_contiguous() and target.device.type == "cpu" and target.dtype == stored
            ):
                buffer = torch.empty(tuple(item.lengths), dtype=stored)
                staged.append((target, buffer))
            requests.append(
                BoxRequest(
                    name, Box(tuple(item.storage_offsets), tuple(item.lengths)), as_bytes(buffer)
                )
            )
        self._source.read(requests)
        for target, buffer in staged:
            target.copy_(buffer)
        for item, target in targets:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a URL that can be read from."""
        return _is_url(checkpoint_id)


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def _entry(item: WriteItem) -> Entry:
    assert item.tensor_data is not None
    box, dtype = _box(item), item.tensor_data.properties.dtype
    return Entry(
        key=item.index.fqn,
        dtype=dtype_name(dtype),
        global_shape=tuple(item.tensor_data.size),
        box=box,
        byte_offset=0,
        nbytes=box.size * dtype.itemsize,
    )


def _value(planner: SavePlanner, item: WriteItem) -> Json:
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise LayoutMismatch(
            f"{item.index.fqn} is no tensor, and {type(planner).__name__} gives such values only as pickles, which this "
            "format does not hold; use a planner derived from DefaultSavePlanner"
        )
    value = lookup(item.index)
    if not is_json(value):
        raise LayoutMismatch(
            f"{item.index.fqn}: a {type(value).__name__} cannot be stored; give tensors and JSON values"
        )
    return value


def _is_url(checkpoint_id: str | os.PathLike[str]) -> bool:
    try:
        open_storage(os.fspath(checkpoint_id))
    except CheckpointError:
        return False
    return True
