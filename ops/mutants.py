"""Samples mutants of critical modules, runs the tests that concern them, and lists who survives.

    python ops/mutants.py [--sample 60] [--seed 1] [--only NAME] [--jobs 2] [--json]

A mutant is one small change: a comparison, a condition, a constant. Cosmic Ray makes them; each is
tried in a copy of the tree, so that nothing here changes. A mutant that no test notices shows that
a test is missing, or that the change means nothing. Needs `pip install -e '.[mutants]'`.

Left out by rule, because they never mean anything: `frozen` and `slots` of a dataclass; `strict`
of a `zip`, which only guards against mistakes; a duration at the top of a module, by a second; and
`==` for `is`, and the like, which is the same for enums, None and types. All others count.

The tests must pass without a change, or each change would seem to be noticed. A test that takes ten
times as long as without a change, and a minute, has met something endless.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
_MEMORY = "tests/unit/checkpoint/snapshot/memory"
_STORED = "tests/unit/checkpoint/format/stored"
_ON_DISK = "tests/integration/checkpoint"
SUBJECTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "node": ("elastic/node/state.py", ("tests/unit/elastic/node", _SCHEDULES)),
    "decide": ("elastic/rendezvous/decide.py", _RENDEZVOUS),
    "closing": ("elastic/rendezvous/closing.py", _RENDEZVOUS),
    "opening": ("elastic/rendezvous/opening.py", _RENDEZVOUS),
    "commits": ("elastic/rendezvous/commits.py", _RENDEZVOUS),
    "storing": ("elastic/rendezvous/checkpoint_schedule.py", _RENDEZVOUS),
    "transactions": ("elastic/rendezvous/transactions.py", _RENDEZVOUS),
    "placements": ("elastic/rendezvous/placements.py", _RENDEZVOUS),
    "rank_assignment": ("elastic/rendezvous/rank_assignment.py", _RENDEZVOUS),
    "join_protocol": ("elastic/rendezvous/join_protocol.py", _RENDEZVOUS),
    "kept_state": (
        "elastic/rendezvous/kept_state.py",
        ("tests/unit/elastic/agent/test_kept_state.py",),
    ),
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
        "checkpoint/snapshot/memory/snapshot_table.py",
        (f"{_MEMORY}/test_snapshot_table.py", _SCHEDULES),
    ),
    "protection": (
        "checkpoint/snapshot/server/protection.py",
        ("tests/unit/checkpoint/snapshot/server", f"{_ON_DISK}/test_protection.py"),
    ),
    "restore_check": (
        "checkpoint/snapshot/server/restore_check.py",
        ("tests/unit/checkpoint/snapshot/server/test_restore_check.py",),
    ),
    "files": (
        "checkpoint/format/stored/files.py",
        (f"{_STORED}/test_files.py", f"{_ON_DISK}/test_storages.py", _STORED),
    ),
    "pruning": (
        "checkpoint/format/stored/pruning.py",
        (f"{_STORED}/test_pruning.py", f"{_ON_DISK}/test_housekeeping.py"),
    ),
    "writer": (
        "checkpoint/format/stored/writer.py",
        (
            f"{_STORED}/test_commit.py",
            f"{_STORED}/test_requests.py",
            f"{_STORED}/test_chunking.py",
            f"{_ON_DISK}/test_stored_checkpoints.py",
        ),
    ),
    "hangs": (
        "monitor/diagnosis/hangs.py",
        (f"{_DIAGNOSIS}/test_hangs.py", f"{_DIAGNOSIS}/test_cases.py", _DIAGNOSIS),
    ),
    "policy": ("monitor/diagnosis/policy.py", (f"{_DIAGNOSIS}/test_policy.py",)),
    "snapshot_agreement": (
        "elastic/trainer/snapshot_agreement.py",
        (
            "tests/unit/elastic/trainer/test_snapshot_agreement.py",
            "tests/unit/elastic/trainer/test_snapshot_manager.py",
        ),
    ),
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

_DURATION = re.compile(r"[A-Z_]+_S(: \w+)? = ")
_FAILED = (1, 2)
"""Exit statuses of pytest: tests failed; or modules could not be imported."""


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
    """The outcome of a mutant.

    Attributes:
        mutant: the change.
        noticed_by: the first tests that did not pass; "" if all did.
        changed: its line before and after.
    """

    mutant: Mutant
    noticed_by: str
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
            if not _is_meaningless(name, lines[line - 1]):
                yield Mutant(subject, name, occurrence, line)


def _is_meaningless(operator: str, line: str) -> bool:
    if operator == "core/ReplaceTrueWithFalse":
        return line.startswith("@dataclass") or "strict=True" in line
    return operator == "core/NumberReplacer" and _DURATION.match(line) is not None


def sampled(subjects: Sequence[str], size: int, seed: int) -> list[Mutant]:
    """Return a sample of the mutants of some modules: one of a line at most."""
    by_line = {(mutant.subject, mutant.line): mutant for mutant in _shuffled(subjects, seed)}
    mutants = sorted(by_line.values(), key=lambda mutant: (mutant.subject, mutant.line))
    return random.Random(seed).sample(mutants, min(size, len(mutants)))


def _shuffled(subjects: Sequence[str], seed: int) -> list[Mutant]:
    mutants = [mutant for subject in subjects for mutant in mutants_of(subject)]
    random.Random(seed).shuffle(mutants)
    return mutants


def try_mutant(mutant: Mutant, tree: Path, limits_s: Mapping[str, float]) -> Outcome:
    """Run the tests that concern a mutant in a copy of the tree, which is as before afterwards.

    Args:
        mutant: the change.
        tree: the copy.
        limits_s: by test, how long it may take.
    """
    name, tests = SUBJECTS[mutant.subject]
    path = tree / name
    before = path.read_text()
    after = mutate_code(before, get_operator(mutant.operator)(), mutant.occurrence)
    changed = " -> ".join(text.splitlines()[mutant.line - 1].strip() for text in (before, after))
    path.write_text(after)
    try:
        noticed_by = next((test for test in tests if not _passes(test, tree, limits_s[test])), "")
    finally:
        path.write_text(before)
    return Outcome(mutant, noticed_by, changed)


def limits_of(tests: Iterable[str], tree: Path) -> dict[str, float]:
    """Return how long each test may take: ten times what it takes without a change, and a minute.

    Raises:
        click.ClickException: it does not pass without a change.
    """
    limits_s = {}
    for test in tests:
        began_s = time.monotonic()
        if not _passes(test, tree, None):
            raise click.ClickException(f"{test} does not pass without a change")
        limits_s[test] = 60.0 + 10.0 * (time.monotonic() - began_s)
    return limits_s


def _passes(test: str, tree: Path, limit_s: float | None) -> bool:
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", test,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(tree), "KEEPSTEP_SEEDS": "100"}
    try:
        completed = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    # Less than 0: a signal ended it.
    if completed.returncode > 0 and completed.returncode not in _FAILED:
        raise click.ClickException(f"no test ran: {completed.stdout.decode()[-2000:]}")
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

        mutants = sampled(subjects, sample, seed)
        tests = {test for mutant in mutants for test in SUBJECTS[mutant.subject][1]}
        limits_s = limits_of(sorted(tests), Path(directory) / "0")

        def run(mutant: Mutant) -> Outcome:
            tree = trees.get()
            try:
                outcome = try_mutant(mutant, tree, limits_s)
            finally:
                trees.put(tree)
            if not outcome.noticed_by:
                path = SUBJECTS[mutant.subject][0]
                console.print(f"survives: {path}:{mutant.line}: {outcome.changed}", markup=False)
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            outcomes = list(pool.map(run, mutants))
    table = Table("module", "tried", "noticed", title=f"seed {seed}")
    for subject in subjects:
        own = [outcome for outcome in outcomes if outcome.mutant.subject == subject]
        table.add_row(subject, str(len(own)), str(sum(bool(outcome.noticed_by) for outcome in own)))
    console.print(table)
    noticed = sum(bool(outcome.noticed_by) for outcome in outcomes)
    console.print(f"{noticed} of {len(outcomes)} mutants noticed")
    if as_json:
        survivors = [
            {"module": SUBJECTS[o.mutant.subject][0], "line": o.mutant.line, "change": o.changed}
            for o in outcomes
            if not o.noticed_by
        ]
        summary = {"seed": seed, "tried": len(outcomes), "noticed": noticed, "survivors": survivors}
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
