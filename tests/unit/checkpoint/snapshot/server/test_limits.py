import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.snapshot.server.limits import RateLimiter


@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.floats(0, 2)), max_size=30), st.integers(1, 10**6)
)
def test_bytes_moved_stay_within_the_rate(draws: list[tuple[int, float]], bytes_per_s: int) -> None:
    limiter, now_s, moved = RateLimiter(bytes_per_s), 0.0, 0
    for nbytes, later_s in draws:
        now_s += later_s
        start_s = now_s + limiter.reserve(nbytes, now_s)
        # All that was moved before this had its time.
        assert moved <= bytes_per_s * start_s * (1 + 1e-9) + 1e-3
        moved += nbytes


def test_a_pause_longer_than_the_reservation_ends_the_wait() -> None:
    limiter = RateLimiter(100)
    assert limiter.reserve(100, 10.0) == 0.0
    assert limiter.reserve(100, 10.25) == pytest.approx(0.75)
    assert limiter.reserve(1, 20.0) == 0.0


def test_without_a_limit_nothing_waits() -> None:
    limiter = RateLimiter(0)
    assert [limiter.reserve(10**12, 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
