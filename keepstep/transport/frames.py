"""Builds and checks frames, which a connection carries once its ends are authenticated. Pure.

    header (16) | body | tag (16) | payload | tag (16)

The header is, big-endian: magic (3), flags (1), body's length (4), payload's length (8). The first
tag covers header and body, the second one the payload; it is absent if there is no payload. The
body is an encoded message; the payload is bytes that go straight from and into callers' memory.
Without a key (on a socket pair that two processes inherited) the same frames have no tags.

Promises, with a key:
- The peer's `FrameSealer` has sealed whatever `FrameOpener` returns, in this order and on this
  connection: a frame that was forged, changed, repeated, dropped, reordered or taken from elsewhere
  raises FrameRejected. So does a payload, when its last byte has been covered: any use of payload
  bytes before that must be reversible.
- A length is limited before memory is taken for it, and memory grows only as bytes arrive.
- After an error an opener accepts nothing more.

The end of a connection between two frames proves nothing: anybody on the way can end it.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from enum import IntFlag

from keepstep.transport.codec import Buffer
from keepstep.transport.errors import (
    FrameRejected,
    MalformedMessage,
    MessageTooLarge,
    TransportError,
)
from keepstep.transport.keys import TAG_NBYTES, Gmac, GmacKey, Purpose

HEADER_NBYTES = 16

_HEADER = struct.Struct(">3sBIQ")
_MAGIC = b"KSF"
_STEP_NBYTES = 2**20


class FrameFlags(IntFlag):
    """Flags in a header."""

    NONE = 0
    TAGGED = 1
    """Tags follow."""
    DESCRIPTOR = 2
    """A file descriptor rides on the frame's first byte."""


# As plain numbers: every frame's are computed with, and arithmetic of enumerations is slow.
_TAGGED, _DESCRIPTOR = int(FrameFlags.TAGGED), int(FrameFlags.DESCRIPTOR)
_UNKNOWN_FLAGS = ~(_TAGGED | _DESCRIPTOR)


@dataclass(frozen=True, slots=True)
class FrameHead:
    """A frame without its payload, as received."""

    body: memoryview
    payload_nbytes: int
    has_descriptor: bool


class FrameSealer:
    """Builds the frames of one direction of one connection.

    Args:
        key: the direction's key; None for frames without tags.
        max_body_nbytes: the longest body.
    """

    def __init__(self, key: bytes | None, max_body_nbytes: int) -> None:
        self._key = None if key is None else GmacKey(key)
        self._max_body_nbytes = max_body_nbytes
        self._sequence = -1
        self._payload_mac: Gmac | None = None

    def seal_head(
        self, body: bytes, payload_nbytes: int = 0, flags: FrameFlags = FrameFlags.NONE
    ) -> list[bytes]:
        """Begin the next frame; return the bytes to send before its payload.

        Raises:
            MessageTooLarge: the body is too long. Nothing has begun.
        """
        if len(body) > self._max_body_nbytes:
            raise MessageTooLarge(
                f"a message of {len(body)} bytes exceeds the protocol's {self._max_body_nbytes}; "
                f"send less at once"
            )
        self._sequence += 1
        self._payload_mac = None
        if self._key is None:
            return [_HEADER.pack(_MAGIC, flags, len(body), payload_nbytes) + body]
        head = _HEADER.pack(_MAGIC, int(flags) | _TAGGED, len(body), payload_nbytes) + body
        if payload_nbytes:
            self._payload_mac = self._key.begin(Purpose.PAYLOAD, self._sequence)
        return [head, self._key.tag(Purpose.HEAD, self._sequence, head)]

    def cover(self, part: Buffer) -> None:
        """Cover the next bytes of the payload."""
        if self._payload_mac is not None:
            self._payload_mac.update(part)

    def seal_payload(self) -> bytes:
        """Return the bytes to send after the payload, which has been covered as a whole."""
        mac, self._payload_mac = self._payload_mac, None
        return b"" if mac is None else mac.tag()


