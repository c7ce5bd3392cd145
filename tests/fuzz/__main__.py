"""Changes real files of every format, and messages of every kind, and reads them.

    python -m tests.fuzz --minutes 10 --seed 1 --json

Whatever comes of a case but a result or an error of keepstep's own is a finding: another error, a
crash, more than ten seconds of processor time, more than 512 MiB of memory, an audit event that
reading does not cause (an import, a command, a file opened elsewhere or to be written). Findings
are printed, and the files of a case are kept. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.decoders import decoders
from tests.fuzz.run import Outcomes, cases_of, run
from tests.fuzz.seeds import write_seeds


def _until(cases: Iterator[tuple[str, str]], end_s: float) -> Iterator[tuple[str, str]]:
    for case in cases:
        if time.monotonic() > end_s:
            return
        yield case


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", help="names that begin so, such as `orbax` or `record`")
    parser.add_argument("--json", action="store_true", help="no table before the last line")
    options = parser.parse_args(arguments)
    kept = Path(tempfile.mkdtemp(prefix="keepstep-fuzz-findings-"))
    with tempfile.TemporaryDirectory() as directory:
        seeds = write_seeds(Path(directory))
        # A message is read in microseconds: a decoder has as many cases as a format.
        names = [name for name in (*seeds, *decoders()) if name.startswith(options.only or "")]
        started_s = time.monotonic()
        cases = _until(cases_of(names, options.seed, None), started_s + 60 * options.minutes)
        outcomes = run(cases, seeds, kept, options.workers)
        took_s = time.monotonic() - started_s
    for finding in outcomes.findings:
        print(f"{finding.number}: {finding.result}: {finding.error}")
    if not options.json:
        for name, counts in outcomes.counts.items():
            print(f"{name:45} {dict(counts)}")
    if any(kept.iterdir()):
        print(f"the files of findings are in {kept}")
    else:
        kept.rmdir()
    print(json.dumps(_summary(outcomes, options.seed, took_s)))
    return 1 if outcomes.findings else 0


def _summary(outcomes: Outcomes, seed: int, took_s: float) -> dict[str, object]:
    counts = outcomes.counts
    return {
        "seed": seed,
        "seconds": round(took_s),
        "cases": sum(sum(found.values()) for found in counts.values()),
        "findings": len(outcomes.findings),
        "by_name": {name: dict(found) for name, found in counts.items()},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
