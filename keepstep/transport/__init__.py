"""Connects keepstep's processes: one framing, one mutually authenticated handshake, one codec."""

from keepstep.transport.addresses import listen, parse_address, socket_name, tcp_address_of
from keepstep.transport.blocking_handshake import accept, connect
from keepstep.transport.codec import Codec, Message
from keepstep.transport.connection import Connection, FileRange
from keepstep.transport.errors import (
    AuthenticationFailed,
    ConnectionLost,
    FrameRejected,
    MalformedMessage,
    MessageTooLarge,
    PeerRefused,
    PeerTimeout,
    PeerUnavailable,
    TransportError,
    VersionMismatch,
)
from keepstep.transport.listener import Listener
from keepstep.transport.protocol import Identity, Protocol, Side, VersionRange
from keepstep.transport.stream_handshake import accept_stream, identify, open_stream
from keepstep.transport.stream_listener import StreamListener
from keepstep.transport.streams import StreamConnection

__all__ = [
    "AuthenticationFailed",
    "Codec",
    "Connection",
    "ConnectionLost",
    "FileRange",
    "FrameRejected",
    "Identity",
    "Listener",
    "MalformedMessage",
    "Message",
    "MessageTooLarge",
    "PeerRefused",
    "PeerTimeout",
    "PeerUnavailable",
    "Protocol",
    "Side",
    "StreamConnection",
    "StreamListener",
    "TransportError",
    "VersionMismatch",
    "VersionRange",
    "accept",
    "accept_stream",
    "connect",
    "identify",
    "listen",
    "open_stream",
    "parse_address",
    "socket_name",
    "tcp_address_of",
]
