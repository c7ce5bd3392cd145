"""A process that reads cases' names from its input and writes what came of each, as JSON lines."""

from __future__ import annotations

import codecs
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.cases import Seed
from tests.fuzz.decoders import decoders
from tests.fuzz.guard import Guard, limit_addresses, peak_nbytes, reset_peak

_MOST_NBYTES = 2**29
_MOST_SECONDS = 10.0


def main(place: Path, kept: Path, origins: dict[str, str]) -> None:
    """Serve until the input ends.

    Args:
        place: a directory of this process's own.
        kept: where the files of findings go.
        origins: the seeds' directories by name.
    """
    os.environ["KEEPSTEP_FUZZ_PLACE"] = str(place)
    seeds = {
        name: Seed(name, Path(origin), place / f"{number:02}" / Path(origin).name)
        for number, (name, origin) in enumerate(origins.items())
    }
    entries = decoders()
    guard = Guard(place)
    # What is imported when it is first needed is needed now: also codecs, which JSON and zip name.
    for codec in ("cp437", "utf-16-be", "utf-16-le", "utf-32-be", "utf-32-le", "utf-8-sig"):
        codecs.lookup(codec)
    for name, seed in seeds.items():
        assert seed.read() == "read", f"the seed {name} is refused"
    for decoder in entries.values():
        decoder.enter("0")
    limit_addresses()
    print("ready", flush=True)
    for line in sys.stdin:
        name, number = json.loads(line)
        print(json.dumps(_outcome(name, number, seeds, entries, guard, kept)), flush=True)


def _outcome(
    name: str, number: str, seeds: dict[str, Seed], entries: Any, guard: Guard, kept: Path
) -> dict[str, Any]:
    changes: dict[str, bytes | None] = {}
    seed = seeds.get(name)
    if seed is not None:
        changes = seed.change(number)
        act: Callable[[], str] = seed.read
    else:
        act = lambda: entries[name].enter(number)  # noqa: E731
    guard.events.clear()
    before = _memory()
    started = time.process_time()
    error = None
    try:
        guard.watch(seed is not None)
        result = act()
    except BaseException:  # noqa: BLE001 - whatever it is, it is what is looked for
        guard.watch(False)
        result, error = "raised", traceback.format_exc()[-2000:]
    finally:
        guard.watch(False)
    took_s = time.process_time() - started
    nbytes = peak_nbytes() - before
    if error is not None:
        pass
    elif guard.events:
        result, error = "acted", "; ".join(guard.events)
    elif nbytes > _MOST_NBYTES:
        result, error = "memory", f"{nbytes} bytes"
    elif took_s > _MOST_SECONDS:
        result, error = "slow", f"{took_s:.1f} s"
    if error is not None and seed is not None:
        target = kept / f"{name} {number.replace('/', '-')}"
        shutil.copytree(seed.place, target, dirs_exist_ok=True)
    if seed is not None:
        seed.restore(changes)
    return {"name": name, "number": number, "result": result, "error": error}


def _memory() -> int:
    reset_peak()
    return peak_nbytes()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
