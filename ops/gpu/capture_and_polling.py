"""G2: what a thread that polls an event does to the capture of a graph in another thread.

Proves that the recorder's watcher has to set its capture mode before it queries anything. Passes if
the capture is lost, by `cudaErrorStreamCaptureUnsupported` in the polling thread, where that thread
keeps the default mode, and succeeds, with a right result, where its mode is thread-local.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from ops.gpu.background import described
from ops.gpu.check import Figures, Finding
from ops.gpu.cuda_runtime import (
    CAPTURE_GLOBAL,
    CAPTURE_THREAD_LOCAL,
    CAPTURE_UNSUPPORTED,
    NOT_READY,
    SUCCESS,
    query_event,
    runtime,
    set_capture_mode,
)
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, figures_of, run_ranks

_LAUNCHES = 300
# About two seconds: longer than the capture.
_SLEEP_CYCLES = 4_000_000_000


def check(machine: Machine) -> Finding:
    """Capture twice, in a process each: a lost capture spoils what follows in its process."""

    def run(mode: int) -> Figures:
        (found,) = figures_of(run_ranks(capture, 1, limit_s=45, options={"mode": mode}))
        return found

    with ThreadPoolExecutor() as pool:
        default, local = pool.map(run, (CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL))
    return Finding(
        {
            "polling in the default mode loses the capture": not default["captured"]
            and CAPTURE_UNSUPPORTED in default["codes"],
            "polling in the thread-local mode does not": local["captured"]
            and local["replayed"]
            and set(local["codes"]) <= {SUCCESS, NOT_READY},
        },
        {"default": default, "thread_local": local},
    )


def capture(rank: Rank) -> Figures:
    """Capture many small kernels while another thread polls an event that is not done."""
    torch.cuda.set_device(rank.device)
    values = torch.ones(1024, device="cuda")
    values.add_(0)
    torch.cuda.synchronize()
    library = runtime()
    pending = torch.cuda.Event()
    torch.cuda._sleep(_SLEEP_CYCLES)
    pending.record()
    codes: set[int] = set()
    polls, ended = threading.Event(), threading.Event()

    def poll() -> None:
        torch.cuda.set_device(rank.device)
        set_capture_mode(library, rank.options["mode"])
        polls.set()
        while not ended.wait(0.001):
            codes.add(query_event(library, pending.cuda_event))

    thread = threading.Thread(target=poll)
    thread.start()
    polls.wait()
    graph, stream, error = torch.cuda.CUDAGraph(), torch.cuda.Stream(), ""
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin()
            for _ in range(_LAUNCHES):
                values.add_(1)
                time.sleep(0.001)
            graph.capture_end()
    except RuntimeError as caught:
        error = described(caught)
    ended.set()
    thread.join()
    replayed = False
    if not error:
        graph.replay()
        torch.cuda.synchronize()
        replayed = bool((values == 1 + _LAUNCHES).all().item())
    return {
        "captured": not error,
        "replayed": replayed,
        "codes": sorted(codes),
        "error": error,
    }
