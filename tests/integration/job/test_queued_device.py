"""Claims about jobs whose collectives behave as NCCL's do, and about the device that imitates it.

An abort there raises nothing and leaves garbage, on which everything runs that was enqueued before.
"""

import json
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.adaptive_timeouts import patient
from tests.patient_cluster import PatientCluster
from tests.queued_device import ranks
from tests.queued_device.module import to_device
from tests.queued_device.queue import DEVICE
from tests.queued_device.schedules import SCRIPT, QueuedJob
from tests.queued_device.tensor import QueuedTensor, on_host
from tests.ranks import process_of


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> ranks.Shown:
    """The observations of rank 0 of two; rank 1 is lost at the end."""
    directory = tmp_path_factory.mktemp("ranks")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here, there = multiprocessing.Pipe()
    processes = [process_of(ranks.run, rank, directory, store.port, there) for rank in (0, 1)]
    for process in processes:
        process.start()
    try:
        assert here.poll(patient(60)), "rank 0 tells nothing"
        shown: ranks.Shown = here.recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
    return shown


def test_operations_are_computed_in_order_while_the_host_goes_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    expected = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    expected.load_state_dict(model.state_dict())
    to_device(model)
    inputs = torch.randn(4, 8)
    gate = multiprocessing.Event()
    DEVICE.enqueue(gate.wait)
    for trained, device_inputs in ((expected, inputs), (model, QueuedTensor(inputs.clone()))):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            trained(device_inputs).square().mean().backward()
            optimizer.step()
    versions = [parameter._version for parameter in model.parameters()]
    assert DEVICE.length > 100
    gate.set()
    copied = [torch.zeros_like(parameter) for parameter in expected.parameters()]
    torch._foreach_copy_(copied, [parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, copied, expected.parameters()))
    # Writes are counted when they are enqueued, as on a GPU.
    assert [parameter._version for parameter in model.parameters()] == versions


def test_what_an_operation_raises_is_raised_when_the_host_waits() -> None:
    broken = QueuedTensor(torch.zeros(1))
    DEVICE.enqueue(lambda: [].pop())
    assert on_host(broken + 1) is not None
    with pytest.raises(IndexError):
        DEVICE.synchronize()
    DEVICE.synchronize()


def test_construction_waits_for_all_ranks(shown: ranks.Shown) -> None:
    assert shown["constructor waits"] is True


def test_collective_returns_at_once_and_without_work(shown: ranks.Shown) -> None:
    assert shown["work"] is None
    assert shown["operations ahead"] == 2
    assert shown["doubled"] == [6.0] * 4
    assert shown["on the host"] == 2.0


def test_abort_may_leave_garbage_at_peers(shown: ranks.Shown) -> None:
    assert shown["garbage of a peer"] is True


def test_lost_peer_raises_nothing(shown: ranks.Shown) -> None:
    assert shown["operations that wait for the lost peer"] == 2


def test_abort_leaves_garbage_and_what_follows_runs_on_it(shown: ranks.Shown) -> None:
    assert shown["garbage of the abort"] is True


def test_collective_after_an_abort_raises(shown: ranks.Shown) -> None:
    assert str(shown["raised after the abort"]).startswith("DistBackendError: NCCL communicator")


@contextmanager
def queued_job(directory: Path, *, fence: bool = True) -> Iterator[QueuedJob]:
    log = directory / "log"
    log.mkdir()
    with PatientCluster(
        "job",
        [str(SCRIPT), json.dumps({"log": str(log), "fence": fence})],
        nnodes="2:2",
        workers=1,
        log=directory / "agents",
        last_call_s=60.0,
    ) as running:
        job = QueuedJob(running, log, patient(60))
        job.start()
        yield job
        job.finish()


def test_job_recovers_and_resumes_from_nothing_that_an_abort_left(tmp_path: Path) -> None:
    with queued_job(tmp_path) as job:
        outcome = job.outcome
        for kind, rank in (("kill", 0), ("lost", 0), ("slow", 1), ("lost", 1), ("entry", 1)):
            job.strike(kind, rank)
        # Who was only aborted goes on in the same process; "entry" ends both.
        assert outcome.replaced_processes == 5
        # A call that fails because its groups are aborted ends no process: only the killed worker's
        # is replaced.
        job.strike("build", 1)
        assert outcome.replaced_processes == 5 + 1
    assert (outcome.schedules, outcome.recovered) == (6, 6)
    assert (outcome.poisoned_sealed, outcome.poisoned_resumed) == (0, 0)


def test_without_the_fence_the_job_would_resume_from_garbage(tmp_path: Path) -> None:
    """The test above can fail: what it guards against is there."""
    with queued_job(tmp_path, fence=False) as job:
        for _ in range(10):
            # The leader may learn of the end before it learns of the last seal.
            job.strike("lost", 0)
            job.count_garbage()
            if job.outcome.poisoned_resumed:
                break
    assert job.outcome.poisoned_sealed > 0
    assert job.outcome.poisoned_resumed == 1
