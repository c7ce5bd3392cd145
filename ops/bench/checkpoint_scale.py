"""Measures what a checkpoint's planning and metadata cost at thousands of ranks.

`python ops/bench/checkpoint_scale.py --json [--quick]`. The last line is one JSON object.

A model of 1,000 parameters with AdamW's state, 4,000 tensors and 1.2 TB in all, is sharded by rows
(FSDP2) over 64, 1,024 and 10,240 ranks. No rank runs and no tensor has bytes: each rank's share of
the planning is computed in turn, by the code that a rank would run, from the messages that it
would get; the listings have made-up checksums. They and all other metadata are written to moto's S3
server over HTTP on this machine, and opened from there. Messages between ranks are measured by
size, not by time.

For each number of ranks: `plan_s_per_rank` is the processor time of a rank that plans (one in
eight; the median of all that do), including the work of every rank; `plan_again_s_per_rank` the
time to find that no rank's boxes have changed; `message_bytes_per_rank` what a planner receives and
sends; `metadata_bytes_per_rank` and `objects_per_rank` what is stored, the latter with the tensors'
objects; `open_s` opening and finding all of one rank's boxes, alone; `requests` those of writing
and of opening.

`stages` is about a checkpoint of many tensors, which 16 pipeline stages wrote: what one stage's
rank takes to open it and to find its boxes, and what a reader of all takes; and
`handed_on_stage_s` what the former takes if another rank hands on the metadata, as in a load by all
ranks, without the time of handing on.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import crc32c
import torch
from msgspec import msgpack
from rich.console import Console
from rich.table import Table

from keepstep.checkpoint.format.layout.boxes import Box, Entry, ShardIndex
from keepstep.checkpoint.format.layout.integers import ceil_div
from keepstep.checkpoint.format.stored.cell_index import cell_count
from keepstep.checkpoint.format.stored.chunking import (
    Chunk,
    ChunkPlan,
    PlannedChunk,
    StoredTensor,
    chunk_at,
    plan_chunks,
)
from keepstep.checkpoint.format.stored.listings import (
    ChunkObject,
    DataObject,
    Pack,
    PackedChunk,
    encode_part,
)
from keepstep.checkpoint.format.stored.manifest import StoredObject
from keepstep.checkpoint.format.stored.metadata import StoredMetadata
from keepstep.checkpoint.format.stored.object_names import (
    ROOT,
    Attempt,
    StoredStep,
    chunk_name,
    part_name,
)
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.shared_plan import (
    TensorPlan,
    entries_by_planner,
    merged_tensor_plan,
    plan_share,
    planner_count,
)
from keepstep.checkpoint.format.stored.storage import Storage, open_storage
from keepstep.checkpoint.format.stored.stored_json import encode
from keepstep.checkpoint.format.stored.writer import PackJob, publish, write_jobs
from keepstep.checkpoint.format.stored.zarr_metadata import (
    array_metadata,
    cells_per_chunk,
    shard_index_nbytes,
)
from keepstep.checkpoint.live.tensors import LiveTensor
from keepstep.checkpoint.ranks.collective_plan import signature_of
from keepstep.checkpoint.ranks.control_group import ControlGroup

sys.path.insert(0, str(Path(__file__).parents[2]))

from ops.bench.checkpoint import BUCKET, s3_server

RANKS = (64, 1024, 10240)
LAYERS, HIDDEN, INNER = 125, 8192, 22016
STAGES, TENSORS_PER_STAGE = 16, 4000
SLOTS = ("model/{}", "optim/{}/exp_avg", "optim/{}/exp_avg_sq", "optim/{}/step")
PARALLEL_WRITES = 16
# How many ranks' own work is timed, of those that do not plan.
SAMPLED_RANKS = 16

Result = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """The tensors of a model and its optimizer: key and shape."""

    tensors: dict[str, tuple[int, ...]]

    @classmethod
    def of_layers(cls, layers: int) -> Model:
        """Return a decoder of `layers` layers; eight parameters each."""
        square, wide = (HIDDEN, HIDDEN), (INNER, HIDDEN)
        shapes = {
            **{f"attention.{name}": square for name in "qkvo"},
            "mlp.gate": wide,
            "mlp.up": wide,
            "mlp.down": (HIDDEN, INNER),
            "norm": (HIDDEN,),
        }
        tensors: dict[str, tuple[int, ...]] = {}
        for layer, (name, shape) in itertools.product(range(layers), shapes.items()):
            for slot in SLOTS:
                key = slot.format(f"layers.{layer}.{name}.weight")
                tensors[key] = () if slot.endswith("step") else shape
        return cls(tensors)

    @property
    def nbytes(self) -> int:
        return sum(4 * Box.whole(shape).size for shape in self.tensors.values())

    def entries(self, rank: int, ranks: int, keys: Sequence[str] | None = None) -> Iterator[Entry]:
        """Yield a rank's boxes: rows by FSDP2, scalars whole."""
        for key in self.tensors if keys is None else keys:
            shape = self.tensors[key]
            box = Box.whole(shape)
            if shape:
                rows = ceil_div(shape[0], ranks)
                start = min(rank * rows, shape[0])
                extents = (min(rows, shape[0] - start), *shape[1:])
                box = Box((start, *(0 for _ in shape[1:])), extents)
            yield Entry(
                key=key,
                dtype="float32",
                global_shape=shape,
                box=box,
                byte_offset=0,
                nbytes=4 * box.size,
            )


