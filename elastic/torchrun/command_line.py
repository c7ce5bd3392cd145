"""Reads from torchrun's command line what it does not pass to its back end."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, suppress

from torch.distributed.run import determine_local_world_size, get_args_parser


def local_workers(run_id: str) -> int | None:
    """Return how many workers this process, as torchrun, starts; None if it is another program.

    Args:
        run_id: the job that its command line has to name.
    """
    with redirect_stderr(io.StringIO()), suppress(SystemExit):
        options = get_args_parser().parse_args(sys.argv[1:])
        if options.rdzv_id == run_id:
            with suppress(ValueError):
                return int(determine_local_world_size(options.nproc_per_node))
    return None
