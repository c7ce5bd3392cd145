"""Measures conversions of checkpoints against the tools that others convert them with.

`python ops/bench/convert.py --json [--quick] [--deepspeed-python PATH]`. The last line is one JSON
object.

PATH is the Python of an environment with DeepSpeed and transformers, which write the sources and
convert them; without it these two are not run. A Llama of 284 million parameters was trained with
ZeRO 2 on two ranks: 4.0 GB of weights in bfloat16, and masters and moments in float32. Its state is
converted to DeepSpeed's universal format by `ds_to_universal`, and by keepstep to keepstep's;
another one of DCP to a file of `torch.save` by `dcp_to_torch_save` and by keepstep; and the weights
alone are loaded and saved again by transformers, and converted from a Hugging Face folder to
another by keepstep.

Each conversion is a process of its own, and times have its start. What was written before is on the
disk when one begins. keepstep's is durable when it ends, and was read again and compared; that of
the others is in the memory of the kernel. `peak_bytes` is the greatest sum over the processes of a
conversion of what is theirs alone (RssAnon and RssShmem), 50 times a second; files that are mapped
into memory are not in it. `limit_bytes` is what `--memory` gives.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).with_name("convert_sources.py")
LAYERS, QUICK_LAYERS = 17, 1
MEMORY_NBYTES = 2**30
SAMPLE_S = 0.02

SAVE_AGAIN = """
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").save_pretrained(sys.argv[2])
"""
DCP_TO_TORCH_SAVE = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
"""

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """The cost of a conversion."""

    seconds: float
    peak_nbytes: int


class PeakMemory:
    """Samples the memory that a process and its descendants do not share."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.nbytes = 0

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.nbytes = max(self.nbytes, sum(map(own_nbytes, tree_of(self._pid))))


def tree_of(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += map(int, children.read_text().split())
            except OSError:
                continue
    return found


def own_nbytes(pid: int) -> int:
    """Return the memory that a process does not share; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(
        int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:"))
    )


def measure(command: Sequence[str]) -> Measured:
    """Run a command once all earlier writes are on the disk.

    Raises:
        RuntimeError: it failed; the message is its output.
    """
    os.sync()
    started_s = time.perf_counter()
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            command, stdout=printed, stderr=subprocess.STDOUT, cwd=ROOT, env=environment()
        )
        with PeakMemory(process.pid) as peak:
            status = process.wait()
        seconds = time.perf_counter() - started_s
        printed.seek(0)
        if status != 0:
            raise RuntimeError(f"{' '.join(command)[:300]}: {printed.read()[-2000:]}")
    return Measured(seconds, peak.nbytes)


def measure_from_scratch(command: Sequence[str], target: Path) -> Measured:
    """Run a command that writes a target, which is removed before."""
    remove(target)
    return measure(command)


def environment() -> dict[str, str]:
    """Return the environment of the conversions, without that of the one that measures."""
    return {**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}


def keepstep(source: str, target: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "keepstep", "ckpt", "convert", source, str(target), "--json",
        "--memory", str(MEMORY_NBYTES), *more,
    ]  # fmt: skip


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def compared(peer: Measured, own: Measured) -> Result:
    return {
        "seconds": round(peer.seconds, 2),
        "peak_bytes": peer.peak_nbytes,
        "keepstep_seconds": round(own.seconds, 2),
        "keepstep_peak_bytes": own.peak_nbytes,
        "ratio": round(peer.seconds / own.seconds, 2),
    }


