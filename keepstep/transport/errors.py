"""Defines the transport package's errors, whose messages name peer, event and remedy.

TransportError
├── PeerUnavailable          the peer does not answer, or the connection is gone
│   ├── PeerRefused          no process listens at the address
│   ├── PeerTimeout          the peer did not answer in time
│   └── ConnectionLost       the connection ended where the protocol expects more
├── AuthenticationFailed     the peer does not prove that it knows the job's secret
│   └── FrameRejected        a frame was forged, changed, repeated or reordered
├── VersionMismatch          the peer and this side have no protocol version in common
├── MalformedMessage      the peer's message does not fit the protocol └── MessageTooLarge
this side's message exceeds the protocol's limit; nothing was sent
"""

from __future__ import annotations

_MAX_QUOTED_CHARACTERS = 200


class TransportError(Exception):
    """Base of all errors that the transport package raises on purpose."""


class PeerUnavailable(TransportError):
    """The peer does not answer, or the connection to it is gone."""


class PeerRefused(PeerUnavailable):
    """The peer's host answers that no process listens at the address."""


class PeerTimeout(PeerUnavailable):
    """The peer did not answer in time. It may be alive."""


class ConnectionLost(PeerUnavailable):
    """The connection ended or broke where the protocol expects more."""


class AuthenticationFailed(TransportError):
    """The peer does not prove that it knows the job's secret.

    `peer_node` is the node that the peer claims to be, without proof; None if it claimed nothing.
    """

    def __init__(self, message: str, peer_node: str | None = None) -> None:
        super().__init__(message)
        self.peer_node = peer_node


class FrameRejected(AuthenticationFailed):
    """A frame's tag is wrong: it was forged, changed, repeated, reordered or spliced in."""


class VersionMismatch(TransportError):
    """The peer and this side have no protocol version in common.

    `peer_node` is the node that the peer claims to be, without proof.
    """

    def __init__(self, message: str, peer_node: str) -> None:
        super().__init__(message)
        self.peer_node = peer_node


class MalformedMessage(TransportError):
    """The peer's message does not fit the protocol.

    `field` is the path of the field that does not fit, as in `Seal.snapshot.step`; None if the
    bytes are no message at all. `peer_node` is the node that the peer claims to be, without proof,
    if a handshake named it.
    """

    def __init__(
        self, message: str, field: str | None = None, peer_node: str | None = None
    ) -> None:
        super().__init__(message)
        self.field = field
        self.peer_node = peer_node


class MessageTooLarge(TransportError):
    """This side's message exceeds the protocol's limit. Nothing was sent; the connection lives."""


def quote(text: str) -> str:
    """Return a peer's text in a form fit to show: printable and short, whatever the peer sent."""
    shown = "".join(
        c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:_MAX_QUOTED_CHARACTERS]
    )
    return shown if len(text) <= _MAX_QUOTED_CHARACTERS else f"{shown}..."