class CountingStorage:
    """A storage that counts requests."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._storage, name)
        if callable(attribute) and name not in ("flush", "prefetch"):
            self.requests += 1
        return attribute


@dataclass(frozen=True)
class Planned:
    """One planner's results: each writer's chunks, without the pieces; time and messages."""

    tensors: TensorPlan
    chunks: dict[int, list[tuple[str, tuple[int, ...]]]]
    seconds: float
    nbytes: int


def plan(work: tuple[Model, int, int, Sequence[str]]) -> Planned:
    """Do one planner's work: from the messages of all ranks to the messages to all writers."""
    model, ranks, planner, keys = work
    received = [
        msgpack.encode(entries_by_planner(model.entries(rank, ranks, keys), 1)[0])
        for rank in range(ranks)
    ]
    begun_s = time.process_time()
    held = [msgpack.decode(message, type=list[Entry]) for message in received]
    plans, tensors = plan_share(held, planner)
    sent = [msgpack.encode(plan) for plan in plans.values()]
    sent.append(msgpack.encode(tensors))
    seconds = time.process_time() - begun_s
    return Planned(
        tensors,
        {
            writer: [(chunk.key, chunk.place) for chunk in plan.chunks]
            for writer, plan in plans.items()
        },
        seconds,
        sum(map(len, received)) + sum(map(len, sent)),
    )


