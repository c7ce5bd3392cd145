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
PACKAGES = ("checkpoint", "elastic", "monitor", "transport")

ROOMS: Mapping[str, frozenset[str]] = {
    room: frozenset(allowed.split())
    for room, allowed in {
        # What all others stand on.
        "private_files": "",
        "log_format": "",
        "notices": "",
        "processes": "notices",
        "transport": "",
        # checkpoint
        "checkpoint.errors": "",
        "checkpoint.garbage": "",
        "checkpoint.layout": "checkpoint.errors",
        "checkpoint.isal": "checkpoint.errors",
        "checkpoint.parity": "checkpoint.errors checkpoint.isal checkpoint.layout",
        "checkpoint.rules": "checkpoint.errors checkpoint.layout",
        "checkpoint.stored": "checkpoint.errors checkpoint.garbage checkpoint.layout",
        "checkpoint.foreign": (
            "checkpoint.errors checkpoint.layout checkpoint.rules checkpoint.stored"
        ),
        "checkpoint.memory": "checkpoint.errors checkpoint.layout transport",
        "checkpoint.live": (
            "checkpoint.errors checkpoint.isal checkpoint.layout checkpoint.memory"
        ),
        "checkpoint.server": (
            "checkpoint.errors checkpoint.layout checkpoint.memory checkpoint.parity"
            " checkpoint.stored log_format notices processes transport"
        ),
        "checkpoint.collective": "checkpoint.layout checkpoint.live checkpoint.stored",
        "checkpoint.agreement": (
            "checkpoint.collective checkpoint.errors checkpoint.layout checkpoint.stored"
        ),
        "checkpoint.state_mapping": "checkpoint.errors checkpoint.layout checkpoint.live",
        "checkpoint.shared_metadata": (
            "checkpoint.agreement checkpoint.collective checkpoint.errors checkpoint.layout"
            " checkpoint.stored"
        ),
        "checkpoint.shared_foreign": (
            "checkpoint.agreement checkpoint.errors checkpoint.foreign checkpoint.layout"
        ),
        "checkpoint.shared_restore": (
            "checkpoint.agreement checkpoint.collective checkpoint.layout checkpoint.live"
            " checkpoint.shared_metadata checkpoint.stored"
        ),
        "checkpoint.piece_exchange": (
            "checkpoint.agreement checkpoint.collective checkpoint.errors checkpoint.layout"
            " checkpoint.live checkpoint.stored"
        ),
        "checkpoint.collective_plan": (
            "checkpoint.agreement checkpoint.collective checkpoint.errors checkpoint.garbage"
            " checkpoint.layout checkpoint.live checkpoint.piece_exchange checkpoint.stored"
        ),
        "checkpoint.saving": (
            "checkpoint.agreement checkpoint.collective checkpoint.collective_plan"
            " checkpoint.errors checkpoint.layout checkpoint.live checkpoint.memory"
            " checkpoint.piece_exchange checkpoint.server checkpoint.state_mapping"
            " checkpoint.stored log_format notices processes transport"
        ),
        "checkpoint.api": (
            "checkpoint.agreement checkpoint.collective checkpoint.collective_plan"
            " checkpoint.conversion checkpoint.errors checkpoint.foreign checkpoint.layout"
            " checkpoint.live"
            " checkpoint.saving checkpoint.shared_foreign checkpoint.shared_metadata"
            " checkpoint.shared_restore checkpoint.state_mapping checkpoint.stored"
        ),
        "checkpoint.dcp": ("checkpoint.errors checkpoint.layout checkpoint.live checkpoint.stored"),
        "checkpoint.zarr_extensions": "checkpoint.errors checkpoint.stored",
        "checkpoint.content_check": "checkpoint.errors checkpoint.layout checkpoint.stored",
        "checkpoint.conversion": (
            "checkpoint.content_check checkpoint.errors checkpoint.foreign checkpoint.layout"
            " checkpoint.live checkpoint.rules checkpoint.stored processes"
        ),
        "checkpoint.cli": (
            "checkpoint.content_check checkpoint.conversion checkpoint.errors checkpoint.foreign"
            " checkpoint.layout checkpoint.rules checkpoint.stored"
        ),
        "checkpoint": "checkpoint.api checkpoint.errors checkpoint.layout checkpoint.live",
        # monitor
        "monitor.errors": "",
        "monitor.records": "",
        "monitor.verdicts": "",
        "monitor.progress": "",
        "monitor.secret": "monitor.errors private_files",
        "monitor.signing": "",
        "monitor.telemetry": "monitor.errors monitor.records",
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
            " monitor.watch transport"
        ),
        "monitor.preflight": "monitor.errors monitor.secret transport",
        "monitor.cli": (
            "log_format monitor.contracts monitor.daemon monitor.diagnosis monitor.errors"
            " monitor.preflight monitor.secret monitor.telemetry monitor.tree"
            " monitor.verdicts monitor.views monitor.watch"
        ),
        "monitor": "monitor.errors monitor.records monitor.telemetry",
        "monitor.run": "monitor.telemetry",
        # elastic
        "elastic.errors": "",
        "elastic.rendezvous": (
            "checkpoint.layout checkpoint.memory checkpoint.parity elastic.errors elastic.store"
        ),
        "elastic.store": "elastic.errors notices private_files processes transport",
        "elastic.worker": (
            "checkpoint.errors checkpoint.layout elastic.errors elastic.rendezvous log_format"
            " monitor monitor.errors monitor.progress monitor.telemetry notices processes transport"
        ),
        "elastic.agent": (
            "checkpoint.errors checkpoint.layout checkpoint.memory checkpoint.server"
            " elastic.errors elastic.rendezvous elastic.store elastic.worker monitor.node"
            " monitor.progress notices processes transport"
        ),
        "elastic.data": "checkpoint.layout elastic.errors notices",
        "elastic.trainer": (
            "checkpoint.agreement checkpoint.api checkpoint.collective checkpoint.errors"
            " checkpoint.layout checkpoint.live checkpoint.memory checkpoint.shared_metadata"
            " checkpoint.shared_restore checkpoint.stored elastic.data elastic.errors"
            " elastic.rendezvous elastic.worker monitor"
        ),
        "elastic.monitor_bridge": (
            "elastic.errors elastic.rendezvous elastic.store monitor.contracts"
            " monitor.diagnosis monitor.errors monitor.verdicts"
        ),
        "elastic.cli": (
            "checkpoint.errors checkpoint.server elastic.agent elastic.errors"
            " elastic.monitor_bridge elastic.rendezvous elastic.store elastic.worker"
            " log_format monitor.contracts monitor.errors notices private_files processes transport"
        ),
        "elastic": "",
        # The front of it all.
        "autoload": "monitor.telemetry",
        "__main__": "elastic.cli",
        "": ("checkpoint elastic.data elastic.errors elastic.trainer monitor"),
    }.items()
}
"""Each room, and the rooms that it may import. A room is a folder, or a module beside folders."""

