"""Claims about the digest of contents: who has FORMAT.md can compute it."""

from __future__ import annotations

import hashlib
import itertools
import uuid

import crc32c
import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint.format.layout.content_digest import DIGEST
from keepstep.checkpoint.format.stored import chunking
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage


def test_digest_is_what_the_format_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays with one chunk and with several; the last chunks reach over the edge."""
    monkeypatch.setattr(chunking, "CHUNK_NBYTES", 2**20)
    state = {"small": torch.arange(7.0), "large": torch.randn(1000, 777), "number": torch.ones(())}
    url = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(url, state, step=1)
    source = StoredCheckpoint.open(open_storage(url))
    total, chunks = 0, 0
    for key, tensor in state.items():
        grid = source.stored_tensors[key].chunk
        counts = [-(-n // extent) for n, extent in zip(tensor.shape, grid, strict=True)]
        for place in itertools.product(*map(range, counts)):
            box = tuple(slice(n * e, (n + 1) * e) for n, e in zip(place, grid, strict=True))
            crc = crc32c.crc32c(tensor[box].contiguous().numpy().tobytes())
            text = f"{key} {','.join(map(str, place))} {crc}"
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            total += int.from_bytes(digest, "big")
            chunks += 1
    assert chunks > 3, "there is an array of several chunks"
    assert source.documents[DIGEST] == {"chunks": f"{total % 2**64:016x}"}
