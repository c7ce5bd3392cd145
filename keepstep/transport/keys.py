"""Derives a connection's keys from the job's secret, and computes tags with them.

Sources: HKDF-SHA256 of RFC 5869 derives the keys; AES-256-GMAC (GCM over additional data only,
NIST SP 800-38D) computes the tags, whose nonces are never used twice with a key: each is a purpose
and a sequence number.

The traffic is authenticated, not encrypted, and there is no forward secrecy: an attacker who learns
the job's secret later can forge only on connections that are still open, for both nonces are fresh.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, field
from enum import IntEnum

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from keepstep.transport.codec import Buffer
from keepstep.transport.protocol import Role

KEY_NBYTES = 32
TAG_NBYTES = 16
PROOF_NBYTES = hashlib.sha256().digest_size

_LABEL = b"keepstep transport 1: "
_GMAC_NONCE = struct.Struct(">IQ")


class Purpose(IntEnum):
    """The purpose of a tag. Tags of different purposes never share a GMAC nonce."""

    HEAD = 0
    PAYLOAD = 1


@dataclass(frozen=True, slots=True)
class ConnectionKeys:
    """The keys of one connection as one end sees them: they differ by direction."""

    send: bytes | None = field(repr=False)
    receive: bytes | None = field(repr=False)


NO_KEYS = ConnectionKeys(None, None)
"""Keys for a socket pair that two processes inherited: its frames have no tags."""


class KeySchedule:
    """Derives one handshake's keys and proofs from the secret and the transcript.

    Args:
        secret: the job's secret.
        salt: both nonces, the client's first.
        transcript: both hellos as they were sent, the client's first. The hellos carry their own
            length, so no two pairs of hellos have the same transcript.
    """

    def __init__(self, secret: bytes, salt: bytes, transcript: bytes) -> None:
        self._secret = secret
        self._salt = salt
        self._digest = hashlib.sha256(transcript).digest()
        self._confirmation_key = self._derive(b"confirm")

    def proof(self, role: Role) -> bytes:
        """Return the proof that the end with this role knows the secret and saw both hellos."""
        text = role.value.encode() + b" " + self._digest
        return hmac.new(self._confirmation_key, text, hashlib.sha256).digest()

    def is_proof(self, proof: bytes, role: Role) -> bool:
        """Return whether these bytes prove the end with this role; takes constant time."""
        return hmac.compare_digest(proof, self.proof(role))

    def keys(self, role: Role) -> ConnectionKeys:
        """Return the keys that the end with this role sends and receives with."""
        return ConnectionKeys(self._key_of(role), self._key_of(role.other))

    def _key_of(self, sender: Role) -> bytes:
        return self._derive(b"frames of the " + sender.value.encode())

    def _derive(self, purpose: bytes) -> bytes:
        info = _LABEL + purpose + b" " + self._digest
        return HKDF(SHA256(), KEY_NBYTES, salt=self._salt, info=info).derive(self._secret)


class GmacKey:
    """Computes tags with one key.

    Args:
        key: the key of one direction of one connection.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher = AESGCM(key)

    def begin(self, purpose: Purpose, sequence: int) -> Gmac:
        """Begin a tag over data that comes in parts; arguments as for `Gmac`."""
        return Gmac(self._key, purpose, sequence)

    def tag(self, purpose: Purpose, sequence: int, data: bytes) -> bytes:
        """Return the tag of complete data in one call.

        It equals the tag by way of `begin`, in a seventh of the time for a short message.
        """
        return self._cipher.encrypt(_GMAC_NONCE.pack(purpose, sequence), b"", data)


class Gmac:
    """Computes or checks one tag over data that comes in parts.

    Args:
        key: the key of one direction of one connection.
        purpose: of the tag.
        sequence: the number of the frame in that direction; with the purpose it is used once.
    """

    def __init__(self, key: bytes, purpose: Purpose, sequence: int) -> None:
        nonce = _GMAC_NONCE.pack(purpose, sequence)
        # Without ciphertext, a tag is checked by computing it as the sender does, and comparing.
        self._context = Cipher(algorithms.AES(key), modes.GCM(nonce)).encryptor()

    def update(self, data: Buffer) -> None:
        """Cover more data."""
        self._context.authenticate_additional_data(data)

    def tag(self) -> bytes:
        """Return the tag of all data covered. Called once, last."""
        self._context.finalize()
        return self._context.tag

    def is_tag(self, tag: Buffer) -> bool:
        """Return whether this is the tag of all data, in constant time. Called once, last."""
        return hmac.compare_digest(self.tag(), tag)