PURE = (
    "checkpoint.foreign.arrays",
    "checkpoint.foreign.pickled_tensors",
    "checkpoint.foreign.pickled_values",
    "checkpoint.foreign.pickles",
    "checkpoint.foreign.pieces",
    "checkpoint.foreign.range_reads",
    "checkpoint.layout",
    "checkpoint.parity.groups",
    "checkpoint.parity.stripes",
    "checkpoint.rules",
    "checkpoint.stored.chunking",
    "checkpoint.stored.cell_codec",
    "checkpoint.stored.cell_index",
    "checkpoint.stored.listings",
    "checkpoint.stored.manifest",
    "checkpoint.stored.object_names",
    "checkpoint.stored.piece_rounds",
    "checkpoint.stored.shared_plan",
    "checkpoint.stored.stored_json",
    "checkpoint.stored.strict_json",
    "checkpoint.stored.transfer_sizes",
    "checkpoint.stored.zarr_metadata",
    "checkpoint.stored.pruning",
    "checkpoint.memory.snapshot_table",
    "elastic.rendezvous",
    "elastic.data.json_values",
    "elastic.data.micro_batches",
    "elastic.data.order",
    "elastic.data.partitions",
    "elastic.data.position",
    "elastic.trainer.bad_steps",
    "elastic.trainer.events",
    "elastic.trainer.script_place",
    "elastic.trainer.snapshot_interval",
    "elastic.trainer.stop_request",
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
    "checkpoint.foreign.arrays",
    "checkpoint.foreign.pickled_tensors",
    "checkpoint.foreign.pickled_values",
    "checkpoint.foreign.pickles",
    "checkpoint.foreign.pieces",
    "checkpoint.foreign.range_reads",
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
        "BadSteps", "Callbacks", "CheckpointStored", "DeviceUnavailable", "ElasticError",
        "GenerationEntered", "Guard", "InvariantViolated", "Job", "JobFailed", "LeaseLost",
        "MicroBatch", "Mixture", "Packed", "PackedRow", "ProcessUnusable", "Recovered",
        "RejectedStep", "ReplicasDiverged", "ShardedStream", "Shuffled", "SnapshotCommitted",
        "SplitStream", "StartFrom", "State", "Stateful", "Step", "StepRejected",
        "StoreUnavailable", "UsageError", "World", "checkpoint", "join", "monitor",
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
        "keepstep.checkpoint.foreign.opening",
        "keepstep.checkpoint.saving.writer", "keepstep.checkpoint.server.server",
        "keepstep.elastic.agent.agent",
        "keepstep.elastic.cli.launch", "keepstep.elastic.cli.main", "keepstep.elastic.cli.node",
        "keepstep.elastic.monitor_bridge.runtime", "keepstep.monitor.cli.monitor",
        "keepstep.monitor.daemon.assembly",
    ),
    ("etcd3", "google.protobuf"): (
        "keepstep.elastic.trainer.join", "keepstep.elastic.worker.bootstrap"
    ),
}  # fmt: skip
"""What must not be loaded, by importing which modules."""


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
    """In the source tree the folders stand beside `keepstep/`, and refuse their bare names."""
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
        [*modules, parse("checkpoint.layout.x", "import keepstep.elastic.errors")]
    )
    assert foreign_imports(
        [*modules, parse("monitor.node.x", "from keepstep.monitor.watch import watch")]
    )
    assert impure_imports([parse("elastic.rendezvous.x", "def f():\n    from time import time")])
    assert impure_imports([parse("checkpoint.layout.x", "import torch.distributed as dist")])
    assert circles(
        [*modules, parse("checkpoint.errors", "import keepstep.checkpoint.stored.reader")]
    )
    typed_only = "if TYPE_CHECKING:\n    from keepstep.elastic.errors import UsageError"
    assert not foreign_imports([*modules, parse("checkpoint.layout.x", typed_only)])
