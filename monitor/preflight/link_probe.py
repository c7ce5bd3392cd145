"""Two doctors on a wire: they prove that they know the job's secret, then measure latency, clock offset and bandwidth both
ways.

Messages are JSON objects after a length of four bytes, big-endian; nothing is executable. Blocking sockets, for what is
measured is what threads of a training job would get. The one who connects measures; the other only answers.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from keepstep.monitor.errors import MonitorUnreachable, ProtocolViolation, SecretDiffers
from keepstep.monitor.secret import DOCTOR, bearer_token

_LENGTH = struct.Struct(">I")
_WALL = struct.Struct(">d")
_NONCE_NBYTES = 32
_MOST_NBYTES = 1 << 26
_CHUNK = bytearray(1 << 20)
PINGS = 100
TRANSFER_NBYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class LinkResult:
    """What one link does.

    Args:
        latency_s: there and back, the median.
        send_rate: bytes a second from who measured to the other.
        receive_rate: and back.
        clock_offset_s: the other's wall clock minus ours, at the quickest ping.
        clock_error_s: half of that ping's time: how far that may be off.
    """

    latency_s: float
    send_rate: float
    receive_rate: float
    clock_offset_s: float
    clock_error_s: float


class ProbeConnection:
    """A connection between doctors. `close` ends it."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self._socket = connection

    @classmethod
    def connect(cls, address: tuple[str, int], secret: bytes, timeout_s: float) -> ProbeConnection:
        """Connect and authenticate both ways.

        Raises:
            MonitorUnreachable: nobody answers in time.
            SecretDiffers: the other does not know the secret.
        """
        peer = f"{address[0]}:{address[1]}"
        try:
            line = cls(socket.create_connection(address, timeout=timeout_s), peer)
        except OSError as error:
            raise MonitorUnreachable(f"no doctor answers at {peer}: {error}") from error
        try:
            line.authenticate(secret, b"caller", b"answerer", timeout_s)
        except BaseException:
            line.close()
            raise
        return line

    def authenticate(self, secret: bytes, us: bytes, them: bytes, timeout_s: float) -> None:
        """Exchange nonces, then proofs; roles are part of what is proved, so no proof can be sent back to its maker.

        Raises:
            MonitorUnreachable: the other says nothing.
            SecretDiffers: it does not know the secret.
        """
        key = bearer_token(secret, DOCTOR).encode()
        self._socket.settimeout(timeout_s)
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        try:
            self._socket.sendall(nonce)
            theirs = self._receive_exactly(_NONCE_NBYTES)
            self._socket.sendall(_proof(key, us, theirs))
            proof = self._receive_exactly(hashlib.sha256().digest_size)
        except OSError as error:
            raise MonitorUnreachable(f"the doctor at {self.peer} did not greet: {error}") from error
        if not hmac.compare_digest(proof, _proof(key, them, nonce)):
            raise SecretDiffers(f"the doctor at {self.peer} does not know this job's secret")

    def send(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            MonitorUnreachable: the connection broke.
        """
        body = json.dumps(message).encode()
        try:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise MonitorUnreachable(f"the doctor at {self.peer} is gone: {error}") from error

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Receive one message.

        Raises:
            MonitorUnreachable: the connection broke, or nothing came in time.
            ProtocolViolation: what came is no message.
        """
        self._socket.settimeout(timeout_s)
        try:
            (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
            if length > _MOST_NBYTES:
                raise ProtocolViolation(
                    f"{self.peer} sends a message of {length} bytes; is it a doctor?"
                )
            told = json.loads(self._receive_exactly(length))
        except OSError as error:
            raise MonitorUnreachable(
                f"the doctor at {self.peer} is gone or silent: {error}"
            ) from error
        except ValueError as error:
            raise ProtocolViolation(f"{self.peer} sends what is no message: {error}") from error
        if not isinstance(told, dict):
            raise ProtocolViolation(f"{self.peer} sends what is no message")
        return told

    def measure(self, timeout_s: float) -> LinkResult:
        """Measure the link; the other runs `answer` meanwhile.

        Raises:
            MonitorUnreachable: the link broke or was too slow for the time.
        """
        self._socket.settimeout(timeout_s)
        try:
            pings = [self._ping() for _ in range(PINGS)]
            began_s = time.perf_counter()
            self._send_bulk(TRANSFER_NBYTES)
            self._receive_exactly(1)
            sent_s = time.perf_counter() - began_s
            began_s = time.perf_counter()
            self._receive_bulk(TRANSFER_NBYTES)
            received_s = time.perf_counter() - began_s
        except OSError as error:
            raise MonitorUnreachable(
                f"the link to {self.peer} failed while it was measured: {error}"
            ) from error
        quickest_s, offset_s = min(pings)
        return LinkResult(
            sorted(pings)[PINGS // 2][0],
            TRANSFER_NBYTES / sent_s,
            TRANSFER_NBYTES / received_s,
            offset_s,
            quickest_s / 2,
        )

    def answer(self, timeout_s: float) -> None:
        """Do the other side's part of `measure`.

        Raises:
            MonitorUnreachable: the link broke or was too slow for the time.
        """
        self._socket.settimeout(timeout_s)
        try:
            for _ in range(PINGS):
                self._receive_exactly(1)
                self._socket.sendall(_WALL.pack(time.time()))
            self._receive_bulk(TRANSFER_NBYTES)
            self._socket.sendall(b"!")
            self._send_bulk(TRANSFER_NBYTES)
        except OSError as error:
            raise MonitorUnreachable(
                f"the link from {self.peer} failed while it was measured: {error}"
            ) from error

    def interrupt(self) -> None:
        """Make what blocks on this line in another thread end."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # It had ended already.

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _ping(self) -> tuple[float, float]:
        """Return the seconds there and back, and the other's clock minus ours, as if both ways took equally long."""
        wall_s, began_s = time.time(), time.perf_counter()
        self._socket.sendall(b"?")
        (theirs_s,) = _WALL.unpack(self._receive_exactly(_WALL.size))
        took_s = time.perf_counter() - began_s
        return took_s, theirs_s - (wall_s + took_s / 2)

    def _send_bulk(self, nbytes: int) -> None:
        for _ in range(nbytes // len(_CHUNK)):
            self._socket.sendall(_CHUNK)

    def _receive_bulk(self, nbytes: int) -> None:
        into = memoryview(bytearray(len(_CHUNK)))
        left = nbytes
        while left:
            count = self._socket.recv_into(into[: min(left, len(into))])
            if not count:
                raise ConnectionError("the connection ended early")
            left -= count

    def _receive_exactly(self, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        view = memoryview(buffer)
        filled = 0
        while filled < nbytes:
            count = self._socket.recv_into(view[filled:])
            if not count:
                raise ConnectionError("the connection ended early")
            filled += count
        return bytes(buffer)


def _proof(key: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.new(key, role + b" " + nonce, hashlib.sha256).digest()
