"""Examines this node and its links before a job starts; every node learns the same outcome.

There is no coordinator. All doctors are given the same addresses; sorted, these are the
participants of a round-robin tournament: each doctor knows whom it measures when. In a pair, the
doctor with the lower place connects and measures. A doctor takes part in a measurement only in the
round that it is in, so that no busy node is measured. After the last round every doctor asks every
other one for what it measured.

Owners: a `Doctor` owns its listener and the threads that serve it; leaving its context ends them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from keepstep.monitor.errors import (
    MonitorError,
    MonitorUnreachable,
    ProtocolViolation,
    SecretDiffers,
)
from keepstep.monitor.preflight.examination import DiskResult, LinkResult, NodeExamination
from keepstep.monitor.preflight.judgement import PreflightFinding, judge
from keepstep.monitor.preflight.link_probe import answer_link_probe, expect, measure_link
from keepstep.monitor.preflight.messages import (
    PROTOCOL,
    Examined,
    GetExamination,
    Greet,
    Greeting,
    MeasureLink,
    Readiness,
    Reply,
    Request,
)
from keepstep.monitor.preflight.pairing import rounds
from keepstep.monitor.preflight.selftests import disk, matmuls, memory_rate
from keepstep.transport import (
    AuthenticationFailed,
    Connection,
    FrameRejected,
    Identity,
    Listener,
    MalformedMessage,
    PeerUnavailable,
    TransportError,
    connect,
    listen,
    tcp_address_of,
)
from keepstep.transport.addresses import host_and_port
from keepstep.transport.addresses import loopback as loopback_address

_GREETING_S = 5.0
_LINK_S = 60.0
_RETRY_S = 0.2
_LOOPBACK_ROUND = -1
_CLOSED, _DONE = -2, 1 << 30


@dataclass(frozen=True, slots=True)
class Participants:
    """The doctors that take part.

    Args:
        own: HOST:PORT under which the others reach this doctor.
        addresses: all addresses, own among them, in the order that all agree on.
    """

    own: str
    addresses: tuple[str, ...]

    @classmethod
    def of(cls, own: str, peers: Sequence[str]) -> Participants:
        """Return the participants of this doctor and its peers."""
        return cls(own, tuple(sorted({own, *peers})))

    @property
    def peers(self) -> tuple[str, ...]:
        """All addresses but the own one."""
        return tuple(address for address in self.addresses if address != self.own)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The measurements of all doctors, who is missing and why, and what needs attention."""

    examinations: tuple[NodeExamination, ...]
    missing: Mapping[str, str]
    findings: tuple[PreflightFinding, ...] = ()

    def to_json(self) -> Mapping[str, object]:
        """Return the outcome as a JSON object."""
        return {
            "nodes": [asdict(examination) for examination in self.examinations],
            "missing": dict(self.missing),
            "findings": [asdict(finding) for finding in self.findings],
        }


