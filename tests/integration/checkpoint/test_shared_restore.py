"""Tests of a load by several processes: each stored byte is read by one of them, and handed on."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import crc32c
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from werkzeug.serving import WSGIRequestHandler

from keepstep import checkpoint
from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    LayoutMismatch,
    RankFailed,
)
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.stored import files, stored_arrays
from keepstep.checkpoint.format.stored.chunking import StoredTensor
from keepstep.checkpoint.format.stored.files import FileStorage
from keepstep.checkpoint.format.stored.manifest import StoredObject
from keepstep.checkpoint.format.stored.object_names import MANIFEST
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.ranks.shared_restore import RestoreTraffic
from tests.ranks import run_ranks

DATA = re.compile(r"/(packs/|.*/c\.)")
"""Matches the names of objects that have tensors' data, and not those of metadata."""


class Model(nn.Module):
    """Large and small tensors: chunks that are objects, and packs; 9 MiB in all."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.large = nn.ParameterList(torch.randn(512, 1031) for _ in range(4))
        self.small = nn.ParameterList(torch.randn(301) for _ in range(60))


TENSOR_NBYTES = 4 * (4 * 512 * 1031 + 60 * 301)


class CountedReads:
    """Counts, below the reader, what this process reads of objects that have tensors' data."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()
        self._read_into = FileStorage.read_into
        self._read_direct = files._read_direct

    def __enter__(self) -> CountedReads:
        counts = self

        def read_into(
            storage: FileStorage, name: str, buffers: Sequence[memoryview], offset: int = 0
        ) -> int:
            count = counts._read_into(storage, name, buffers, offset)
            counts.add(name, count)
            return count

        def read_direct(path: Path, buffer: memoryview, offset: int) -> int | None:
            count = counts._read_direct(path, buffer, offset)
            counts.add(str(path), count or 0)
            return count

        FileStorage.read_into = read_into  # type: ignore[method-assign]
        files._read_direct = read_direct
        return self

    def __exit__(self, *_: object) -> None:
        FileStorage.read_into = self._read_into  # type: ignore[method-assign]
        files._read_direct = self._read_direct

    def add(self, name: str, nbytes: int) -> None:
        if DATA.search(name):
            with self._lock:
                self.nbytes += nbytes


class Loads(logging.Handler):
    """Collects what `load` logs of its traffic."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.traffics: list[RestoreTraffic] = []

    def emit(self, record: logging.LogRecord) -> None:
        arguments = record.args if isinstance(record.args, tuple) else ()
        self.traffics += [item for item in arguments if isinstance(item, RestoreTraffic)]


def collect_loads() -> Loads:
    loads = Loads()
    logger = logging.getLogger("keepstep")
    logger.setLevel(logging.INFO)
    logger.addHandler(loads)
    return loads


def join(root: str, name: str, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{root}/{name}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def sharded(model: Model) -> Model:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def check_equal(model: Model, expected: Model) -> None:
    for (name, got), want in zip(model.named_parameters(), expected.parameters(), strict=True):
        if isinstance(got, dist.tensor.DTensor):
            assert torch.equal(got.full_tensor(), want), name
        else:
            assert torch.equal(got, want), name


def total(number: int) -> int:
    values = torch.tensor([number])
    dist.all_reduce(values)
    return int(values.item())


def load_counted(rank: int, url: str, model: Model, loads: Loads) -> None:
    """Load; check what was read by the log's count, and by the count below the reader."""
    with CountedReads() as reads:
        checkpoint.load(url, {"model": model})
    read_nbytes = total(reads.nbytes)
    # A checksum for each cell, of 32 KiB and more but for the smallest tensors: 1.2 kB each here.
    assert TENSOR_NBYTES <= read_nbytes <= 1.01 * TENSOR_NBYTES
    if rank == 0:
        (traffic,) = loads.traffics
        assert traffic.tensor_nbytes == TENSOR_NBYTES
        assert traffic.read_nbytes == read_nbytes
        assert f"{traffic.ratio:.2f}" == "1.00"
    else:
        assert not loads.traffics


def restore_replicas(rank: int, root: str, url: str, world: int = 4) -> None:
    join(root, f"replicas-{world}", rank, world)
    model = Model(seed=1)
    if url.startswith("s3"):
        checkpoint.load(url, {"model": model})
    else:
        load_counted(rank, url, model, collect_loads())
    check_equal(model, Model(seed=0))
    leave()


