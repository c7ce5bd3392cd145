"""Storage writer and reader for `torch.distributed.checkpoint` (DCP), in keepstep's format.

They work with `dcp.save`, `dcp.async_save` and `dcp.load` without any other change:

```python
dcp.save(state, storage_writer=Writer("s3://bucket/run7", step=1000))
dcp.load(state, storage_reader=Reader("s3://bucket/run7"))
```

Tensors keep the names that DCP gives them. Other values must be JSON: nothing that is stored is
pickled. (DCP itself sends its plans between ranks as pickles, and takes values other than tensors
as pickles in memory.)
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
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
from keepstep.checkpoint.format.layout.boxes import Box, Entry, Json, ShardIndex
from keepstep.checkpoint.format.layout.completeness import shortened
from keepstep.checkpoint.format.layout.documents import PROVENANCE
from keepstep.checkpoint.format.layout.source import BoxRequest
from keepstep.checkpoint.format.stored.chunking import (
    ChunkPlan,
    Compression,
    StoredTensor,
    check_compression,
    plan_chunks,
)
from keepstep.checkpoint.format.stored.manifest import StoredObject
from keepstep.checkpoint.format.stored.object_names import Attempt, StoredStep, whole_number
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.format.stored.writer import publish, write_part
from keepstep.checkpoint.live.optimizer_options import obstacle_to_json
from keepstep.checkpoint.live.provenance import provenance
from keepstep.checkpoint.live.storable import check_fillable, check_storable, check_text
from keepstep.checkpoint.live.tensors import (
    as_bytes,
    copyable,
    dtype_name,
    is_plain,
    plain,
    torch_dtype,
)
from keepstep.torch_internals import has_plan_caching

log = logging.getLogger("keepstep")

_VALUES = "dcp/values"
_PATHS = "dcp/paths"
_PART_INDEX = MetadataIndex("part")


@dataclass(frozen=True, slots=True)
class _RankPlan:
    """The part of the plan for all ranks that one rank writes."""

    rank: int
    plan: ChunkPlan
    attempt: Attempt


class Writer(StorageWriter):
    """A storage writer for `dcp.save` and `dcp.async_save`.

    Args:
        url: as for `checkpoint.save`. DCP's `checkpoint_id` replaces it, if given.
        step: number of completed steps.
        generation: distinguishes attempts at one step.
        compression: as for `checkpoint.save`.

    Raises:
        ValueError: there is no such compression.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        step: int,
        generation: int = 0,
        compression: Compression | None = None,
    ) -> None:
        super().__init__()
        check_compression(compression)
        self._compression = compression
        self._url = os.fspath(url)
        self._stored = StoredStep.of(step, generation)
        self._tensors: dict[str, StoredTensor] = {}
        self._chunk_parts: dict[str, list[int]] = {}
        self._attempt: Attempt | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start another save."""
        if checkpoint_id:
            self._url = os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See `StorageWriter`."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See `StorageWriter`."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Divide the chunks among the ranks: each rank writes chunks that it holds.

        Raises:
            LayoutMismatch: the planner sends plans that have changed only, so that what the other
                ranks hold is not known here.
        """
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise _plan_caching_refused()
        indexes = [
            ShardIndex(0, tuple(_entry(i) for i in plan.items if i.type != Kind.BYTE_IO), {})
            for plan in plans
        ]
        chunk_plan = plan_chunks(indexes, within_shards=True, compression=self._compression)
        self._tensors, self._chunk_parts = chunk_plan.tensors, chunk_plan.chunk_parts()
        self._attempt = Attempt(self._stored, uuid.uuid4().hex)
        rank_plans = []
        for rank, plan in enumerate(plans):
            chunks = chunk_plan.chunks[rank]
            keys = {chunk.key for chunk in chunks}
            tensors = {key: tensor for key, tensor in chunk_plan.tensors.items() if key in keys}
            # `write_part` finds a writer's chunks by its rank; those of other ranks are left out.
            own_plan = ChunkPlan(tensors, ((),) * rank + (chunks,))
            rank_plans.append(replace(plan, storage_data=_RankPlan(rank, own_plan, self._attempt)))
        return rank_plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks.

        Raises:
            LayoutMismatch: the planner caches plans; refused at the first save, not at the second,
                which would be the first to be wrong.
        """
        if has_plan_caching(planner):
            raise _plan_caching_refused()
        own: _RankPlan = plan.storage_data
        items: dict[str, list[WriteItem]] = defaultdict(list)
        results = []
        for item in plan.items:
            check_text(item.index.fqn)
            if item.type == Kind.BYTE_IO:
                results.append(WriteResult(item.index, 0, {"value": _value(planner, item)}))
            else:
                items[item.index.fqn].append(item)
        # Whatever cannot be stored is refused before anything is written.
        tensors = {id(item): _tensor(planner, item) for item in itertools.chain(*items.values())}
        copies: dict[int, torch.Tensor] = {}

        def read_box(key: str, box: Box) -> npt.NDArray[np.uint8]:
            for item in items[key]:
                shard_box = _box(item)
                if box.is_within(shard_box):
                    if id(item) not in copies:
                        copies[id(item)] = tensors[id(item)].cpu()
                    part = plain(copies[id(item)][box.within(shard_box).slices])
                    return np.frombuffer(as_bytes(part), np.uint8).reshape(
                        *box.shape, part.element_size()
                    )
            raise AssertionError("chunks lie within shards")

        storage = open_storage(self._url)
        part = write_part(storage, own.attempt, own.plan, [own.rank], read_box, name=own.rank)
        sizes = {
            item.index: item.tensor_storage_size() or 0
            for items_of_key in items.values()
            for item in items_of_key
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
        for results_of_rank in results:
            for result in results_of_rank:
                if result.storage_data and "part" in result.storage_data:
                    parts.append(StoredObject.from_json(result.storage_data["part"]))
                elif result.storage_data:
                    values[result.index.fqn] = result.storage_data["value"]
        assert self._attempt is not None, "the rank that finishes has made the plan"
        paths = {name: list(path) for name, path in (metadata.planner_data or {}).items()}
        publish(
            open_storage(self._url),
            self._attempt,
            parts,
            self._tensors,
            self._chunk_parts,
            {
                _VALUES: values,
                _PATHS: paths,
                PROVENANCE: provenance((), world_size=len(results), now=datetime.now(UTC)),
            },
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a URL that can be written to."""
        return _is_url(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """See `StorageWriter`."""
        return StorageMeta(checkpoint_id=self._url)


class Reader(StorageReader):
    """A storage reader for `dcp.load`, of checkpoints that `Writer` wrote in any layout.

    Args:
        url: as for `checkpoint.load`. DCP's `checkpoint_id` replaces it, if given.
        step: the step to load; None for the newest.
    """

    def __init__(self, url: str | os.PathLike[str], *, step: int | None = None) -> None:
        super().__init__()
        self._url = os.fspath(url)
        self._step = None if step is None else whole_number("step", step)
        self._opened: StoredCheckpoint | None = None

    @property
    def _source(self) -> StoredCheckpoint:
        # Every rank opens the checkpoint itself; `prepare_global_plan` has all read the same one.
        if self._opened is None:
            self._opened = StoredCheckpoint.open(open_storage(self._url), self._step)
        return self._opened

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start another load."""
        self._opened = None
        if checkpoint_id:
            self._url = os.fspath(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata in DCP's terms: every tensor is one chunk.

        DCP's planners take the part of the chunk that they need.
        """
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
        return Metadata(described, planner_data=paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """See `StorageReader`."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See `StorageReader`."""
        return replace(plan, storage_data=self._source.stored)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Have all ranks read the newest checkpoint that any of them has found.

        Each has looked for itself, and another one may have been committed meanwhile.

        What no rank asks for is no error in DCP: a warning lists it, where the state has the
        top-level name that it lies under.
        """
        found: list[StoredStep] = [plan.storage_data or self._source.stored for plan in plans]
        newest = max(found, key=lambda stored: (stored.step, stored.generation))
        requested = {item.storage_index.fqn for plan in plans for item in plan.items}
        paths = self._source.documents.get(_PATHS, {})
        for line in _left(self._source, requested, paths):
            log.warning("%s: not loaded: %s", self._url, line)
        return [replace(plan, storage_data=newest) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the plan's items; contiguous CPU tensors of the stored type are read in place."""
        # A planner of the user's may return plans of its own.
        chosen: StoredStep = plan.storage_data or self._source.stored
        if self._source.stored != chosen:
            self._opened = StoredCheckpoint.open(
                open_storage(self._url), chosen.step, chosen.generation
            )
            self._check_has(item.storage_index.fqn for item in plan.items)
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
            target = planner.resolve_tensor(item)
            check_storable(name, target)
            check_fillable(name, target)
            target = target.detach()
            targets.append((item, target))
            dtype = torch_dtype(self._source.tensors[name].dtype)
            is_direct = is_plain(target) and target.dtype == dtype
            buffer = target if is_direct else torch.empty(tuple(item.lengths), dtype=dtype)
            if not is_direct:
                staged.append((target, buffer))
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            requests.append(BoxRequest(name, box, as_bytes(buffer)))
        self._source.read(requests)
        for target, buffer in staged:
            copyable(target).copy_(copyable(buffer))
        for item, target in targets:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _check_has(self, names: Iterable[str]) -> None:
        """Raise LayoutMismatch if a plan was made for a checkpoint that has other names."""
        known = {*self._source.tensors, *self._source.documents.get(_VALUES, {})}
        missing = next((name for name in names if name not in known), None)
        if missing is not None:
            raise LayoutMismatch(
                f"{self._url}: {self._source.stored.directory}, which appeared during the load, "
                f"does not have {missing}; load again, or name the step"
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a URL that can be read from."""
        return _is_url(checkpoint_id)


def _left(
    source: StoredCheckpoint, requested: Collection[str], paths: Mapping[str, Sequence[Any]]
) -> Iterator[str]:
    """Yield what a checkpoint has that no rank asks for, in words, for each top-level name.

    Args:
        source: the checkpoint.
        requested: the names that any rank asks for.
        paths: the path of each name in the state that was saved; a name without is its own.
    """
    left: dict[str, list[str]] = {}
    tops = {str(paths.get(name, (name,))[0]) for name in requested}
    for name in (*source.tensors, *source.documents.get(_VALUES, {})):
        top = str(paths.get(name, (name,))[0])
        if name not in requested and top in tops:
            left.setdefault(top, []).append(name)
    for names in left.values():
        yield f"{shortened(names)}: in the checkpoint, but not in the state"


def _plan_caching_refused() -> LayoutMismatch:
    return LayoutMismatch(
        "the save planner caches plans, and this format is planned again from the tensors of all "
        "ranks; pass a planner with enable_plan_caching=False"
    )


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def _entry(item: WriteItem) -> Entry:
    assert item.tensor_data is not None
    box, dtype = _box(item), item.tensor_data.properties.dtype
    try:
        name = dtype_name(dtype)
    except LayoutMismatch as error:
        raise LayoutMismatch(f"{item.index.fqn}: {error}") from None
    return Entry(
        key=item.index.fqn,
        dtype=name,
        global_shape=tuple(item.tensor_data.size),
        box=box,
        byte_offset=0,
        nbytes=box.size * dtype.itemsize,
    )


def _tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    data = planner.resolve_data(item)
    assert isinstance(data, torch.Tensor), "other values have another type of item"
    name = item.index.fqn
    check_storable(name, data)
    if data.is_meta and data.numel():
        raise LayoutMismatch(f"{name} is on the meta device and has no elements to store")
    return data.detach()


def _value(planner: SavePlanner, item: WriteItem) -> Json:
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise LayoutMismatch(
            f"{item.index.fqn} is not a tensor, and {type(planner).__name__} returns such values "
            "only as pickles, which this format does not store; use a planner derived from "
            "DefaultSavePlanner"
        )
    value = lookup(item.index)
    obstacle = obstacle_to_json(value)
    if obstacle is not None:
        raise LayoutMismatch(
            f"{item.index.fqn}: {obstacle} cannot be stored; pass tensors and JSON values"
        )
    return value


def _is_url(checkpoint_id: str | os.PathLike[str]) -> bool:
    try:
        open_storage(os.fspath(checkpoint_id))
    except CheckpointError:
        return False
    return True
