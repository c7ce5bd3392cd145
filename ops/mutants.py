"""Samples mutants of critical modules, runs the tests that concern them, and lists who survives.

    python ops/mutants.py [--sample 60] [--seed 1] [--only NAME] [--jobs 2] [--json]

A mutant is one small change: a comparison, a condition, a constant. Cosmic Ray makes them; each is
tried in a copy of the tree, so that nothing here changes. A mutant that no test notices shows that
a test is missing, or that the change means nothing. Needs `pip install -e '.[mutants]'`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import click
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]

_CASES = "tests/unit/elastic/rendezvous/test_cases.py"
_SCHEDULES = (
    "tests/sim/test_rendezvous.py"
    "::test_any_schedule_keeps_the_invariants_and_ends_in_a_finished_job"
)
_RENDEZVOUS = (_CASES, "tests/unit/elastic/rendezvous", _SCHEDULES)
_DIAGNOSIS = "tests/unit/monitor/diagnosis"
_MEMORY = "tests/unit/checkpoint/memory"
_STORED = "tests/unit/checkpoint/stored"
_ON_DISK = "tests/integration/checkpoint"
SUBJECTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "decide": ("elastic/rendezvous/decide.py", _RENDEZVOUS),
    "storing": ("elastic/rendezvous/checkpoint_schedule.py", _RENDEZVOUS),
    "transactions": ("elastic/rendezvous/transactions.py", _RENDEZVOUS),
    "placements": ("elastic/rendezvous/placements.py", _RENDEZVOUS),
    "rank_assignment": ("elastic/rendezvous/rank_assignment.py", _RENDEZVOUS),
    "standing": ("elastic/rendezvous/standing.py", _RENDEZVOUS),
    "failure_budget": ("elastic/rendezvous/failure_budget.py", _RENDEZVOUS),
    "membership": (
        "elastic/agent/membership.py",
        ("tests/unit/elastic/agent/test_membership.py",),
    ),
    "view_reader": (
        "elastic/agent/view_reader.py",
        (
            "tests/unit/elastic/agent/test_view_reader.py",
            "tests/unit/elastic/agent/test_membership.py",
        ),
    ),
    "retention": (
        "checkpoint/memory/snapshot_table.py",
        (f"{_MEMORY}/test_snapshot_table.py", _SCHEDULES),
    ),
    "protection": (
        "checkpoint/server/protection.py",
        ("tests/unit/checkpoint/server", f"{_ON_DISK}/test_protection.py"),
    ),
    "restore_check": (
        "checkpoint/server/restore_check.py",
        ("tests/unit/checkpoint/server/test_restore_check.py",),
    ),
    "files": (
        "checkpoint/stored/files.py",
        (f"{_STORED}/test_files.py", f"{_ON_DISK}/test_storages.py", _STORED),
    ),
    "pruning": (
        "checkpoint/stored/pruning.py",
        (f"{_STORED}/test_pruning.py", f"{_ON_DISK}/test_housekeeping.py"),
    ),
    "writer": (
        "checkpoint/stored/writer.py",
        (
            f"{_STORED}/test_commit.py",
            f"{_STORED}/test_requests.py",
            f"{_ON_DISK}/test_stored_checkpoints.py",
        ),
    ),
    "hangs": (
        "monitor/diagnosis/hangs.py",
        (f"{_DIAGNOSIS}/test_hangs.py", f"{_DIAGNOSIS}/test_cases.py", _DIAGNOSIS),
    ),
    "policy": ("monitor/diagnosis/policy.py", (f"{_DIAGNOSIS}/test_policy.py",)),
    "replicas": (
        "elastic/trainer/replicas.py",
        ("tests/unit/elastic/trainer/test_replicas.py", "tests/integration/job/test_replicas.py"),
    ),
}
"""Modules by name, and the tests that concern each, the quick ones first."""

# Changes of annotations and of texts mean nothing; of these kinds each means something.
_KINDS = (
    "core/ReplaceComparisonOperator",
    "core/AddNot",
    "core/ReplaceAndWithOr",
    "core/ReplaceOrWithAnd",
    "core/ReplaceTrueWithFalse",
    "core/ReplaceFalseWithTrue",
    "core/ReplaceUnaryOperator_Delete_Not",
    "core/NumberReplacer",
    "core/ZeroIterationForLoop",
)
# `==` for `is` changes nothing for enums, None and types.
_MEANINGLESS = (
    "Eq_Is", "Is_Eq", "NotEq_IsNot", "IsNot_NotEq", "Is_Lt", "Is_Gt", "IsNot_Lt", "IsNot_Gt",
)  # fmt: skip

_LIMIT_S = 300.0
"""A mutant whose tests take longer has made something endless, and is noticed."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module.

    Attributes:
        subject: the module's name in `SUBJECTS`.
        operator: Cosmic Ray's name of the change.
        occurrence: which of the places where it is possible.
        line: the first line that it changes, from 1.
    """

    subject: str
    operator: str
    occurrence: int
    line: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant; `changed` are its lines before and after."""

    mutant: Mutant
    is_noticed: bool
    changed: str


