"""G8: a copy to the host during a step that computes: its cost, and the cost of waiting for it.

Proves that a snapshot's copy may run during the next step, on a side stream of the lowest priority,
and that its thread takes no processor time while it waits. Passes if waiting for an event made with
`blocking=True` takes less than a fifth of a core, and the side stream has the lowest priority. By
how much the step is slower is a figure, and so is what waiting for a default event takes.
"""

from __future__ import annotations

import statistics
import time

import torch

from ops.gpu.background import BackgroundCall
from ops.gpu.check import Figures, Finding
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, figures_of, run_ranks
from ops.gpu.shared_memory import SharedMemory, affordable_nbytes, pieces, registered

_NBYTES = 8 << 30
_SIDE = 8192
_STEP_MS = 500.0
_PAIRS = 5
_CORE_SHARE_LIMIT = 0.2


def check(machine: Machine) -> Finding:
    """Measure steps in turn with and without a copy."""
    (found,) = figures_of(run_ranks(measure, 1, limit_s=52))
    return Finding(
        {
            "waiting for a blocking event takes no core": found["blocking_core_share"]
            < _CORE_SHARE_LIMIT,
            "the side stream has the lowest priority": found["priority"] == found["lowest"],
        },
        found,
    )


def measure(rank: Rank) -> Figures:
    """Run steps of matrix products with and without a copy meanwhile."""
    torch.cuda.set_device(rank.device)
    nbytes = affordable_nbytes(_NBYTES)
    source = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    side_stream = torch.cuda.Stream(priority=0)
    lowest, _ = side_stream.priority_range()
    matrices = [torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    _step_ms(matrices, 10)
    products = max(1, round(_STEP_MS / (_step_ms(matrices, 10) / 10)))
    parts = pieces(nbytes)
    alone, copying = [], []
    core_shares: dict[bool, list[float]] = {True: [], False: []}
    with SharedMemory(nbytes) as memory:
        memory.touch()
        with registered(memory, parts) as code:
            if code:
                raise RuntimeError(f"cudaHostRegister: {code}")
            for number in range(_PAIRS):
                alone.append(_step_ms(matrices, products))
                blocking = number % 2 == 0
                copy = _Copy(source, memory.tensor, parts, side_stream, blocking=blocking)
                call = BackgroundCall(copy.run, rank.device).start()
                copying.append(_step_ms(matrices, products))
                if not call.wait(30.0):
                    raise TimeoutError("a copy has not ended within 30 s")
                if call.error is not None:
                    raise call.error
                core_shares[blocking].append(copy.core_share)
    step_ms, copying_ms = statistics.median(alone), statistics.median(copying)
    return {
        "nbytes": nbytes,
        "step_ms": round(step_ms, 1),
        "slowdown_percent": round(100 * (copying_ms / step_ms - 1), 2),
        "blocking_core_share": round(statistics.median(core_shares[True]), 3),
        "spinning_core_share": round(statistics.median(core_shares[False]), 3),
        "priority": side_stream.priority,
        "lowest": lowest,
    }


class _Copy:
    """A copy on a side stream, and the share of a core that waiting for it took."""

    def __init__(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        parts: list[tuple[int, int]],
        stream: torch.cuda.Stream,
        *,
        blocking: bool,
    ) -> None:
        self._source, self._target, self._parts = source, target, parts
        self._stream = stream
        self._done = torch.cuda.Event(blocking=blocking)
        self.core_share = 0.0

    def run(self) -> None:
        with torch.cuda.stream(self._stream):
            for offset, nbytes in self._parts:
                span = slice(offset, offset + nbytes)
                self._target[span].copy_(self._source[span], non_blocking=True)
            self._done.record(self._stream)
        began_s, core_began_s = time.monotonic(), time.thread_time()
        self._done.synchronize()
        waited_s = time.monotonic() - began_s
        self.core_share = (time.thread_time() - core_began_s) / max(waited_s, 1e-3)


def _step_ms(matrices: list[torch.Tensor], products: int) -> float:
    """Return how long some matrix products take on the device."""
    first, second, result = matrices
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(products):
        torch.mm(first, second, out=result)
    ended.record()
    # Polling leaves the core and the GIL to the copying thread.
    while not ended.query():
        time.sleep(0.005)
    return float(began.elapsed_time(ended))
