"""G1: what a synchronous collective returns, and whether events around it measure it.

Proves what the recorder's fallback relies on: a synchronous collective runs on the current stream
and returns no Work, so two events of that stream enclose exactly it. Passes if the back end is
ProcessGroupNCCL, the synchronous call returns None and the asynchronous one a Work, and the time
between the events is that of a plain copy of as many bytes, without the kernel queued before them.
"""

from __future__ import annotations

import torch

from ops.gpu.check import Figures, Finding
from ops.gpu.groups import all_gather, enter
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, figures_of, run_ranks

_NBYTES = 1 << 30
_SLEEP_CYCLES = 200_000_000
_TOLERANCE = 0.25
_TOLERANCE_MS = 0.1


def check(machine: Machine) -> Finding:
    """Compare a collective of one rank, which is a copy, with a copy."""
    (found,) = figures_of(
        run_ranks(measure, 1, limit_s=50, options={"nbytes": min(_NBYTES, machine.gpu_nbytes // 8)})
    )
    collective_ms, copy_ms = found["collective_ms"], found["copy_ms"]
    return Finding(
        {
            "the back end is ProcessGroupNCCL": found["back_end"] == "ProcessGroupNCCL",
            "a synchronous collective returns no Work": found["synchronous"] == "None",
            "an asynchronous collective returns a Work": found["asynchronous"] != "None",
            "events around it measure what a copy takes": abs(collective_ms - copy_ms)
            <= _TOLERANCE * copy_ms + _TOLERANCE_MS,
        },
        found,
    )


def measure(rank: Rank) -> Figures:
    """Queue a long kernel, a collective between two events, and a copy between two more."""
    group = enter(rank)
    source = torch.ones(rank.options["nbytes"] // 4, device="cuda")
    target = torch.empty_like(source)
    asynchronous = all_gather(group, target, source, asynchronous=True)
    if asynchronous is not None:
        asynchronous.wait()
    # What is loaded at the first use is not measured.
    all_gather(group, target, source)
    target.copy_(source)
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    torch.cuda._sleep(_SLEEP_CYCLES)
    events[0].record()
    synchronous = all_gather(group, target, source)
    events[1].record()
    events[2].record()
    target.copy_(source)
    events[3].record()
    torch.cuda.synchronize()
    return {
        "back_end": type(group._get_backend(torch.device("cuda"))).__name__,
        "synchronous": type(synchronous).__name__.replace("NoneType", "None"),
        "asynchronous": type(asynchronous).__name__.replace("NoneType", "None"),
        "nbytes": source.nbytes,
        "collective_ms": round(events[0].elapsed_time(events[1]), 3),
        "copy_ms": round(events[2].elapsed_time(events[3]), 3),
    }
