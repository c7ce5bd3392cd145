"""Prepares the worker processes of torch's DataLoader, which read a job's samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from keepstep.notices import obey_owner_alone

_INIT = "worker_init_fn"


class _Start:
    """Runs first in each process; the process may receive it pickled."""

    def __init__(self, init: Callable[[int], None] | None, owner: int) -> None:
        self._init = init
        self._owner = owner

    def __call__(self, worker: int) -> None:
        # The step under way would fail with its loader, while its node hands over.
        obey_owner_alone(self._owner)
        if self._init is not None:
            self._init(worker)


def with_prepared_workers(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return arguments of torch's DataLoader with which only the rank ends its loader's workers.

    Signals that announce a node's end are left to the agent.
    """
    return {**options, _INIT: _Start(options.get(_INIT), os.getpid())}
