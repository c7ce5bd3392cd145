"""The structure of the house: who may import whom, which modules are pure, what is public.

The rules are functions of an import graph, so each is also shown to find a breach.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

import keepstep
from keepstep import checkpoint, monitor

ROOT = Path(keepstep.__file__).parent
PACKAGES = ("checkpoint", "elastic", "integrations", "monitor", "transport")

ROOMS: Mapping[str, frozenset[str]] = {
    room: frozenset(allowed.split())
    for room, allowed in {
        # What all others stand on.
        "private_files": "",
        "log_format": "",
        "notices": "",
        "processes": "notices",
        "available_memory": "",
        "transport": "",
        "torch_internals": "",
        # checkpoint
        "checkpoint.errors": "",
        "checkpoint.format": "",
        "checkpoint.format.layout": "checkpoint.errors",
        "checkpoint.format.stored": ("checkpoint.errors checkpoint.format.layout"),
        "checkpoint.format.zarr_extensions": "checkpoint.errors checkpoint.format.stored",
        "checkpoint.format.content_check": (
            "checkpoint.errors checkpoint.format.layout checkpoint.format.stored"
        ),
        "checkpoint.snapshot": "",
        "checkpoint.snapshot.isal": "checkpoint.errors",
        "checkpoint.snapshot.parity": (
            "checkpoint.errors checkpoint.format.layout checkpoint.snapshot.isal"
        ),
        "checkpoint.snapshot.arena": "checkpoint.errors checkpoint.format.layout transport",
        "checkpoint.snapshot.memory": (
            "checkpoint.errors checkpoint.format.layout checkpoint.snapshot.arena transport"
        ),
        "checkpoint.snapshot.server": (
            "checkpoint.errors checkpoint.format.layout checkpoint.format.stored"
            " checkpoint.snapshot.arena checkpoint.snapshot.memory checkpoint.snapshot.parity"
            " available_memory log_format notices processes transport"
        ),
        "checkpoint.convert": "",
        "checkpoint.convert.rules": "checkpoint.errors checkpoint.format.layout",
        "checkpoint.convert.read": (
            "checkpoint.convert.rules checkpoint.errors checkpoint.format.layout"
            " checkpoint.format.stored"
        ),
        "checkpoint.convert.write": (
            "checkpoint.convert.read checkpoint.convert.rules checkpoint.errors"
            " checkpoint.format.content_check checkpoint.format.layout checkpoint.format.stored"
            " checkpoint.live processes torch_internals"
        ),
        "checkpoint.live": (
            "checkpoint.errors checkpoint.format.layout checkpoint.snapshot.arena"
            " checkpoint.snapshot.isal checkpoint.snapshot.memory torch_internals"
        ),
        "checkpoint.ranks": (
            "checkpoint.errors checkpoint.format.layout checkpoint.format.stored checkpoint.live"
            " torch_internals"
        ),
        "checkpoint.ranks.fill_state": (
            "checkpoint.convert.write checkpoint.errors checkpoint.format.layout checkpoint.live"
            " checkpoint.ranks"
        ),
        "checkpoint.ranks.shared_foreign": (
            "checkpoint.convert.read checkpoint.convert.rules checkpoint.errors"
            " checkpoint.format.layout checkpoint.ranks"
        ),
        "checkpoint.ranks.foreign_load": (
            "checkpoint.convert.read checkpoint.convert.rules checkpoint.convert.write"
            " checkpoint.errors checkpoint.format.layout checkpoint.format.stored checkpoint.live"
            " checkpoint.ranks"
            " checkpoint.ranks.fill_state checkpoint.ranks.shared_foreign"
        ),
        "checkpoint.saving": (
            "checkpoint.errors checkpoint.format.layout checkpoint.format.stored checkpoint.live"
            " checkpoint.ranks checkpoint.snapshot.arena"
            " available_memory log_format notices processes transport"
        ),
        "checkpoint.api": (
            "checkpoint.errors checkpoint.format.layout checkpoint.format.stored checkpoint.live"
            " checkpoint.ranks checkpoint.ranks.fill_state checkpoint.ranks.foreign_load"
            " checkpoint.saving"
        ),
        "checkpoint.dcp": (
            "checkpoint.errors checkpoint.format.layout checkpoint.format.stored checkpoint.live"
            " torch_internals"
        ),
        "checkpoint.dcp_stager": (
            "checkpoint.errors checkpoint.format.layout checkpoint.live checkpoint.snapshot.arena"
            " available_memory torch_internals"
        ),
        "checkpoint.cli": (
            "checkpoint.convert.read checkpoint.convert.rules checkpoint.convert.write"
            " checkpoint.errors checkpoint.format.content_check checkpoint.format.layout"
            " checkpoint.format.stored"
        ),
        "checkpoint": "checkpoint.api checkpoint.errors checkpoint.format.layout checkpoint.live",
        # monitor
        "monitor.errors": "",
        "monitor.records": "",
        "monitor.verdicts": "",
        "monitor.progress": "",
        "monitor.secret": "monitor.errors private_files",
        "monitor.signing": "",
        "monitor.telemetry": "monitor.errors monitor.records torch_internals",
        "monitor.diagnosis": "monitor.records monitor.verdicts",
        "monitor.contracts": "monitor.diagnosis monitor.records monitor.verdicts",
        "monitor.node": ("monitor.contracts monitor.diagnosis monitor.records monitor.telemetry"),
        "monitor.tree": (
            "monitor.diagnosis monitor.errors monitor.node monitor.records monitor.signing"
            " monitor.telemetry"
        ),
        "monitor.watch": (
            "monitor.contracts monitor.diagnosis monitor.errors monitor.node monitor.records"
            " monitor.telemetry monitor.tree monitor.verdicts"
        ),
        "monitor.views": (
            "monitor.contracts monitor.diagnosis monitor.errors monitor.node monitor.records"
            " monitor.secret monitor.signing monitor.telemetry monitor.tree monitor.verdicts"
            " monitor.watch"
        ),
        "monitor.daemon": (
            "monitor.contracts monitor.diagnosis monitor.errors monitor.node monitor.records"
            " monitor.secret monitor.telemetry monitor.tree monitor.verdicts monitor.views"
            " monitor.watch private_files transport"
        ),
        "monitor.preflight": "monitor.errors monitor.secret transport",
        "monitor.cli": (
            "log_format monitor.contracts monitor.daemon monitor.diagnosis monitor.errors"
            " monitor.preflight monitor.records monitor.secret monitor.telemetry monitor.tree"
            " monitor.verdicts monitor.views monitor.watch"
        ),
        "monitor": "monitor.errors monitor.records monitor.telemetry",
        "monitor.run": "monitor.telemetry",
        # elastic
        "elastic.errors": "",
        "elastic.rendezvous": ("checkpoint.format.layout elastic.errors elastic.store"),
        "elastic.store": "elastic.errors notices private_files processes transport",
        "elastic.worker": (
            "checkpoint.errors checkpoint.format.layout elastic.errors elastic.rendezvous"
            " log_format monitor monitor.errors monitor.progress monitor.telemetry notices"
            " processes torch_internals transport"
        ),
        "elastic.node": "elastic.rendezvous",
        "elastic.agent": (
            "checkpoint.errors checkpoint.format.layout checkpoint.snapshot.memory"
            " checkpoint.snapshot.server elastic.errors elastic.node elastic.rendezvous"
            " elastic.store elastic.worker monitor.node monitor.progress notices private_files"
            " processes transport"
        ),
        "elastic.cloud": "",
        "elastic.data": "checkpoint.format.layout elastic.errors notices torch_internals",
        "elastic.trainer": (
            "checkpoint.api checkpoint.errors checkpoint.format.layout checkpoint.format.stored"
            " checkpoint.live checkpoint.ranks checkpoint.ranks.fill_state"
            " checkpoint.snapshot.memory"
            " elastic.data elastic.errors elastic.rendezvous elastic.worker monitor torch_internals"
        ),
        "elastic.monitor_bridge": (
            "elastic.errors elastic.rendezvous elastic.store monitor.contracts"
            " monitor.diagnosis monitor.errors monitor.verdicts"
        ),
        "elastic.cli": (
            "checkpoint.errors checkpoint.snapshot.isal checkpoint.snapshot.server elastic.agent"
            " elastic.cloud elastic.errors"
            " elastic.monitor_bridge elastic.rendezvous elastic.store elastic.worker"
            " log_format monitor.contracts monitor.errors notices private_files processes transport"
        ),
        "elastic.torchrun": (
            "checkpoint.errors checkpoint.snapshot.isal elastic.agent elastic.cloud"
            " elastic.errors"
            " elastic.rendezvous elastic.store elastic.worker log_format monitor.progress"
            " private_files transport"
        ),
        "elastic": "",
        # The front of it all.
        "autoload": "monitor.telemetry",
        "integrations": "elastic.data elastic.errors elastic.trainer elastic.worker",
        "__main__": "elastic.cli",
        "": ("checkpoint elastic.data elastic.errors elastic.trainer monitor"),
    }.items()
}
"""Each room, and the rooms that it may import. A room is a folder, or a module next to folders."""

PURE = (
    "checkpoint.convert.read.arrays",
    "checkpoint.convert.read.pickled_tensors",
    "checkpoint.convert.read.pickled_values",
    "checkpoint.convert.read.pickles",
    "checkpoint.convert.read.pieces",
    "checkpoint.convert.read.range_reads",
    "checkpoint.format.layout",
    "checkpoint.snapshot.parity.stripes",
    "checkpoint.convert.rules",
    "checkpoint.format.stored.chunking",
    "checkpoint.format.stored.cell_codec",
    "checkpoint.format.stored.cell_index",
    "checkpoint.format.stored.listings",
    "checkpoint.format.stored.manifest",
    "checkpoint.format.stored.object_names",
    "checkpoint.format.stored.piece_rounds",
    "checkpoint.format.stored.shared_plan",
    "checkpoint.format.stored.stored_arrays",
    "checkpoint.format.stored.stored_json",
    "checkpoint.format.stored.zarr_metadata",
    "checkpoint.format.stored.pruning",
    "checkpoint.snapshot.memory.snapshot_table",
    "elastic.cloud.documents",
    "elastic.cloud.notice",
    "elastic.node",
    "elastic.rendezvous",
    "elastic.store.members",
    "elastic.torchrun.rounds",
    "elastic.torchrun.settings",
    "elastic.data.json_values",
    "elastic.data.micro_batches",
    "elastic.data.order",
    "elastic.data.partitions",
    "elastic.data.position",
    "elastic.data.rank_batches",
    "elastic.trainer.bad_steps",
    "elastic.trainer.events",
    "elastic.trainer.script_place",
    "elastic.trainer.snapshot_agreement",
    "elastic.trainer.snapshot_interval",
    "monitor.diagnosis",
    "monitor.records",
    "monitor.verdicts",
    "monitor.preflight.judgement",
    "monitor.preflight.pairing",
    "monitor.telemetry.clocks",
    "monitor.telemetry.record_history",
    "monitor.watch.goodput",
    "monitor.watch.matrices",
    "monitor.watch.step_times",
)
"""Rooms and modules that decide and do nothing else."""

IMPURE = (
    "checkpoint.convert.read.arrays",
    "checkpoint.convert.read.pickled_tensors",
    "checkpoint.convert.read.pickled_values",
    "checkpoint.convert.read.pickles",
    "checkpoint.convert.read.pieces",
    "checkpoint.convert.read.range_reads",
    "asyncio",
    "multiprocessing",
    "random",
    "secrets",
    "selectors",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "threading",
    "time",
    "torch.distributed",
    "uuid",
)

PUBLIC = {
    keepstep: {
        "Attached", "BadSteps", "Callbacks", "CheckpointStored", "DeviceUnavailable",
        "ElasticError",
        "GenerationEntered", "Guard", "InvariantViolated", "Job", "JobFailed", "LeaseLost",
        "MicroBatch", "Mixture", "Packed", "PackedRow", "ProcessUnusable", "Recovered",
        "RejectedStep", "ReplicasDiverged", "ShardedStream", "Shuffled", "SnapshotCommitted",
        "SplitStream", "StartFrom", "State", "Stateful", "Step", "StepRejected",
        "StoreUnavailable", "UsageError", "World", "attach", "checkpoint", "join", "monitor",
    },
    checkpoint: {
        "Average", "CheckpointDamaged", "CheckpointError", "CheckpointExists", "CheckpointMissing",
        "CheckpointTooNew", "Descriptions", "FlatFragment", "FormatUnsupported", "LayoutMismatch",
        "MemoryShort", "Part", "PartTable", "ProcessEnded", "RankFailed", "RulesInvalid",
        "SaveHandle", "Saver", "Scale", "SnapshotInvariantViolated", "SnapshotUnavailable",
        "StateChanged", "load", "save",
    },
    monitor: {
        "DumpUnreadable", "Measure", "MonitorError", "MonitorUnreachable", "Phase",
        "ProtocolViolation", "RecorderUnavailable", "RingUnreadable", "RingUnwritable",
        "RuntimeUnreachable", "SecretDiffers", "attach", "begin_step", "end_step", "measure",
        "phase",
    },
}  # fmt: skip

LIGHT = {
    ("torch",): (
        "keepstep", "keepstep.autoload", "keepstep.checkpoint.cli.ckpt",
        "keepstep.checkpoint.convert.read.opening",
        "keepstep.checkpoint.saving.writer", "keepstep.checkpoint.snapshot.server.server",
        "keepstep.elastic.agent.agent",
        "keepstep.elastic.cli.launch", "keepstep.elastic.cli.main", "keepstep.elastic.cli.node",
        "keepstep.elastic.monitor_bridge.runtime", "keepstep.monitor.cli.monitor",
        "keepstep.monitor.daemon.assembly",
    ),
    ("etcd3", "google.protobuf"): (
        "keepstep.elastic.trainer.attach", "keepstep.elastic.trainer.join",
        "keepstep.elastic.worker.bootstrap",
    ),
    ("etcd3", "google.protobuf", "grpc", "torch"): ("keepstep.elastic.torchrun",),
    ("keepstep.checkpoint.convert",): (
        "keepstep.checkpoint.api", "keepstep.checkpoint.dcp",
        "keepstep.checkpoint.saving.writer", "keepstep.checkpoint.snapshot.server.server",
        "keepstep.elastic.agent.agent", "keepstep.elastic.trainer.attach",
        "keepstep.elastic.trainer.join", "keepstep.elastic.worker.bootstrap",
    ),
}  # fmt: skip
"""Modules that must not be loaded by importing others."""


@dataclass(frozen=True, slots=True)
class Module:
    """A module below `keepstep`, by its name without that prefix, and what it imports."""

    name: str
    imports: frozenset[str]


@cache
def read_modules() -> tuple[Module, ...]:
    """Return all modules of the tree."""
    paths = [*ROOT.glob("*.py")]
    for package in PACKAGES:
        paths += (ROOT / package).rglob("*.py")
    modules = []
    for path in paths:
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        modules.append(parse(name, path.read_text()))
    return tuple(modules)


def parse(name: str, source: str) -> Module:
    """Return the module of a source text; imports for type checkers alone do not count."""
    return Module(name, frozenset(_imports(ast.parse(source).body)))


def _imports(statements: Iterable[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        match statement:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):
                yield from _imports(orelse)
                continue
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _imports(getattr(statement, field, ()))


def resolve(target: str, names: frozenset[str]) -> str | None:
    """Return the module of the tree that an import loads, if it loads one."""
    if target != "keepstep" and not target.startswith("keepstep."):
        return None
    name = target.removeprefix("keepstep").removeprefix(".")
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


def room_of(name: str) -> str:
    """Return the room that a module stands in: the longest one that names it or its folder."""
    while name not in ROOMS and name:
        name = name.rpartition(".")[0]
    return name


def foreign_imports(modules: Sequence[Module]) -> list[str]:
    """Return the imports that the table of rooms does not allow."""
    names = frozenset(module.name for module in modules)
    breaches = []
    for module in modules:
        room = room_of(module.name)
        for target in module.imports:
            resolved = resolve(target, names)
            if resolved is None or resolved == room:
                continue
            other = room_of(resolved)
            if other not in (room, "") and other not in ROOMS[room]:
                breaches.append(f"{module.name} imports {resolved}: {room} may not use {other}")
    return sorted(breaches)


def circles(modules: Sequence[Module]) -> list[str]:
    """Return the first circle of imports between modules, if there is one."""
    names = frozenset(module.name for module in modules)
    graph = {
        module.name: {
            resolved
            for target in module.imports
            if (resolved := resolve(target, names))
            and resolved != module.name
            # A package's front is loaded before what stands in it.
            and not module.name.startswith(f"{resolved}.")
        }
        for module in modules
        if module.name and not module.name.startswith("__")
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(name) for name in error.args[1]]
    return []


def impure_imports(modules: Sequence[Module]) -> list[str]:
    """Return what pure modules import that acts, waits, or varies from run to run."""
    return sorted(
        f"{module.name} imports {target}"
        for module in modules
        if any(module.name == pure or module.name.startswith(f"{pure}.") for pure in PURE)
        for target in module.imports
        if any(target == impure or target.startswith(f"{impure}.") for impure in IMPURE)
    )


def test_rooms_import_only_what_the_table_allows() -> None:
    assert foreign_imports(read_modules()) == []


def test_table_of_rooms_has_no_circle_and_names_only_what_exists() -> None:
    graph = {room: allowed - {room} for room, allowed in ROOMS.items()}
    TopologicalSorter(graph).prepare()
    names = {module.name for module in read_modules()}
    assert {room for room in ROOMS if room not in names} == set()


def test_packages_import_neither_elastic_nor_each_other() -> None:
    for package in ("checkpoint", "monitor"):
        others = {"checkpoint", "elastic", "monitor"} - {package}
        for room, allowed in ROOMS.items():
            if room.split(".")[0] == package:
                assert not {name for name in allowed if name.split(".")[0] in others}, room


def test_modules_have_no_circle() -> None:
    assert circles(read_modules()) == []


def test_pure_modules_import_nothing_that_acts() -> None:
    assert impure_imports(read_modules()) == []


def test_every_pure_name_exists() -> None:
    names = {module.name for module in read_modules()}
    assert {name for name in PURE if name not in names} == set()


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)
def test_public_names_are_exactly_these(package: ModuleType) -> None:
    assert set(package.__all__) == PUBLIC[package]
    assert dir(package) == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None


@pytest.mark.parametrize("package", ["checkpoint", "elastic", "monitor"])
def test_every_error_is_exported(package: str) -> None:
    errors = importlib.import_module(f"keepstep.{package}.errors")
    front = keepstep if package == "elastic" else importlib.import_module(f"keepstep.{package}")
    raised = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert raised <= set(front.__all__)


@pytest.mark.slow
@pytest.mark.parametrize("unwanted", LIGHT, ids=" ".join)
def test_helper_processes_load_only_what_they_use(unwanted: tuple[str, ...]) -> None:
    # What one of them loads is still loaded after all of them: one process shows it of each.
    code = f"""