class FrameOpener:
    """Opens the frames of one direction of one connection, as their bytes arrive.

    The shell receives at most `len(buffer())` bytes into `buffer()`, reports how many by `advance`,
    until that returns a head; then it receives the payload into memory of its own, calls `cover`
    for each part of it, and when `payload_left` is 0 gives the `payload_tag_nbytes` bytes that
    follow to `open_payload`.

    Args:
        key: the direction's key; None for frames without tags.
        max_body_nbytes: the longest body accepted.
        peer: the sender's name in errors.
    """

    def __init__(self, key: bytes | None, max_body_nbytes: int, peer: str) -> None:
        self._key = None if key is None else GmacKey(key)
        self._max_body_nbytes = max_body_nbytes
        self._peer = peer
        self._sequence = 0
        self._failure: TransportError | None = None
        self._payload_mac: Gmac | None = None
        self.payload_left = 0
        """Bytes of the current frame's payload that have not been covered yet."""
        # The frame whose head is being received; `_step` is the part of it that comes next.
        self._header = b""
        self._flags = 0
        self._body_nbytes = self._payload_nbytes = self._tag_nbytes = 0
        self._rest = bytearray()
        self._step, self._filled = bytearray(HEADER_NBYTES), 0

    @property
    def is_between_frames(self) -> bool:
        """Whether no incomplete frame has begun to arrive."""
        return not (self._header or self._filled or self.payload_left or self._payload_mac)

    @property
    def payload_tag_nbytes(self) -> int:
        """Number of bytes that follow the payload."""
        return 0 if self._payload_mac is None else TAG_NBYTES

    def buffer(self) -> memoryview:
        """Return the memory where the next bytes of a frame's head belong."""
        if self._failure is not None:
            raise self._failure
        assert not self.payload_left, "the payload of the last frame is not received yet"
        assert self._payload_mac is None, "the payload of the last frame is not opened yet"
        return memoryview(self._step)[self._filled :]

    def advance(self, nbytes: int) -> FrameHead | None:
        """Note that bytes have come into `buffer()`; return the frame's head once it is complete.

        Raises:
            FrameRejected: the tag is wrong.
            MalformedMessage: this is no frame, or too long a one.
        """
        self._filled += nbytes
        if self._filled < len(self._step):
            return None
        if not self._header:
            self._header = bytes(self._step)
            self._parse_header()
        else:
            self._rest += self._step
        left = self._body_nbytes + self._tag_nbytes - len(self._rest)
        self._step, self._filled = bytearray(min(left, _STEP_NBYTES)), 0
        return None if left else self._open_head()

    def cover(self, part: Buffer) -> None:
        """Cover the next bytes of the payload."""
        nbytes = memoryview(part).nbytes
        assert nbytes <= self.payload_left, "more than the payload was received"
        self.payload_left -= nbytes
        if self._payload_mac is not None:
            self._payload_mac.update(part)

    def open_payload(self, tag: Buffer) -> None:
        """Check the payload, which has been covered as a whole.

        Raises:
            FrameRejected: the tag is wrong: none of the payload may be used.
        """
        assert not self.payload_left, "the payload is not complete"
        mac, self._payload_mac = self._payload_mac, None
        if mac is not None and not mac.is_tag(tag):
            raise self._fail(
                FrameRejected(
                    f"{self._peer}: a payload was changed on the way; nothing of it is used"
                )
            )

    def _begin_head(self) -> None:
        self._header = b""
        self._rest = bytearray()
        self._step, self._filled = bytearray(HEADER_NBYTES), 0

    def _parse_header(self) -> None:
        magic, self._flags, self._body_nbytes, self._payload_nbytes = _HEADER.unpack(self._header)
        if magic != _MAGIC or self._flags & _UNKNOWN_FLAGS:
            raise self._fail(
                MalformedMessage(f"{self._peer}: what came is no frame of this transport")
            )
        is_tagged = bool(self._flags & _TAGGED)
        if is_tagged != (self._key is not None):
            raise self._fail(
                FrameRejected(
                    f"{self._peer}: sent a frame {'with a' if is_tagged else 'without'} tag on a "
                    f"connection {'without' if is_tagged else 'with'} keys"
                )
            )
        if self._body_nbytes > self._max_body_nbytes:
            raise self._fail(
                MalformedMessage(
                    f"{self._peer}: announced a message of {self._body_nbytes} bytes; the protocol "
                    f"allows {self._max_body_nbytes}"
                )
            )
        self._tag_nbytes = TAG_NBYTES if is_tagged else 0

    def _open_head(self) -> FrameHead:
        body, tag = memoryview(self._rest)[: self._body_nbytes], self._rest[self._body_nbytes :]
        if self._key is not None:
            expected = self._key.tag(Purpose.HEAD, self._sequence, self._header + body)
            if not hmac.compare_digest(expected, tag):
                raise self._fail(
                    FrameRejected(
                        f"{self._peer}: a frame was forged, changed, repeated or reordered on the "
                        f"way; the connection is not used any more"
                    )
                )
            if self._payload_nbytes:
                self._payload_mac = self._key.begin(Purpose.PAYLOAD, self._sequence)
        self._sequence += 1
        self.payload_left = self._payload_nbytes
        head = FrameHead(body, self._payload_nbytes, bool(self._flags & _DESCRIPTOR))
        self._begin_head()
        return head

    def _fail(self, error: TransportError) -> TransportError:
        self._failure = error
        return error
