"""Fixtures that start real things, and how property tests draw."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from keepstep.elastic.store.embedded import EmbeddedEtcd

# The same examples at every run, however slow the machine is; `HYPOTHESIS_PROFILE=explore` draws others.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


@pytest.fixture
def etcd_server() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server
