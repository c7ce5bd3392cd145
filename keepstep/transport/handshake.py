"""Authenticates both ends of a connection to each other. Pure: bytes in, bytes out.

    client                                server
    hello                          ->
                                   <-     hello
                                   <-     proof (when the server knows the secret)
    proof                          ->
    frames                         <->    frames

Each end proves that it knows the job's secret by an HMAC over the transcript (both hellos), with a
key that is derived from the secret and both nonces; the frames' keys are derived likewise (`keys`).

Promises:
- An end that completes the handshake talks to an end that knows the secret and saw the same two
  hellos: the same roles, protocol, version ranges, nodes and nonces. Nothing in them can be changed
  on the way, so a version cannot be forced down.
- The roles are part of the transcript and of each proof, so a proof cannot be sent back to its
  maker. Proofs can be relayed, but a relay learns no key and can forge no frame.
- An end reads at most `MAX_HELLO_NBYTES` and a proof before the peer is authenticated.

The node names are claims within the job: any process that knows the secret can claim any name. The
server sends its name before it has authenticated the client, so that agents learn the node at a
port.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from keepstep.transport import hello as hellos
from keepstep.transport.errors import (
    AuthenticationFailed,
    MalformedMessage,
    TransportError,
    VersionMismatch,
)
from keepstep.transport.hello import Hello
from keepstep.transport.keys import PROOF_NBYTES, ConnectionKeys, KeySchedule
from keepstep.transport.protocol import Role, Side, check_secret

NONCE_NBYTES = hellos.NONCE_NBYTES


@dataclass(frozen=True, slots=True)
class AuthenticatedPeer:
    """The result of a completed handshake.

    Args:
        node: the peer's node.
        version: the protocol version to speak.
        keys: the keys of the connection's frames.
    """

    node: str
    version: int
    keys: ConnectionKeys


class _State(Enum):
    PREFIX = auto()
    HELLO = auto()
    SECRET = auto()
    PROOF = auto()
    COMPLETE = auto()
    REFUSED = auto()


class Handshake:
    """One end's state. The shell sends the results of `start`, `receive` and `provide_secret`.

    Args:
        side: the protocol, as this end sees it.
        node: this end's node.
        secret: the job's secret; None if it will be given to `provide_secret`, or never.
        nonce: `NONCE_NBYTES` random bytes that were never used before.
        peer: the other end's name in errors.
    """

    def __init__(
        self, side: Side[Any, Any], node: str, secret: bytes | None, nonce: bytes, peer: str
    ) -> None:
        if secret is not None:
            check_secret(secret)
        self._own = Hello(side.role, side.protocol, side.versions, node, nonce)
        self._own_bytes = self._own.encode()
        self._secret = secret
        self._peer = peer
        self._state = _State.PREFIX
        self._prefix = b""
        self._wanted_nbytes = hellos.PREFIX_NBYTES
        self._version = 0
        self._transcript = b""
        self._salt = b""
        self._schedule: KeySchedule | None = None
        self.peer_hello: Hello | None = None
        """The other end's claims, once it has sent them; not authenticated until `result` is
        there."""
        self.refusal: TransportError | None = None
        """Why the peer is refused, once it is. AuthenticationFailed: it does not know the secret.
        VersionMismatch: no version in common. MalformedMessage: another protocol, or none."""

    @property
    def wanted_nbytes(self) -> int:
        """Number of bytes that `receive` takes next; 0 if it waits for no bytes."""
        return self._wanted_nbytes

    @property
    def needs_secret(self) -> bool:
        """Whether it waits for `provide_secret`."""
        return self._state is _State.SECRET

    @property
    def result(self) -> AuthenticatedPeer | None:
        """The handshake's result, once both ends are authenticated."""
        if self._state is not _State.COMPLETE:
            return None
        assert self.peer_hello is not None
        assert self._schedule is not None
        keys = self._schedule.keys(self._own.role)
        return AuthenticatedPeer(self.peer_hello.node, self._version, keys)

    def start(self) -> bytes:
        """Return the bytes to send first: the client speaks first."""
        return self._own_bytes if self._own.role is Role.CLIENT else b""

    def receive(self, data: bytes) -> bytes:
        """Take the `wanted_nbytes` bytes that came next; return the bytes to send, if any.

        They are sent even if the peer is refused, so that it learns why; the shell then raises
        `refusal`.
        """
        if not data or len(data) != self._wanted_nbytes:
            raise ValueError(f"{len(data)} bytes were given, {self._wanted_nbytes} are wanted")
        state = self._state
        self._expect(_State.REFUSED, 0)
        try:
            match state:
                case _State.PREFIX:
                    self._prefix = data
                    self._expect(_State.HELLO, hellos.remaining_nbytes(data, self._peer))
                    return b""
                case _State.HELLO:
                    return self._receive_hello(data)
                case _:
                    return self._receive_proof(data)
        except TransportError as error:
            self.refusal = error
            # The client learns from this hello why it is refused; it contains no secret.
            is_answer = state is _State.HELLO and self._own.role is Role.SERVER
            return self._own_bytes if is_answer else b""

    def provide_secret(self, secret: bytes) -> bytes:
        """Go on with the secret, which a server did not know yet; return the bytes to send."""
        if self._state is not _State.SECRET:
            raise ValueError("the handshake does not wait for a secret")
        check_secret(secret)
        self._secret = secret
        return self._begin_proofs()

    def _expect(self, state: _State, nbytes: int) -> None:
        self._state, self._wanted_nbytes = state, nbytes

    def _receive_hello(self, body: bytes) -> bytes:
        peer_hello = hellos.decode(body, self._peer)
        self.peer_hello = peer_hello
        self._version = _negotiate(self._own, peer_hello, self._peer)
        theirs = self._prefix + body
        if self._own.role is Role.CLIENT:
            self._transcript = self._own_bytes + theirs
            self._salt = self._own.nonce + peer_hello.nonce
        else:
            self._transcript = theirs + self._own_bytes
            self._salt = peer_hello.nonce + self._own.nonce
        answer = self._own_bytes if self._own.role is Role.SERVER else b""
        if self._secret is None:
            self._expect(_State.SECRET, 0)
            return answer
        return answer + self._begin_proofs()

    def _begin_proofs(self) -> bytes:
        """The server proves first; the client answers the proof that it has checked."""
        assert self._secret is not None
        self._schedule = KeySchedule(self._secret, self._salt, self._transcript)
        self._expect(_State.PROOF, PROOF_NBYTES)
        return self._schedule.proof(Role.SERVER) if self._own.role is Role.SERVER else b""

    def _receive_proof(self, proof: bytes) -> bytes:
        assert self._schedule is not None
        assert self.peer_hello is not None
        if not self._schedule.is_proof(proof, self._own.role.other):
            raise AuthenticationFailed(
                f"{self._peer}: claims to be node {self.peer_hello.node} and does not know this "
                f"job's secret: it is another job's {self._own.role.other.value}, or has started "
                "again and not yet joined",
                self.peer_hello.node,
            )
        self._expect(_State.COMPLETE, 0)
        return self._schedule.proof(Role.CLIENT) if self._own.role is Role.CLIENT else b""


def _negotiate(own: Hello, other: Hello, peer: str) -> int:
    """Return the version that both ends speak."""
    if other.role is own.role:
        raise MalformedMessage(
            f"{peer}: is a {other.role.value} like this end; connect a client to a server",
            "hello.role",
            other.node,
        )
    if other.protocol != own.protocol:
        raise MalformedMessage(
            f"{peer}: node {other.node} speaks the {other.protocol} protocol there, this side the "
            f"{own.protocol} protocol; check the address",
            "hello.protocol",
            other.node,
        )
    version = own.versions.highest_common(other.versions)
    if version is None:
        older = other.node if other.versions.newest < own.versions.oldest else own.node
        raise VersionMismatch(
            f"{peer}: node {other.node} speaks {other.versions} of the {own.protocol} protocol, "
            f"this node {own.node} speaks {own.versions}; upgrade keepstep on node {older}",
            other.node,
        )
    return version
