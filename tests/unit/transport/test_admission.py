"""Claims about which unauthenticated connections are kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.transport.admission import PendingConnections


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=40))
def test_at_most_the_limit_is_pending_and_the_oldest_goes_first(limit: int, adds: list[bool]):
    pending: PendingConnections[list[int]] = PendingConnections(limit)
    expected: list[list[int]] = []
    for number, is_add in enumerate(adds):
        if is_add:
            connection = [number]
            dropped = pending.add(connection)
            assert dropped is (expected.pop(0) if len(expected) == limit else None)
            expected.append(connection)
        elif expected:
            assert pending.discard(expected[-1])
            assert not pending.discard(expected.pop())
        assert len(pending) == len(expected) <= limit
