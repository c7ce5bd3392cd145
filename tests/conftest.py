"""The etcd fixture, the order of tests, their threads and memory, and how properties are tested."""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from keepstep.elastic.store.address import Access, Address
from keepstep.elastic.store.credentials import coordinator_secret
from keepstep.elastic.store.embedded import EmbeddedEtcd

# Tests, and the nodes and ranks that they start, share the machine's cores. Where each process
# computes with a thread per core, threads spend most of their time waiting in a loop for others
# that are not running: a job of two nodes took twice the processor time. PyTorch reads it later.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A run that fails leaves nothing in memory, but where a test asks for it.
os.environ["PET_KEEP_STATE"] = "0"

# PyTorch and the tests are a million objects that stay. Each full garbage collection, of which the
# trainer makes one whenever it leaves a generation, would look through all of them.
gc.disable()

# Every run draws the same examples, without a deadline; `HYPOTHESIS_PROFILE=explore` draws others,
# and more where a test says how many (`tests.examples`). `make check` draws the first few.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("quick", settings.get_profile("steady"), max_examples=20)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: begun last, it would be waited for alone."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Let garbage collections look at what tests make, and not at what was there before."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def etcd_server() -> Iterator[EmbeddedEtcd]:
    """An etcd as `keepstep run` starts it, for clients of this user."""
    secret = coordinator_secret(Address(("127.0.0.1:0",), Access.SECRET), os.environ)
    with EmbeddedEtcd(secret) as server:
        yield server