import importlib, sys
for module in {LIGHT[unwanted]!r}:
    importlib.import_module(module)
    loaded = [name for name in {unwanted!r} if name in sys.modules]
    if loaded:
        sys.exit(f"import {{module}} loads {{loaded}}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["checkpoint", "elastic", "monitor"])
def test_no_module_has_two_names(name: str) -> None:
    """In the source tree the folders stand next to `keepstep/`, and refuse their bare names."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        capture_output=True,
        text=True,
        cwd=ROOT.parent,
        check=False,
    )
    assert done.returncode == 1
    assert f"import keepstep.{name}" in done.stderr


def test_breaches_are_found() -> None:
    modules = read_modules()
    assert foreign_imports(
        [*modules, parse("checkpoint.format.layout.x", "import keepstep.elastic.errors")]
    )
    assert foreign_imports(
        [*modules, parse("monitor.node.x", "from keepstep.monitor.watch import watch")]
    )
    assert impure_imports([parse("elastic.rendezvous.x", "def f():\n    from time import time")])
    assert impure_imports([parse("checkpoint.format.layout.x", "import torch.distributed as dist")])
    assert circles(
        [*modules, parse("checkpoint.errors", "import keepstep.checkpoint.format.stored.reader")]
    )
    typed_only = "if TYPE_CHECKING:\n    from keepstep.elastic.errors import UsageError"
    assert not foreign_imports([*modules, parse("checkpoint.format.layout.x", typed_only)])
