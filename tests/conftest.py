"""Fixtures that start real things."""

from collections.abc import Iterator

import pytest

from elastic.store.embedded import EmbeddedEtcd


@pytest.fixture
def etcd_server() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server
