"""Claims about frames: only what the peer sealed, in order and on this connection, is opened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.transport import FrameRejected, MalformedMessage, MessageTooLarge, TransportError
from keepstep.transport.frames import HEADER_NBYTES, FrameFlags, FrameOpener, FrameSealer

KEY = bytes(range(32))
LIMIT = 2**22


def sealed(sealer: FrameSealer, body: bytes, payload: bytes = b"") -> bytes:
    head = b"".join(sealer.seal_head(body, len(payload)))
    sealer.cover(payload)
    return head + payload + sealer.seal_payload()


def opened(opener: FrameOpener, data: bytes, step: int = 7) -> list[tuple[bytes, bytes]]:
    """Return the frames (body, payload) that the data holds, received `step` bytes at a time."""
    frames = []
    place = 0
    while place < len(data):
        buffer = opener.buffer()
        count = min(len(buffer), len(data) - place, step)
        buffer[:count] = data[place : place + count]
        place += count
        head = opener.advance(count)
        if head is None:
            continue
        payload = data[place : place + head.payload_nbytes]
        place += len(payload)
        opener.cover(payload)
        if opener.payload_left:
            break
        opener.open_payload(data[place : place + opener.payload_tag_nbytes])
        place += 16 if head.payload_nbytes and opener._key else 0
        frames.append((bytes(head.body), payload))
    return frames


FRAMES = st.lists(st.tuples(st.binary(max_size=100), st.binary(max_size=100)), max_size=5)


@given(FRAMES, st.sampled_from([KEY, None]), st.integers(1, 200))
def test_frames_survive_however_they_are_cut(
    frames: list[tuple[bytes, bytes]], key: bytes | None, step: int
):
    sealer, opener = FrameSealer(key, LIMIT), FrameOpener(key, LIMIT, "peer")
    data = b"".join(sealed(sealer, body, payload) for body, payload in frames)
    assert opened(opener, data, step) == frames
    assert opener.is_between_frames


def test_a_body_of_many_steps_survives():
    body = bytes(range(256)) * (3 * 2**20 // 256) + b"end"
    data = sealed(FrameSealer(KEY, LIMIT), body)
    assert opened(FrameOpener(KEY, LIMIT, "peer"), data, 2**20) == [(body, b"")]


@pytest.mark.parametrize("payload", [b"", b"payload"])
def test_every_changed_bit_is_rejected(payload: bytes):
    frame = sealed(FrameSealer(KEY, LIMIT), b'{"type":"Ask"}', payload)
    for bit in range(8 * len(frame)):
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        # More may follow, for a header that announces more.
        try:
            frames = opened(FrameOpener(KEY, LIMIT, "peer"), bytes(changed))
        except TransportError:
            continue
        assert frames == []
        assert 4 <= bit // 8 < 8, "only a longer length waits for more"


@given(st.data())
def test_replayed_dropped_and_reordered_frames_are_rejected(data: st.DataObject):
    sealer = FrameSealer(KEY, LIMIT)
    count = data.draw(st.integers(2, 5))
    frames = [sealed(sealer, b"same", b"payload") for _ in range(count)]
    order = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=2 * count))
    expected = 0
    while expected < len(order) and order[expected] == expected:
        expected += 1
    opener = FrameOpener(KEY, LIMIT, "peer")
    for number in order[:expected]:
        assert len(opened(opener, frames[number])) == 1
    if expected < len(order):
        with pytest.raises(FrameRejected):
            opened(opener, frames[order[expected]])


def test_a_frame_of_another_connection_or_direction_is_rejected():
    data = sealed(FrameSealer(bytes(32), LIMIT), b"body")
    with pytest.raises(FrameRejected):
        opened(FrameOpener(KEY, LIMIT, "peer"), data)


def test_a_payload_cannot_be_exchanged_for_another_frames():
    sealer = FrameSealer(KEY, LIMIT)
    first, second = sealed(sealer, b"a", b"one"), sealed(sealer, b"a", b"two")
    spliced = first[: -3 - 16] + second[-3 - 16 :]
    with pytest.raises(FrameRejected, match="payload"):
        opened(FrameOpener(KEY, LIMIT, "peer"), spliced)


def test_a_payloads_tag_is_no_heads_tag():
    head = FrameSealer(KEY, LIMIT).seal_head(b"body", 0)
    assert sealed(FrameSealer(KEY, LIMIT), b"x", head[0])[-16:] != head[1]


def test_a_cut_off_frame_is_not_returned():
    frame = sealed(FrameSealer(KEY, LIMIT), b"body", b"payload")
    for length in range(len(frame) - 16):
        assert opened(FrameOpener(KEY, LIMIT, "peer"), frame[:length]) == []


def test_tagged_and_untagged_ends_refuse_each_other():
    with pytest.raises(FrameRejected, match="without tag"):
        opened(FrameOpener(KEY, LIMIT, "peer"), sealed(FrameSealer(None, LIMIT), b"body"))
    with pytest.raises(FrameRejected, match="with a tag"):
        opened(FrameOpener(None, LIMIT, "peer"), sealed(FrameSealer(KEY, LIMIT), b"body"))


def test_an_opener_accepts_nothing_after_an_error():
    sealer, opener = FrameSealer(KEY, LIMIT), FrameOpener(KEY, LIMIT, "peer")
    frame = bytearray(sealed(sealer, b"body"))
    frame[-1] ^= 1
    for _ in range(2):
        with pytest.raises(FrameRejected):
            opened(opener, bytes(frame))


def test_too_long_messages_are_neither_sent_nor_received():
    sealer = FrameSealer(KEY, 10)
    with pytest.raises(MessageTooLarge, match="11 bytes"):
        sealer.seal_head(b"x" * 11)
    assert opened(FrameOpener(KEY, 10, "peer"), sealed(sealer, b"x" * 10))
    with pytest.raises(MalformedMessage, match="11 bytes"):
        opened(FrameOpener(KEY, 10, "peer"), sealed(FrameSealer(KEY, 11), b"x" * 11))


def test_memory_is_taken_only_as_bytes_arrive():
    opener = FrameOpener(KEY, 2**28, "peer")
    header = b"".join(FrameSealer(KEY, 2**28).seal_head(bytes(2**28)))[:HEADER_NBYTES]
    opener.buffer()[:] = header
    opener.advance(HEADER_NBYTES)
    assert len(opener.buffer()) <= 2**20


@given(st.binary(max_size=100), st.booleans(), st.sampled_from([KEY, None]))
def test_arbitrary_bytes_raise_nothing_but_transport_errors(
    noise: bytes, has_magic: bool, key: bytes | None
):
    opener = FrameOpener(key, 50, "peer")
    try:
        opened(opener, (b"KSF" if has_magic else b"") + noise)
    except TransportError:
        return


def test_descriptor_flag_is_covered():
    frame = bytearray(b"".join(FrameSealer(KEY, LIMIT).seal_head(b"body")))
    frame[3] |= FrameFlags.DESCRIPTOR
    with pytest.raises(FrameRejected):
        opened(FrameOpener(KEY, LIMIT, "peer"), bytes(frame))
