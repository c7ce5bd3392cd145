"""The preflight examination: each node tests itself, then all meet pairwise, and every one of them knows the outcome.

There is no coordinator. All doctors are given the same addresses; sorted, these are the participants of a round-robin
tournament, so each knows without a word whom it meets when. Of a pair the one with the lower place connects and measures. A
doctor lets itself be measured only in the round it is in, so nobody measures a peer that is busy with another. When all have
met, everybody asks everybody for what they found.

Owners: a `Doctor` owns its listening socket and the threads that serve it; leaving its context ends them.
"""

from __future__ import annotations

import operator
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from keepstep.monitor.errors import (
    MonitorError,
    MonitorUnreachable,
    ProtocolViolation,
    SecretDiffers,
)
from keepstep.monitor.preflight.judgement import NodeExamination, PreflightFinding, judge
from keepstep.monitor.preflight.link_probe import LinkResult, ProbeConnection
from keepstep.monitor.preflight.pairing import rounds
from keepstep.monitor.preflight.selftests import disk, matmuls, memory_rate

_GREETING_S = 5.0
_LINK_S = 60.0
_RETRY_S = 0.2
_LOOPBACK_ROUND = -1
_CLOSED, _DONE = -2, 1 << 30


@dataclass(frozen=True, slots=True)
class Participants:
    """Who takes part.

    Args:
        own: HOST:PORT under which the others know this doctor.
        addresses: all addresses, own among them, in the order that all agree on.
    """

    own: str
    addresses: tuple[str, ...]

    @classmethod
    def of(cls, own: str, peers: Sequence[str]) -> Participants:
        """Return the participants of this doctor and its peers."""
        return cls(own, tuple(sorted({own, *peers})))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all doctors found, and who is named."""

    examinations: tuple[NodeExamination, ...]
    missing: Mapping[str, str]
    findings: tuple[PreflightFinding, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON."""
        return {
            "nodes": [one.to_json() for one in self.examinations],
            "missing": dict(self.missing),
            "findings": [
                {"subject": one.subject, "what": one.what, "evidence": one.evidence}
                for one in self.findings
            ],
        }


