"""N2, and with two ranks on one GPU a part of G4: two groups that hang on each other are aborted.

Rank 0 waits in one group, rank 1 in the other. Aborting the groups one after another may wait for
the device, on which the other group's kernel still runs. Proves that a thread for each, all at
once, is enough. Passes if both ranks have aborted both groups and synchronized within 15 s. Whether
aborting in sequence returns is a figure.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from ops.gpu.background import BackgroundCall
from ops.gpu.check import Figures, Finding
from ops.gpu.environment import on_one_gpu, on_own_gpu
from ops.gpu.groups import ABORT_DEADLINE_S, abort, enter, wait_all
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, RankResult, figures_of, run_ranks

_HUNG_S = 2.0
_SEQUENCE_LIMIT_S = 10.0


def check_between_gpus(machine: Machine) -> Finding:
    """Hang two ranks crosswise, each on a GPU of its own."""
    return _check(shared=False)


def check_on_one_gpu(machine: Machine) -> Finding:
    """Hang two ranks crosswise that share a GPU."""
    return _check(shared=True)


def _check(*, shared: bool) -> Finding:
    def run(at_once: bool) -> list[RankResult]:
        return run_ranks(
            hang_crosswise,
            2,
            limit_s=30,
            devices=(0, 0) if shared else (0, 1),
            environment=on_one_gpu if shared else on_own_gpu,
            options={"at_once": at_once},
        )

    with ThreadPoolExecutor() as pool:
        results, in_sequence = pool.map(run, (True, False))
    at_once = figures_of(results)
    return Finding(
        {
            "both groups hang on both ranks": all(found["hung"] for found in at_once),
            "groups aborted at once return within 15 s": all(found["aborted"] for found in at_once),
            "the device is idle afterwards": all(found["idle"] for found in at_once),
        },
        {
            "at_once": at_once,
            "in_sequence": [result.figures or {"killed": True} for result in in_sequence],
        },
    )


def hang_crosswise(rank: Rank) -> Figures:
    """Hang in the group that the other rank does not enter, and abort both."""
    first = enter(rank)
    store = rank.store()
    second = dist.split_group(split_ranks=[[0, 1]])
    assert second is not None
    value = torch.ones(1 << 20, device="cuda")
    for group in (first, second):
        dist.all_reduce(value, group=group)
    torch.cuda.synchronize()
    rank.meet(store, "built")
    dist.all_reduce(value, group=(first, second)[rank.rank])
    done = torch.cuda.Event()
    done.record()
    time.sleep(_HUNG_S)
    hung = not done.query()
    rank.meet(store, "hung")
    began_s = time.monotonic()
    if rank.options["at_once"]:
        aborted = wait_all(abort((first, second), rank.device), ABORT_DEADLINE_S)
    else:
        back_ends = [group._get_backend(torch.device("cuda")) for group in (first, second)]

        def abort_in_sequence() -> None:
            for back_end in back_ends:
                back_end.abort()

        call = BackgroundCall(abort_in_sequence, rank.device).start()
        aborted = call.wait(_SEQUENCE_LIMIT_S)
    aborted_s = time.monotonic() - began_s
    synchronize = BackgroundCall(torch.cuda.synchronize, rank.device).start()
    idle = synchronize.wait(3.0) and synchronize.error is None
    # The other rank's connections must not end before it has aborted by itself.
    rank.meet(store, "aborted")
    return {"hung": hung, "aborted": aborted, "aborted_s": round(aborted_s, 2), "idle": idle}
