"""Claims about copies by stores that bypass the caches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.live import streaming_copy
from keepstep.checkpoint.live.streaming_copy import copy_tensors

needs_kernel = pytest.mark.skipif(
    streaming_copy._tables() is None, reason="no kernel for this processor"
)
MIB = 2**20


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of what is streamed, as it is."""
    sizes: list[int] = []
    stream = streaming_copy._stream

    def counted(target: torch.Tensor, source: torch.Tensor) -> int:
        sizes.append(stream(target, source))
        return sizes[-1]

    monkeypatch.setattr(streaming_copy, "_stream", counted)
    # On a machine that is overloaded copies are late, and the rest is copied in one call.
    monkeypatch.setattr(streaming_copy, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    return sizes


@given(
    st.lists(
        st.tuples(
            st.integers(0, 700),
            st.sampled_from([0, 1, 4, 16, 32, 64]),
            st.sampled_from([0, 2, 16, 32]),
        ),
        max_size=6,
    ),
    st.sampled_from([96, 2**30]),
)
def test_every_byte_of_a_target_and_no_other_is_written(
    pairs: list[tuple[int, int, int]], most_nbytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming_copy, "_LEAST_NBYTES", 64)
        patch.setattr(streaming_copy, "_MOST_NBYTES", most_nbytes)
        sources, arenas, targets = [], [], []
        for nbytes, source_offset, target_offset in pairs:
            sources.append(random_bytes(source_offset + nbytes)[source_offset:])
            arenas.append(random_bytes(target_offset + nbytes + 64))
            targets.append(arenas[-1][target_offset : target_offset + nbytes])
        before = [arena.clone() for arena in arenas]
        copy_tensors(targets, sources)
        for (nbytes, _, offset), arena, old, source in zip(
            pairs, arenas, before, sources, strict=True
        ):
            expected = torch.cat([old[:offset], source, old[offset + nbytes :]])
            assert torch.equal(arena, expected)


@needs_kernel
def test_large_tensors_are_streamed_but_for_their_last_bytes(streamed: list[int]) -> None:
    sources = [
        torch.randn(MIB // 4),
        torch.randn(MIB // 4 + 1),
        torch.randn(MIB // 4 - 1),
        torch.randn(512, 1024).t(),
        torch.randn(MIB // 4).to(torch.bfloat16).repeat(2),
        torch.randn(MIB // 4 + 1)[1:],
        torch.view_as_complex(torch.randn(MIB // 4, 2)).conj(),
    ]
    targets = [torch.empty(source.shape, dtype=source.dtype) for source in sources]
    copy_tensors(targets, sources)
    assert all(map(torch.equal, targets, sources))
    assert streamed == [MIB, MIB, MIB]


class Subclass(torch.Tensor):
    """May have other memory than it seems, or none."""


@needs_kernel
def test_what_may_have_no_memory_of_its_own_is_not_streamed(streamed: list[int]) -> None:
    source = torch.randn(MIB)
    target = torch.empty_like(source)
    copy_tensors([target], [source.as_subclass(Subclass)])
    assert torch.equal(target, source)
    assert streamed == []


@needs_kernel
def test_after_a_wait_for_the_gil_the_rest_is_copied_in_one_call(
    monkeypatch: pytest.MonkeyPatch, streamed: list[int]
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(streaming_copy, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    sources = [torch.randn(MIB // 4) for _ in range(12)]
    targets = [torch.empty_like(source) for source in sources]
    stream = streaming_copy._stream

    def late(target: torch.Tensor, source: torch.Tensor) -> int:
        # The ninth one takes 5 ms longer than it may; those before are as slow as they may be.
        now_s[0] += MIB / 1e9 + (0.0051 if len(streamed) == 8 else 0.0)
        return stream(target, source)

    monkeypatch.setattr(streaming_copy, "_stream", late)
    copy_tensors(targets, sources)
    assert all(map(torch.equal, targets, sources))
    assert streamed == [MIB] * 9


@pytest.mark.parametrize("lacks", ["processor", "library"])
def test_without_the_kernel_pytorch_copies(
    monkeypatch: pytest.MonkeyPatch, streamed: list[int], lacks: str
) -> None:
    def missing() -> None:
        raise CheckpointError("ISA-L is not installed")

    if lacks == "processor":
        monkeypatch.setattr(streaming_copy.platform, "machine", lambda: "aarch64")
    else:
        monkeypatch.setattr(streaming_copy, "isal", missing)
    streaming_copy._tables.cache_clear()
    try:
        source = torch.randn(MIB)
        target = torch.empty_like(source)
        copy_tensors([target], [source])
    finally:
        streaming_copy._tables.cache_clear()
    assert torch.equal(target, source)
    assert streamed == []