def own_work_s(model: Model, ranks: int) -> tuple[float, float]:
    """Return the processor seconds of every rank's planning, and of finding nothing changed."""
    planning, again = [], []
    for rank in range(0, ranks, max(1, ranks // SAMPLED_RANKS)):
        entries = tuple(model.entries(rank, ranks))
        begun_s = time.process_time()
        for part in entries_by_planner(entries, planner_count(ranks)):
            msgpack.encode(part)
        planning.append(time.process_time() - begun_s)
        answer = json.dumps([uuid.uuid4().hex, uuid.uuid4().hex, {"values": "0" * 32}, None])
        tensors = [
            LiveTensor(entry.key, entry.global_shape, entry.box, torch.empty(0))
            for entry in entries
        ]
        known = signature_of(tensors, ControlGroup())
        begun_s = time.process_time()
        assert signature_of(tensors, ControlGroup()) == known
        # Every rank parses the answers of all.
        for _ in range(ranks):
            json.loads(answer)
        again.append(time.process_time() - begun_s)
    return statistics.median(planning), statistics.median(again)


def listing(tensors: dict[str, StoredTensor], chunks: Sequence[PlannedChunk], rank: int) -> bytes:
    """Return a writer's listing, with made-up checksums."""
    objects: list[DataObject] = []
    for job in write_jobs(ChunkPlan(tensors, (tuple(chunks),)), [0], rank):
        if isinstance(job, PackJob):
            packed = tuple(
                PackedChunk(chunk.key, chunk.place, checksums(tensors, chunk))
                for chunk in job.chunks
            )
            nbytes = sum(nbytes_of(tensors, chunk) for chunk in job.chunks)
            objects.append(Pack(job.name, nbytes, packed))
            continue
        tail_nbytes = shard_index_nbytes(cells_per_chunk(tensors[job.key]))
        objects.append(
            ChunkObject(
                chunk_name(job.key, job.place),
                nbytes_of(tensors, job) + tail_nbytes,
                checksums(tensors, job),
            )
        )
    return encode_part(objects)


def nbytes_of(tensors: dict[str, StoredTensor], chunk: Chunk) -> int:
    tensor = tensors[chunk.key]
    return cell_count(tensor, chunk.place) * (tensor.cell_nbytes + 4)


def checksums(tensors: dict[str, StoredTensor], chunk: Chunk) -> bytes:
    return os.urandom(4 * cell_count(tensors[chunk.key], chunk.place))


def measure(model: Model, ranks: int, url: str, console: Console) -> Result:
    planners = planner_count(ranks)
    keys: list[list[str]] = [[] for _ in range(planners)]
    for key in model.tensors:
        keys[crc32c.crc32c(key.encode()) % planners].append(key)
    planned: list[Planned] = []
    work = [(model, ranks, number, own_keys) for number, own_keys in enumerate(keys)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for number, result in enumerate(pool.imap(plan, work, chunksize=4)):
            planned.append(result)
            if number % 100 == 0:
                console.print(f"{ranks} ranks: planner {number} of {planners}")
    tensors = merged_tensor_plan(result.tensors for result in planned)
    by_writer: dict[int, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for result in planned:
        for writer, chunks in result.chunks.items():
            by_writer[writer] += chunks
    own_s, again_s = own_work_s(model, ranks)
    storage = CountingStorage(open_storage(url))
    stored = dict(tensors.tensors)
    attempt = Attempt(StoredStep(1, 0), "scale")
    begun_s = time.perf_counter()

    def write(rank: int) -> tuple[StoredObject, int]:
        chunks = chunks_of(stored, by_writer.get(rank, ()))
        data = listing(stored, chunks, rank)
        entry = StoredObject(part_name(rank), len(data), crc32c.crc32c(data))
        storage.write(f"{attempt.directory}/{entry.name}", [data])
        nbytes = len(data)
        for chunk in chunks:
            if not any(chunk.place) and not stored[chunk.key].is_packed:
                content = encode(array_metadata(chunk.key, stored[chunk.key]))
                storage.write(f"{attempt.directory}/{chunk.key}/{ROOT}", [content])
                nbytes += len(content)
        return entry, nbytes

    with ThreadPoolExecutor(PARALLEL_WRITES) as pool:
        written = list(pool.map(write, range(ranks)))
    publish(storage, attempt, [entry for entry, _ in written], stored, tensors.writers, {})
    write_s, write_requests = time.perf_counter() - begun_s, storage.requests
    begun_s = time.perf_counter()
    opened = StoredCheckpoint.open(open_storage(url))
    reading = CountingStorage(opened.storage)
    opened = replace(opened, storage=reading)
    open_alone_s = time.perf_counter() - begun_s
    opened.locate([(entry.key, entry.box) for entry in model.entries(ranks // 2, ranks)])
    open_s = time.perf_counter() - begun_s
    metadata_nbytes = sum(nbytes for _, nbytes in written) + sum(
        entry.nbytes for entry in opened.manifest.objects if not entry.is_part
    )
    data_objects = sum(
        len(list(write_jobs(ChunkPlan(stored, (chunks_of(stored, places),)), [0], rank)))
        for rank, places in by_writer.items()
    )
    return {
        "plan_s_per_rank": round(statistics.median(p.seconds for p in planned) + own_s, 3),
        "plan_s_of_slowest": round(max(p.seconds for p in planned) + own_s, 3),
        "plan_again_s_per_rank": round(again_s, 3),
        "message_bytes_per_rank": round(statistics.median(p.nbytes for p in planned)),
        "metadata_bytes_per_rank": round(metadata_nbytes / ranks),
        "objects_per_rank": round((data_objects + write_requests) / ranks, 1),
        "write_s": round(write_s, 1),
        "open_s": round(open_s, 2),
        "of_it_manifest_and_arrays_s": round(open_alone_s, 2),
        "requests": {"write": write_requests, "open": 4 + reading.requests},
    }


def measure_stages(url: str, tensors_per_stage: int) -> Result:
    """Measure how long a rank of one pipeline stage, and a reader of all, take to open."""
    shards = []
    for stage in range(STAGES):
        entries = tuple(
            Entry(
                key=f"model/stage{stage:02d}.{number}.weight",
                dtype="float32",
                global_shape=(128, 128),
                box=Box.whole((128, 128)),
                byte_offset=0,
                nbytes=2**16,
            )
            for number in range(tensors_per_stage)
        )
        shards.append(ShardIndex(stage, entries, {}))
    plan, storage = plan_chunks(shards), open_storage(url)
    attempt = Attempt(StoredStep(1, 0), "stages")
    parts = []
    for stage, chunks in enumerate(plan.chunks):
        data = listing(dict(plan.tensors), chunks, stage)
        parts.append(StoredObject(part_name(stage), len(data), crc32c.crc32c(data)))
        storage.write(f"{attempt.directory}/{parts[-1].name}", [data])
    publish(storage, attempt, parts, plan.tensors, plan.chunk_parts(), {})
    result: Result = {"tensors": STAGES * tensors_per_stage, "stages": STAGES}
    for name, wanted in (("open_stage_s", [shards[STAGES // 2]]), ("open_all_s", shards)):
        boxes = [(entry.key, entry.box) for shard in wanted for entry in shard.entries]
        begun_s = time.perf_counter()
        StoredCheckpoint.open(open_storage(url), 1, 0).locate(boxes)
        result[name] = round(time.perf_counter() - begun_s, 2)
    metadata = StoredMetadata.read(open_storage(url), 1, 0, for_all_ranks=True)
    boxes = [(entry.key, entry.box) for entry in shards[STAGES // 2].entries]
    begun_s = time.perf_counter()
    StoredCheckpoint.of(open_storage(url), metadata, rank=STAGES // 2, world_size=STAGES).locate(
        boxes
    )
    result["handed_on_stage_s"] = round(time.perf_counter() - begun_s, 2)
    return result


def chunks_of(
    tensors: dict[str, StoredTensor], places: Sequence[tuple[str, tuple[int, ...]]]
) -> tuple[PlannedChunk, ...]:
    """Return a writer's chunks, without the origin of their pieces."""
    chunks = (chunk_at(key, tensors[key], place) for key, place in places)
    return tuple(PlannedChunk(chunk.key, chunk.place, chunk.box, ()) for chunk in chunks)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="A tenth of the layers, and not 10,240 ranks.")
def main(as_json: bool, quick: bool) -> None:
    console = Console(stderr=as_json)
    model = Model.of_layers(LAYERS // 10 if quick else LAYERS)
    results: dict[str, Result] = {}
    with s3_server():
        for ranks in RANKS[: 2 if quick else 3]:
            url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
            results[str(ranks)] = measure(model, ranks, url, console)
            console.print(ranks, results[str(ranks)])
        stages = measure_stages(
            f"s3://{BUCKET}/{uuid.uuid4().hex}", TENSORS_PER_STAGE // (10 if quick else 1)
        )
        console.print("stages", stages)
    table = Table(title=f"{len(model.tensors):,} tensors, {model.nbytes / 1e12:.2f} TB")
    table.add_column("ranks")
    for name in results["64"]:
        table.add_column(name)
    for count, row in results.items():
        table.add_row(count, *(str(value) for value in row.values()))
    console.print(table)
    about = {"tensors": len(model.tensors), "nbytes": model.nbytes}
    print(json.dumps({**about, "ranks": results, "stages": stages}))


if __name__ == "__main__":
    main()
