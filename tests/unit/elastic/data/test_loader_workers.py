"""Claims about the worker processes of data loaders: only their rank ends them."""

from __future__ import annotations

import os

import pytest
from torch.utils.data import DataLoader

from keepstep.elastic.data.loader_workers import with_prepared_workers
from tests.adaptive_timeouts import patient


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_owner_ends_a_loader_process_whoever_has_started_it(method: str) -> None:
    """With a fork server its parent is another process, and it outlived its rank."""
    options = with_prepared_workers({"num_workers": 1, "multiprocessing_context": method})
    loader = DataLoader([1, 2, 3, 4, 5], batch_size=1, **options)  # type: ignore[arg-type]
    batches = iter(loader)
    assert next(batches).tolist() == [1]
    (process,) = batches._workers  # type: ignore[attr-defined]
    # As everybody else may send it, to all processes of a node.
    assert os.system(f"kill -TERM {process.pid}") == 0
    # The fourth was asked for after the signal; of two signals that wait one would be lost.
    assert [next(batches).tolist() for _ in range(3)] == [[2], [3], [4]]
    process.terminate()
    process.join(patient(10))
    assert process.exitcode == 0