def test_replicas_read_each_stored_byte_once_together(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    checkpoint.save(url, {"model": Model(seed=0)}, step=1)
    run_ranks(restore_replicas, args=(str(tmp_path), url), nprocs=4)


def test_replicas_request_each_byte_of_an_object_store_once(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{s3}/run"
    checkpoint.save(url, {"model": Model(seed=0)}, step=1)
    requests: list[tuple[str, str]] = []
    monkeypatch.setattr(
        WSGIRequestHandler,
        "log_request",
        lambda handler, *_: requests.append(
            (f"{handler.command} {handler.path}", handler.headers.get("Range", ""))
        ),
    )
    requested: list[Counter[str]] = []
    for world in (2, 4):
        requests.clear()
        run_ranks(restore_replicas, args=(str(tmp_path), url, world), nprocs=world)
        requested.append(Counter(path for path, _ in requests if not DATA.search(path)))
    # However many ranks: the listing of what is there, and each object of metadata once, but for
    # the manifest, of which it is asked before whether it is there.
    assert requested[0] == requested[1]
    attempt = {path: count for path, count in requested[1].items() if "/attempt-" in path}
    assert set(attempt.values()) == {1}
    assert len(attempt) == 4
    ranges = sorted(
        (path, *map(int, re.findall(r"\d+", byte_range)))
        for path, byte_range in requests
        if path.startswith("GET") and DATA.search(path)
    )
    assert sum(last + 1 - first for _, first, last in ranges) >= TENSOR_NBYTES
    for (path, _, last), (next_path, first, _) in itertools.pairwise(ranges):
        assert path != next_path or last < first, "a byte was requested twice"
    # 2 MiB a request at most, and no request for each of the small tensors.
    assert len(ranges) <= 12


def restore_other_sharding(rank: int, root: str) -> None:
    url = f"{root}/run"
    join(root, "save", rank, 4)
    checkpoint.save(url, {"model": sharded(Model(seed=0))}, step=1)
    leave()
    if rank < 3:
        join(root, "load", rank, 3)
        model = sharded(Model(seed=1))
        load_counted(rank, url, model, collect_loads())
        check_equal(model, Model(seed=0))
        dist.barrier()
    # The models still refer to gloo's groups, whose threads may abort an interpreter that exits.
    os._exit(0)


def test_four_shards_are_read_once_by_three_ranks(tmp_path: Path) -> None:
    run_ranks(restore_other_sharding, args=(str(tmp_path),), nprocs=4)


def damage(url: str, pattern: str) -> None:
    """Change a byte of a data object of the newest checkpoint."""
    path = sorted(Path(url, StoredCheckpoint.open(open_storage(url)).directory).glob(pattern))[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    # A file may have several names: the older checkpoint keeps its own.
    path.unlink()
    path.write_bytes(data)


def restore_damaged(rank: int, root: str) -> None:
    url = f"{root}/run"
    join(root, "damaged", rank, 3)
    model = Model(seed=1)
    with pytest.raises(CheckpointDamaged, match="does not match its checksum"):
        checkpoint.load(url, {"model": model})
    assert checkpoint.load(url, {"model": model}, fallback=True) == 1
    check_equal(model, Model(seed=0))
    leave()


@pytest.mark.parametrize("pattern", ["**/c.*", "packs/*"])
def test_damage_that_one_rank_reads_is_raised_on_all_or_falls_back_on_all(
    tmp_path: Path, pattern: str
) -> None:
    url = str(tmp_path / "run")
    checkpoint.save(url, {"model": Model(seed=0)}, step=1)
    checkpoint.save(url, {"model": Model(seed=2)}, step=2)
    damage(url, pattern)
    run_ranks(restore_damaged, args=(str(tmp_path),), nprocs=3)


STAGE_TENSORS = 2000


def stage(number: int, seed: int, count: int = STAGE_TENSORS) -> nn.Module:
    """Return a stage of many small parameters, with names that no other stage has."""
    generator = torch.Generator().manual_seed(seed)
    module = nn.Module()
    for index in range(count):
        values = torch.randn(3, generator=generator) + number
        module.register_parameter(f"stage{number}_{index:04d}", nn.Parameter(values))
    return module


def restore_stages(rank: int, root: str) -> None:
    join(root, "stages", rank, 2)
    for step in (1, 2):
        checkpoint.save(f"{root}/run", {"model": stage(rank, seed=step)}, step=step)
    parsed: list[str] = []
    parse_array = stored_arrays.parse_array

    def parse(key: str, node: Json, where: str) -> StoredTensor:
        parsed.append(key)
        return parse_array(key, node, where)

    stored_arrays.parse_array = parse
    module = stage(rank, seed=9)
    assert checkpoint.load(f"{root}/run", {"model": module}) == 2
    for (name, got), want in zip(
        module.named_parameters(), stage(rank, seed=2).parameters(), strict=True
    ):
        assert torch.equal(got, want), name
    own = sum(f"stage{rank}_" in key for key in parsed)
    assert STAGE_TENSORS == own == len(parsed)
    # What no rank has is missed, also where no rank would need its metadata.
    lacking = stage(rank, seed=9, count=STAGE_TENSORS - (1 - rank))
    with pytest.raises(LayoutMismatch, match="stage0_1999: in the source, but not in the model"):
        checkpoint.load(f"{root}/run", {"model": lacking})
    # Damaged metadata fail the load on all ranks, or has all of them go back.
    dist.barrier()
    if rank == 0:
        damage(f"{root}/run", "zarr.json")
    dist.barrier()
    with pytest.raises(CheckpointDamaged, match=r"zarr\.json"):
        checkpoint.load(f"{root}/run", {"model": module})
    assert checkpoint.load(f"{root}/run", {"model": module}, fallback=True) == 1
    leave()


def test_stages_parse_the_metadata_of_their_tensors_only(tmp_path: Path) -> None:
    run_ranks(restore_stages, args=(str(tmp_path),), nprocs=2)


def contradict(url: str) -> None:
    """Have a document of the newest checkpoint contradict a tensor, and the manifest agree."""
    source = StoredCheckpoint.open(open_storage(url))
    documents = Path(url, source.directory, "documents.json")
    content = json.loads(documents.read_bytes())
    content["padding"] = {"model/stage1_1999": {"logical_shape": [99]}}
    data = json.dumps(content).encode()
    documents.write_bytes(data)
    objects = tuple(
        StoredObject(entry.name, len(data), crc32c.crc32c(data))
        if entry.name == "documents.json"
        else entry
        for entry in source.manifest.objects
    )
    manifest = Path(url, source.stored.directory, MANIFEST)
    manifest.write_bytes(replace(source.manifest, objects=objects).encode())


def restore_contradicted(rank: int, root: str) -> None:
    join(root, "contradicted", rank, 3)
    for step in (1, 2):
        checkpoint.save(f"{root}/run", {"model": stage(rank, seed=step)}, step=step)
    dist.barrier()
    if rank == 0:
        contradict(f"{root}/run")
    dist.barrier()
    # One of the ranks checks this, and all raise.
    with pytest.raises(CheckpointDamaged, match="stage1_1999"):
        checkpoint.load(f"{root}/run", {"model": stage(rank, seed=9)})
    assert checkpoint.load(f"{root}/run", {"model": stage(rank, seed=9)}, fallback=True) == 1
    leave()


def test_a_contradiction_that_one_rank_finds_is_raised_on_all(tmp_path: Path) -> None:
    run_ranks(restore_contradicted, args=(str(tmp_path),), nprocs=3)


def restore_without_storage_on_one(rank: int, root: str) -> None:
    url = f"{root}/run"
    join(root, "failing", rank, 3)
    model = Model(seed=1)
    read_into = FileStorage.read_into

    def fail(storage: FileStorage, name: str, buffers: object, offset: int = 0) -> int:
        raise CheckpointError(f"{name}: the storage does not answer")

    if rank == 2:
        FileStorage.read_into = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(CheckpointError, match="storage does not answer") as raised:
        checkpoint.load(url, {"model": model}, fallback=True)
    assert type(raised.value) is (CheckpointError if rank == 2 else RankFailed)
    FileStorage.read_into = read_into  # type: ignore[method-assign]
    # The ranks' messages are in step: the next load succeeds.
    checkpoint.load(url, {"model": model})
    check_equal(model, Model(seed=0))
    leave()


def test_storage_that_fails_on_one_rank_fails_the_load_on_all(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path / "run"), {"model": Model(seed=0)}, step=1)
    run_ranks(restore_without_storage_on_one, args=(str(tmp_path),), nprocs=3)


def restore_with_a_death(rank: int, root: str) -> None:
    join(root, "death", rank, 3)
    if rank == 1:

        def die(*_: object) -> int:
            os._exit(0)

        FileStorage.read_into = die  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="gloo"):
        checkpoint.load(f"{root}/run", {"model": Model(seed=1)})
    Path(root, f"raised-{rank}").touch()
    os._exit(0)


def test_a_rank_that_dies_while_it_reads_leaves_nobody_waiting(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path / "run"), {"model": Model(seed=0)}, step=1)
    run_ranks(restore_with_a_death, args=(str(tmp_path),), nprocs=3)
    assert {path.name for path in tmp_path.glob("raised-*")} == {"raised-0", "raised-2"}
