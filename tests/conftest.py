"""The etcd fixture, and the settings of property tests."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from keepstep.elastic.store.embedded import EmbeddedEtcd

# Every run draws the same examples, without a deadline; `HYPOTHESIS_PROFILE=explore` draws others.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


@pytest.fixture
def etcd_server() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server