class Doctor:
    """One node's doctor: listens while its context lasts, and examines.

    Args:
        name: the node's name.
        address: host and port to listen on; port 0 takes a free one.
        secret: what all doctors of the job know.
        patience_s: how long it waits for peers to begin, and to answer.
    """

    def __init__(
        self, name: str, address: tuple[str, int], secret: bytes, patience_s: float
    ) -> None:
        self._name = name
        self._address = address
        self._secret = secret
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._round = _LOOPBACK_ROUND
        self._measured_rounds: set[int] = set()
        self._own_examination: NodeExamination | None = None
        self._asked_by: set[str] = set()

    def __enter__(self) -> Self:
        host, port = self._address
        try:
            self._identity = Identity(self._name, self._secret)
        except ValueError as error:
            raise MonitorError(str(error)) from error
        try:
            listening = listen(f"tcp:{host}:{port}")
        except (OSError, ValueError) as error:
            raise MonitorError(f"cannot listen on {host}:{port}: {error}") from error
        self.port = int(tcp_address_of(listening).rpartition(":")[2])
        self._listener = Listener([listening], PROTOCOL, self._identity, self._serve)
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enter_round(_CLOSED)
        self._listener.close()

    def examine(
        self,
        participants: Participants,
        directory: Path,
        report: Callable[[str], None] = lambda line: None,
    ) -> Outcome:
        """Test this node and its links, and return what all doctors measured.

        Args:
            participants: who takes part.
            directory: where the disk is tested.
            report: called with what begins, in words.
        """
        own = self._test_self(participants, directory, report)
        if participants.peers:
            report(f"waiting for {', '.join(participants.peers)}")
        missing = self._wait_for(participants)
        own = self._probe_links(participants, own, missing, report)
        with self._changed:
            self._own_examination = own
            self._round = _DONE
            self._changed.notify_all()
        return self._gather(participants, own, missing)

    def _test_self(
        self, participants: Participants, directory: Path, report: Callable[[str], None]
    ) -> NodeExamination:
        errors: dict[str, str] = {}
        report(f"testing the disk in {directory}")
        disk_result: DiskResult | None = None
        try:
            disk_result = disk(directory)
        except OSError as error:
            errors["disk"] = f"{directory}: {error.strerror}"
        report("testing connections within this node")
        loopback: LinkResult | None = None
        is_any = self._address[0] in ("", "0.0.0.0", "::")
        host = loopback_address() if is_any else self._address[0]
        try:
            loopback = self._measure(host_and_port(host, self.port), _LOOPBACK_ROUND)
        except (MonitorUnreachable, ProtocolViolation) as error:
            errors["loopback"] = str(error)
        report("testing the memory")
        own_memory_rate = memory_rate()
        report("testing products of matrices")
        return NodeExamination(
            address=participants.own,
            name=self._name,
            memory_rate=own_memory_rate,
            disk=disk_result,
            matmuls=matmuls(),
            loopback=loopback,
            errors=errors,
        )

    def _wait_for(self, participants: Participants) -> dict[str, str]:
        """Wait until every peer answers; return those that never did, with the reason.

        Peers may be started minutes later.
        """
        deadline_s = time.monotonic() + self._patience_s
        waiting = list(participants.peers)
        reasons: dict[str, str] = {}
        strangers: set[str] = set()
        while waiting:
            still_waiting = []
            for address in waiting:
                try:
                    self._greet(address)
                except SecretDiffers as error:
                    reasons[address] = str(error)
                    strangers.add(address)
                    still_waiting.append(address)
                except (MonitorUnreachable, ProtocolViolation) as error:
                    # A stranger that has stopped waiting answers no more, which is not its trouble.
                    if address not in strangers:
                        reasons[address] = str(error)
                    still_waiting.append(address)
            waiting = still_waiting
            if time.monotonic() >= deadline_s:
                break
            if waiting:
                time.sleep(_RETRY_S)  # Nothing signals that a peer has begun to listen.
        return {address: reasons[address] for address in waiting}

    def _probe_links(
        self,
        participants: Participants,
        own: NodeExamination,
        missing: Mapping[str, str],
        report: Callable[[str], None],
    ) -> NodeExamination:
        """Take part in every round; return the examination with its links."""
        place = participants.addresses.index(participants.own)
        links: dict[str, LinkResult] = {}
        errors = dict(own.errors)
        for number, pairs in enumerate(rounds(len(participants.addresses))):
            self._enter_round(number)
            pair = next((pair for pair in pairs if place in pair), None)
            if pair is None:
                continue
            measures = place == pair[0]
            partner = participants.addresses[pair[1] if measures else pair[0]]
            if partner not in missing:
                report(f"measuring the link to {partner}")
            if partner in missing:
                errors[partner] = missing[partner]
            elif measures:
                try:
                    links[partner] = self._measure(partner, number)
                except (MonitorUnreachable, ProtocolViolation) as error:
                    errors[partner] = str(error)
            else:
                self._wait_until_measured(number)
        return replace(own, links=links, errors=errors)

    def _gather(
        self, participants: Participants, own: NodeExamination, missing: dict[str, str]
    ) -> Outcome:
        """Ask every peer for what it measured, and stay until every peer has asked."""
        examinations = [own]
        present = [address for address in participants.peers if address not in missing]
        for address in present:
            try:
                examinations.append(self._get_examination(address, participants.own))
            except (MonitorUnreachable, ProtocolViolation) as error:
                missing[address] = str(error)
        with self._changed:
            asking = set(present) - set(missing)
            self._changed.wait_for(lambda: asking <= self._asked_by, self._patience_s)
        order = participants.addresses.index
        ordered = tuple(sorted(examinations, key=lambda one: order(one.address)))
        return Outcome(ordered, missing, judge(ordered, missing))

    def _enter_round(self, number: int) -> None:
        with self._changed:
            self._round = number
            self._changed.notify_all()

    def _wait_until_measured(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: number in self._measured_rounds, self._patience_s)

    def _greet(self, address: str) -> None:
        with self._connected(address, _GREETING_S) as connection:
            connection.send(Greet())
            expect(connection, Greeting)

    def _measure(self, address: str, number: int) -> LinkResult:
        with self._connected(address, self._patience_s) as connection:
            connection.send(MeasureLink(round=number))
            if not expect(connection, Readiness).is_ready:
                raise MonitorUnreachable(
                    f"the doctor at {address} was not ready for round {number}"
                )
            connection.set_idle_limit(_LINK_S)
            return measure_link(connection)

    def _get_examination(self, address: str, own_address: str) -> NodeExamination:
        with self._connected(address, self._patience_s) as connection:
            connection.send(GetExamination(address=own_address))
            examination = expect(connection, Examined).examination
        if examination is None:
            raise MonitorUnreachable(f"the doctor at {address} ended without an examination")
        if examination.address != address:
            raise ProtocolViolation(
                f"the doctor at {address} was started as {examination.address}; give it "
                f"--address {address}, and the same addresses to all doctors"
            )
        return examination

    @contextmanager
    def _connected(self, address: str, idle_s: float) -> Iterator[Connection[Request, Reply]]:
        """Connect to a doctor, and translate what goes wrong until the context ends.

        Args:
            address: HOST:PORT.
            idle_s: how long it waits while not a byte moves.

        Raises:
            SecretDiffers: the doctor does not know the secret.
            MonitorUnreachable: it does not answer, or the connection broke.
            ProtocolViolation: what it sent does not belong there.
        """
        try:
            connection = connect(
                f"tcp:{address}", PROTOCOL, self._identity, handshake_s=_GREETING_S, idle_s=idle_s
            )
        except AuthenticationFailed as error:
            raise SecretDiffers(
                f"the doctor at {address} does not know this job's secret"
            ) from error
        except PeerUnavailable as error:
            raise MonitorUnreachable(f"no doctor answers at {address}: {error}") from error
        except TransportError as error:
            raise ProtocolViolation(f"no doctor to talk to at {address}: {error}") from error
        with connection:
            try:
                yield connection
            except PeerUnavailable as error:
                raise MonitorUnreachable(
                    f"the doctor at {address} is gone or silent: {error}"
                ) from error
            except (FrameRejected, MalformedMessage) as error:
                raise ProtocolViolation(
                    f"what the doctor at {address} sent cannot be used: {error}"
                ) from error

    def _serve(self, connection: Connection[Reply, Request]) -> None:
        """Answer one client; errors end its connection, and it reports them itself."""
        connection.set_idle_limit(_GREETING_S)
        match connection.receive():
            case Greet():
                connection.send(Greeting(name=self._name))
            case MeasureLink(round=number):
                self._serve_measurement(connection, number)
            case GetExamination(address=address):
                self._serve_examination(connection, address)
            case None:
                return
            case request:
                raise MalformedMessage(
                    f"{connection.peer}: began with {type(request).__name__}, which is part of a "
                    f"measurement"
                )

    def _serve_measurement(self, connection: Connection[Reply, Request], number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._round in (number, _CLOSED), self._patience_s)
            is_ready = self._round == number
        try:
            connection.send(Readiness(is_ready=is_ready))
            if is_ready:
                connection.set_idle_limit(_LINK_S)
                answer_link_probe(connection)
        finally:
            with self._changed:
                self._measured_rounds.add(number)
                self._changed.notify_all()

    def _serve_examination(self, connection: Connection[Reply, Request], address: str) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._own_examination is not None or self._round == _CLOSED,
                self._patience_s,
            )
            examination = self._own_examination
        connection.send(Examined(examination=examination))
        with self._changed:
            self._asked_by.add(address)
            self._changed.notify_all()
