"""Makes the reader of checkpoints use a storage that a test has made."""

from __future__ import annotations

import pytest

from keepstep.checkpoint.stored import metadata, reader, steps
from keepstep.checkpoint.stored.storage import Storage


def read_from(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all URLs that are read from now on mean this storage."""
    for module in (metadata, reader, steps):
        monkeypatch.setattr(module, "open_storage", lambda url: storage)