class Conversions:
    """The sources in one directory, and the conversions that are measured."""

    def __init__(self, directory: Path, layers: int) -> None:
        self._directory = directory
        self._layers = layers

    def make(self, python: str, *wanted: str) -> None:
        """Make the sources that are not there. Raises RuntimeError if that fails."""
        missing = [name for name in wanted if not (self._directory / name).exists()]
        if missing:
            # What DeepSpeed compiles is not shared with others who may be compiling it.
            os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(self._directory / "extensions"))
            measure([python, str(SOURCES), str(self._directory), str(self._layers), *missing])

    def deepspeed(self, python: str) -> tuple[Result, Result]:
        """Return keepstep's result and the comparison with DeepSpeed's."""
        self.make(python, "zero")
        (source,) = (self._directory / "zero").glob("global_step*")
        target, own_target = self._directory / "universal", self._directory / "keepstep"
        by_workers = {
            workers: measure_from_scratch(
                keepstep(f"deepspeed:{source}", own_target, "--workers", str(workers)), own_target
            )
            for workers in (1, 2)
        }
        own = by_workers[2]
        peer = measure_from_scratch(
            [
                python, "-m", "deepspeed.checkpoint.ds_to_universal",
                "--input_folder", str(source), "--output_folder", str(target),
                "--inject_missing_state",
            ],
            target,
        )  # fmt: skip
        result = {
            "seconds": round(own.seconds, 2),
            "peak_bytes": max(run.peak_nbytes for run in by_workers.values()),
            "limit_bytes": MEMORY_NBYTES,
            "source_bytes": sum(file.stat().st_size for file in source.rglob("*.pt")),
            "seconds_by_workers": {
                workers: round(run.seconds, 2) for workers, run in by_workers.items()
            },
        }
        against = compared(peer, own) | {"differing": self._differing(target, own_target)}
        for path in (target, own_target):
            remove(path)
        return result, against

    def dcp_to_torch_save(self) -> Result:
        source = self._directory / "dcp"
        self.make(sys.executable, "dcp")
        target, own_target = self._directory / "torch.pt", self._directory / "own.pt"
        own = measure_from_scratch(keepstep(f"dcp:{source}", own_target), own_target)
        remove(own_target)
        peer = measure_from_scratch(
            [sys.executable, "-c", DCP_TO_TORCH_SAVE, str(source), str(target)], target
        )
        remove(target)
        return compared(peer, own)

    def transformers(self, python: str) -> Result:
        source = self._directory / "huggingface"
        self.make(python, "huggingface")
        target, own_target = self._directory / "saved", self._directory / "own"
        own = measure_from_scratch(
            keepstep(str(source), own_target, "--to", "huggingface"), own_target
        )
        peer = measure_from_scratch([python, "-c", SAVE_AGAIN, str(source), str(target)], target)
        for path in (target, own_target):
            remove(path)
        return compared(peer, own)

    def _differing(self, universal: Path, own: Path) -> list[str]:
        """Return the tensors in which two results differ."""
        done = subprocess.run(
            [
                sys.executable, "-m", "keepstep", "ckpt", "diff",
                f"deepspeed-universal:{universal}", str(own), "--json",
            ],
            stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment(), check=False,
        )  # fmt: skip
        found = json.loads(done.stdout)
        return sorted([*found["only_first"], *found["only_second"], *found["changed"]])


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="A model of one layer.")
@click.option(
    "--deepspeed-python",
    type=click.Path(exists=True, dir_okay=False),
    help="Python of an environment with DeepSpeed and transformers.",
)
@click.option(
    "--directory",
    type=click.Path(file_okay=False, exists=True),
    help="Where to work, and to keep the sources, which are not made again; default: a temporary "
    "one.",
)
def main(as_json: bool, quick: bool, deepspeed_python: str | None, directory: str | None) -> None:
    console = Console(stderr=as_json)
    results: Result = {}
    with nullcontext(directory) if directory else tempfile.TemporaryDirectory() as made:
        conversions = Conversions(Path(made).absolute(), QUICK_LAYERS if quick else LAYERS)
        if deepspeed_python is None:
            reason = "not run: --deepspeed-python is not given"
            results |= {"keepstep": reason, "deepspeed": reason, "transformers": reason}
        else:
            # Not resolved: an environment's Python is a link, and its name says which one it is.
            python = str(Path(deepspeed_python).absolute())
            results["keepstep"], results["deepspeed"] = conversions.deepspeed(python)
            # What was measured so far is not lost if the rest is stopped.
            click.echo(json.dumps(results), err=True)
            results["transformers"] = conversions.transformers(python)
            click.echo(json.dumps(results), err=True)
        results["dcp_to_torch_save"] = conversions.dcp_to_torch_save()
    show(console, results)
    click.echo(json.dumps(results))


def show(console: Console, results: Result) -> None:
    table = Table("against", "seconds", "peak GB", "keepstep's seconds", "peak GB", "ratio")
    for name in ("deepspeed", "transformers", "dcp_to_torch_save"):
        result = results[name]
        if isinstance(result, str):
            table.add_row(name, result)
            continue
        table.add_row(
            name,
            f"{result['seconds']:.1f}",
            f"{result['peak_bytes'] / 1e9:.2f}",
            f"{result['keepstep_seconds']:.1f}",
            f"{result['keepstep_peak_bytes'] / 1e9:.2f}",
            f"{result['ratio']:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