class Doctor:
    """One node's doctor: listens while its context lasts, and examines."""

    def __init__(
        self, name: str, listen: tuple[str, int], secret: bytes, patience_s: float
    ) -> None:
        self._name = name
        self._listen = listen
        self._secret = secret
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._round = _LOOPBACK_ROUND
        self._measured: set[int] = set()
        self._connections: set[ProbeConnection] = set()
        self._result: dict[str, Any] | None = None
        self._asked_by: set[str] = set()

    def __enter__(self) -> Self:
        try:
            self._listener = socket.create_server(self._listen, backlog=128)
        except OSError as error:
            raise MonitorError(
                f"cannot listen on {self._listen[0]}:{self._listen[1]}: {error}"
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, name="doctor accepts")]
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._round = _CLOSED
            self._changed.notify_all()
            for line in self._connections:
                line.interrupt()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()  # From here on no thread is added.
        for thread in self._threads[1:]:
            thread.join()

    def examine(self, participants: Participants, directory: Path) -> Outcome:
        """Test this node, meet the others, and return what everybody found.

        Args:
            participants: who takes part.
            directory: where the disk is tested.
        """
        own = self._test_self(participants, directory)
        missing = self._wait_for(participants)
        own = self._probe_links(participants, own, missing)
        with self._changed:
            self._result = own.to_json()
            self._round = _DONE
            self._changed.notify_all()
        return self._gather(participants, own, missing)

    def _test_self(self, participants: Participants, directory: Path) -> NodeExamination:
        errors: dict[str, str] = {}
        written = None
        try:
            written = disk(directory)
        except OSError as error:
            errors["disk"] = f"{directory}: {error.strerror}"
        loopback: LinkResult | None = None
        host = "127.0.0.1" if self._listen[0] in ("", "0.0.0.0") else self._listen[0]
        try:
            loopback = self._measure((host, self.port), _LOOPBACK_ROUND)
        except (MonitorUnreachable, ProtocolViolation) as error:
            errors["loopback"] = str(error)
        return NodeExamination(
            participants.own, self._name, memory_rate(), written, matmuls(), loopback, {}, errors
        )

    def _wait_for(self, participants: Participants) -> dict[str, str]:
        """Wait until every peer answers; return those that never did, with the reason. Peers may be started minutes later."""
        deadline_s = time.monotonic() + self._patience_s
        waiting = [address for address in participants.addresses if address != participants.own]
        reasons: dict[str, str] = {}
        strangers: set[str] = set()
        while waiting:
            still = []
            for address in waiting:
                try:
                    self._ask(address, {"ask": "greeting"}, _GREETING_S)
                except SecretDiffers as error:
                    reasons[address] = str(error)
                    strangers.add(address)
                    still.append(address)
                except (MonitorUnreachable, ProtocolViolation) as error:
                    # A stranger that has given up does not answer any more, which is not what is the matter with it.
                    if address not in strangers:
                        reasons[address] = str(error)
                    still.append(address)
            waiting = still
            if time.monotonic() >= deadline_s:
                break
            if waiting:
                time.sleep(_RETRY_S)  # Nothing tells that a peer has begun to listen.
        return {address: reasons[address] for address in waiting}

    def _probe_links(
        self, participants: Participants, own: NodeExamination, missing: Mapping[str, str]
    ) -> NodeExamination:
        """Take part in every round."""
        place = participants.addresses.index(participants.own)
        links: dict[str, LinkResult] = {}
        errors = dict(own.errors)
        for number, pairs in enumerate(rounds(len(participants.addresses))):
            with self._changed:
                self._round = number
                self._changed.notify_all()
            pair = next((pair for pair in pairs if place in pair), None)
            if pair is None:
                continue
            partner = participants.addresses[pair[1] if place == pair[0] else pair[0]]
            if partner in missing:
                errors[partner] = missing[partner]
            elif place == pair[0]:
                try:
                    links[partner] = self._measure(_parse(partner), number)
                except (MonitorUnreachable, ProtocolViolation) as error:
                    errors[partner] = str(error)
            else:
                with self._changed:
                    self._changed.wait_for(
                        partial(operator.contains, self._measured, number), self._patience_s
                    )
        return replace(own, links=links, errors=errors)

    def _gather(
        self, participants: Participants, own: NodeExamination, missing: dict[str, str]
    ) -> Outcome:
        """Ask everybody for what they found, and stay until everybody has asked."""
        found = [own]
        present = [
            address
            for address in participants.addresses
            if address != participants.own and address not in missing
        ]
        for address in present:
            try:
                told = self._ask(
                    address, {"ask": "result", "from": participants.own}, self._patience_s
                )
                found.append(NodeExamination.from_json(told["result"]))
            except (MonitorUnreachable, ProtocolViolation) as error:
                missing[address] = str(error)
            except (KeyError, TypeError) as error:
                missing[address] = (
                    f"its result is not understood ({error}); install the same keepstep on all nodes"
                )
        with self._changed:
            asking = set(present) - set(missing)
            self._changed.wait_for(lambda: asking <= self._asked_by, self._patience_s)
        ordered = tuple(sorted(found, key=lambda one: participants.addresses.index(one.address)))
        return Outcome(ordered, missing, judge(ordered, missing))

    def _measure(self, address: tuple[str, int], number: int) -> LinkResult:
        line = ProbeConnection.connect(address, self._secret, _GREETING_S)
        try:
            line.send({"ask": "measure", "round": number})
            if line.receive(self._patience_s).get("ready") is not True:
                raise MonitorUnreachable(
                    f"the doctor at {line.peer} was not ready for round {number}"
                )
            return line.measure(_LINK_S)
        finally:
            line.close()

    def _ask(self, address: str, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        line = ProbeConnection.connect(_parse(address), self._secret, _GREETING_S)
        try:
            line.send(question)
            return line.receive(timeout_s)
        finally:
            line.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return  # Closed: the examination is over.
            line = ProbeConnection(connection, f"{address[0]}:{address[1]}")
            with self._changed:
                if self._round == _CLOSED:
                    line.close()
                    return
                self._connections.add(line)
                thread = threading.Thread(
                    target=self._serve, args=(line,), name=f"doctor serves {line.peer}"
                )
                self._threads = [known for known in self._threads if known.is_alive()] + [thread]
                thread.start()

    def _serve(self, line: ProbeConnection) -> None:
        try:
            line.authenticate(self._secret, b"answerer", b"caller", _GREETING_S)
            self._answer(line, line.receive(_GREETING_S))
        except (MonitorUnreachable, ProtocolViolation):
            pass  # The one who asked knows, and says so in its result.
        finally:
            with self._changed:
                self._connections.discard(line)
            line.close()

    def _answer(self, line: ProbeConnection, question: Mapping[str, Any]) -> None:
        match question:
            case {"ask": "greeting"}:
                line.send({"name": self._name})
            case {"ask": "measure", "round": int(number)}:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._round in (number, _CLOSED), self._patience_s
                    )
                    is_ready = self._round == number
                line.send({"ready": is_ready})
                try:
                    if is_ready:
                        line.answer(_LINK_S)
                finally:
                    with self._changed:
                        self._measured.add(number)
                        self._changed.notify_all()
            case {"ask": "result", "from": str(asking)}:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._result is not None or self._round == _CLOSED, self._patience_s
                    )
                    result = self._result
                line.send({"result": result})
                with self._changed:
                    self._asked_by.add(asking)
                    self._changed.notify_all()
            case _:
                raise ProtocolViolation(f"{line.peer} asks what no doctor asks")


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