def mutants_of(subject: str) -> Iterator[Mutant]:
    """Yield every mutant of a module."""
    source = (ROOT / SUBJECTS[subject][0]).read_text()
    tree, lines = get_ast(source), source.splitlines()
    for name in operator_names():
        if not name.startswith(_KINDS) or name.endswith(_MEANINGLESS):
            continue
        operator = get_operator(name)()
        places = (place for node in ast_nodes(tree) for place in operator.mutation_positions(node))
        for occurrence, ((line, _), _) in enumerate(places):
            # Whether a class is frozen or has slots is for readers and the type checker.
            if not lines[line - 1].startswith("@dataclass"):
                yield Mutant(subject, name, occurrence, line)


def sampled(subjects: Sequence[str], size: int, seed: int) -> list[Mutant]:
    """Return a sample of the mutants of some modules: one of a line at most."""
    by_line = {(mutant.subject, mutant.line): mutant for mutant in _shuffled(subjects, seed)}
    mutants = sorted(by_line.values(), key=lambda mutant: (mutant.subject, mutant.line))
    return random.Random(seed).sample(mutants, min(size, len(mutants)))


def _shuffled(subjects: Sequence[str], seed: int) -> list[Mutant]:
    mutants = [mutant for subject in subjects for mutant in mutants_of(subject)]
    random.Random(seed).shuffle(mutants)
    return mutants


def try_mutant(mutant: Mutant, tree: Path) -> Outcome:
    """Run the tests that concern a mutant in a copy of the tree, which is as before afterwards."""
    name, tests = SUBJECTS[mutant.subject]
    path = tree / name
    before = path.read_text()
    after = mutate_code(before, get_operator(mutant.operator)(), mutant.occurrence)
    changed = " -> ".join(text.splitlines()[mutant.line - 1].strip() for text in (before, after))
    path.write_text(after)
    try:
        is_noticed = any(not _passes(test, tree) for test in tests)
    finally:
        path.write_text(before)
    return Outcome(mutant, is_noticed, changed)


def _passes(test: str, tree: Path) -> bool:
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", test,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(tree), "KEEPSTEP_SEEDS": "100"}
    try:
        completed = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return completed.returncode == 0


@click.command()
@click.option("--sample", default=60, show_default=True, help="How many mutants to try.")
@click.option("--seed", default=1, show_default=True, help="Which mutants to draw.")
@click.option("--only", multiple=True, type=click.Choice(sorted(SUBJECTS)), help="These modules.")
@click.option("--jobs", default=2, show_default=True, help="How many to try at the same time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def main(sample: int, seed: int, only: tuple[str, ...], jobs: int, as_json: bool) -> None:
    """Sample mutants of critical modules and list those that no test notices."""
    subjects = only or tuple(SUBJECTS)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="keepstep-mutants-") as directory:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            tree = Path(directory) / str(number)
            shutil.copytree(
                ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "*cache*")
            )
            trees.put(tree)

        def run(mutant: Mutant) -> Outcome:
            tree = trees.get()
            try:
                outcome = try_mutant(mutant, tree)
            finally:
                trees.put(tree)
            if not outcome.is_noticed:
                path = SUBJECTS[mutant.subject][0]
                console.print(f"survives: {path}:{mutant.line}: {outcome.changed}", markup=False)
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            outcomes = list(pool.map(run, sampled(subjects, sample, seed)))
    table = Table("module", "tried", "noticed", title=f"seed {seed}")
    for subject in subjects:
        own = [outcome for outcome in outcomes if outcome.mutant.subject == subject]
        table.add_row(subject, str(len(own)), str(sum(outcome.is_noticed for outcome in own)))
    console.print(table)
    noticed = sum(outcome.is_noticed for outcome in outcomes)
    console.print(f"{noticed} of {len(outcomes)} mutants noticed")
    if as_json:
        survivors = [
            {"module": SUBJECTS[o.mutant.subject][0], "line": o.mutant.line, "change": o.changed}
            for o in outcomes
            if not o.is_noticed
        ]
        summary = {"seed": seed, "tried": len(outcomes), "noticed": noticed, "survivors": survivors}
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
