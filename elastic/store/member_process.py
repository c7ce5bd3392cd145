"""Runs this node's member of a coordinator that keepstep starts on several nodes.

`keepstep.elastic.store.members` decides; this module looks at the members, starts and ends etcd,
and changes the list of members. A member is seen through its ports alone: that for other members
answers as soon as the process lives, that for clients once an etcd works.

The data lies in the user's runtime directory until the member is closed, so that an agent that was
killed goes on with it. etcd does not wait for the disk, so data from before the machine last
started is not used: some of it may be missing.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import ssl
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import msgspec

from keepstep.elastic.errors import UsageError
from keepstep.elastic.store.address import Access
from keepstep.elastic.store.certificates import SERVER_NAME, issue
from keepstep.elastic.store.credentials import Credentials
from keepstep.elastic.store.embedded import (
    AUTHORITY,
    DATA,
    binary,
    etcd_command,
    last_line,
    started_process,
    write_certificates,
)
from keepstep.elastic.store.etcd import Endpoint, open_endpoint
from keepstep.elastic.store.etcd_messages import rpc
from keepstep.elastic.store.members import (
    Add,
    Discard,
    Found,
    Join,
    Listed,
    Member,
    Own,
    Remove,
    Seen,
    Start,
    next_change,
    next_step,
    token_of,
)
from keepstep.elastic.store.ports import ReservedPort
from keepstep.private_files import created_directory, read_file, runtime_directory, write_file
from keepstep.transport.addresses import bound_socket, without_brackets

log = logging.getLogger("keepstep")

_POLL_S = 0.1
_POLL_SERVING_S = 1.0
_ANSWER_S = 1.0
_CHANGE_S = 5.0
_PORT_S = 2.0
"""Seconds for which a killed agent's etcd may still have the ports."""
_PEER_CERTIFICATE, _PEER_KEY = "peer.pem", "peer.key"
_STARTED = "started.json"


class _Started(msgspec.Struct, frozen=True):
    """A note on the data in a directory: its etcd, and the boot in which it was written."""

    token: str
    boot: str


class _ListedMember(msgspec.Struct, frozen=True):
    """A member in the answer of another one's port for members; one that never ran has no name."""

    name: str = ""


@dataclass(frozen=True, slots=True)
class _Place:
    """The directory and the ports of one name, held by this process."""

    index: int
    directory: Path
    lock: int
    clients: ReservedPort
    peers: ReservedPort

    def close(self) -> None:
        """Remove the directory, and let others have the ports."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.clients.close()
        self.peers.close()
        os.close(self.lock)


class CoordinatorMember:
    """A member of the coordinator, which runs until `close`.

    Args:
        members: all of the names.
        secret: of the coordinator.
        place: of this node's name.
    """

    def __init__(self, members: Sequence[Member], secret: bytes, place: _Place) -> None:
        self._members = members
        self._secret = secret
        self._place = place
        self._directory = place.directory
        self._own = members[place.index]
        self._token = self._stored_token()
        self._process: subprocess.Popen[bytes] | None = None
        self._ends = 0
        self._empty_since_s = time.monotonic()
        self._served_s = time.monotonic()
        self._context = self._write_certificates()
        self._warned = ""
        self._running = asyncio.create_task(self._run())
        self._running.add_done_callback(_log_failure)

    @classmethod
    def started(cls, members: Sequence[Member], secret: bytes) -> CoordinatorMember | None:
        """Start the member of the first name that is this machine's and that no other agent has.

        Returns None if there is no such name.

        Raises:
            NotPrivate: the runtime directory is not private.
            OSError: it cannot be used.
            StoreUnavailable: there is no etcd to start.
        """
        binary()
        until_s = time.monotonic() + _PORT_S
        while True:
            place, may_come = _taken_place(members)
            if place is not None:
                return cls(members, secret, place)
            if not may_come or time.monotonic() > until_s:
                return None
            time.sleep(_POLL_S)

    @property
    def member(self) -> Member:
        """The name that this member has."""
        return self._own

    @property
    def away_s(self) -> float:
        """For how long the member has not served: it has no majority."""
        return time.monotonic() - self._served_s

    async def is_needed(self) -> bool:
        """Return whether the other members would not be a majority without this one."""
        others = [member for member in self._members if member is not self._own]
        serving = await asyncio.gather(*(self._serves(member) for member in others))
        return sum(serving) <= len(self._members) // 2

    async def close(self) -> None:
        """End the member and remove what it has on this node. May be called twice."""
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running
        self._end_process()
        self._place.close()

    async def _run(self) -> None:
        while True:
            try:
                seen = await self._look()
                await self._take_step(seen)
                serves = self._place.index in seen and seen[self._place.index].serves
                # Nor is one that ends again and again started ten times a second.
                pause_s = _POLL_SERVING_S if serves or self._ends else _POLL_S
            except (OSError, ValueError, UsageError, grpc.aio.AioRpcError) as error:
                reason = str(error.details() if isinstance(error, grpc.aio.AioRpcError) else error)
                if reason != self._warned:
                    log.warning("the coordinator's member %s: %s", self._own.endpoint, reason)
                self._warned, pause_s = reason, _POLL_SERVING_S
            await asyncio.sleep(pause_s)

    async def _look(self) -> dict[int, Seen]:
        """Return the members that run; only this one while it serves."""
        index = self._place.index
        if self._process is not None and self._process.poll() is not None:
            log.warning(
                "the coordinator's member %s has ended: %s",
                self._own.endpoint, last_line(self._directory) or self._process.returncode,
            )  # fmt: skip
            self._process = None
            self._ends += 1
        if self._process is not None and self._token and await self._serves(self._own):
            self._ends, self._served_s = 0, time.monotonic()
            return {index: Seen(self._token, is_formed=True, serves=True)}
        seen = await asyncio.gather(*(self._seen(member) for member in self._members))
        return {index: it for index, it in enumerate(seen) if it is not None}

    async def _take_step(self, seen: dict[int, Seen]) -> None:
        own = Own(self._token, self._process is not None, self._ends)
        waited_s = time.monotonic() - self._empty_since_s
        match next_step(self._place.index, own, seen, waited_s):
            case Found(token):
                names = {member: member.name for member in self._members}
                token = token or secrets.token_hex(4)
                self._start(token, "new", [f"{names[it](token)}={it.peer_url}" for it in names])
            case Join(through):
                token = seen[through].token
                log.info("the coordinator's member %s is replaced", self._own.endpoint)
                urls = await self._replace(self._members[through])
                by_url = {member.peer_url: member.name(token) for member in self._members}
                self._start(token, "existing", [f"{by_url.get(url, url)}={url}" for url in urls])
            case Start():
                assert self._token is not None, "there is data"
                self._start(
                    self._token, "existing", [f"{self._own.name(self._token)}={self._own.peer_url}"]
                )
            case Discard(why):
                log.warning(
                    "the data of the coordinator's member %s is removed: %s",
                    self._own.endpoint, why,
                )  # fmt: skip
                self._discard()

    def _start(self, token: str, state: str, cluster: Sequence[str]) -> None:
        content = msgspec.json.encode(_Started(token, _boot()))
        write_file(self._directory / _STARTED, content)
        self._token = token
        command = etcd_command(
            self._place.clients, self._place.peers, self._directory,
            "--name", self._own.name(token),
            "--advertise-client-urls", f"https://{self._own.endpoint}",
            "--initial-advertise-peer-urls", self._own.peer_url,
            "--peer-client-cert-file", str(self._directory / _PEER_CERTIFICATE),
            "--peer-client-key-file", str(self._directory / _PEER_KEY),
            "--initial-cluster", ",".join(cluster), "--initial-cluster-state", state,
            "--initial-cluster-token", token,
            # The log that is kept for members that were away for a while, on disk and in memory.
            "--snapshot-count", "10000", "--max-wals", "2", "--max-snapshots", "2",
            # A member is removed only to be added again, also while another one is away.
            "--strict-reconfig-check=false",
        )  # fmt: skip
        self._process = started_process(command, self._directory)

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _discard(self) -> None:
        self._end_process()
        (self._directory / _STARTED).unlink(missing_ok=True)
        shutil.rmtree(self._directory / DATA, ignore_errors=True)
        self._token, self._ends, self._empty_since_s = None, 0, time.monotonic()

    def _stored_token(self) -> str | None:
        """Return the token of the data in the directory; None if there is none that can be used."""
        try:
            started = msgspec.json.decode(read_file(self._directory / _STARTED), type=_Started)
        except (OSError, msgspec.MsgspecError):
            started = None
        if started is not None and started.boot == _boot() and (self._directory / DATA).is_dir():
            return started.token
        shutil.rmtree(self._directory / DATA, ignore_errors=True)
        return None

    async def _replace(self, through: Member) -> Sequence[str]:
        """Replace this node's member in the etcd that works; return the URLs of its members."""
        credentials = Credentials.from_secret(self._secret)
        endpoint = open_endpoint(through.endpoint, Access.SECRET, credentials)
        try:
            async with asyncio.timeout(4 * _CHANGE_S):
                listed = await _listed(endpoint)
                earlier = [it.id for it in listed if it.peer_url == self._own.peer_url]
                while True:
                    match next_change(listed, self._own, self._members, earlier):
                        case Remove(number):
                            request = rpc.MemberRemoveRequest(ID=number)
                            await endpoint.cluster.MemberRemove(request, timeout=_CHANGE_S)
                        case Add(url):
                            request = rpc.MemberAddRequest(peerURLs=[url])
                            await endpoint.cluster.MemberAdd(request, timeout=_CHANGE_S)
                        case None:
                            return [it.peer_url for it in listed]
                    listed = await _listed(endpoint)
        finally:
            await endpoint.channel.close()

    async def _seen(self, member: Member) -> Seen | None:
        """Return how a member appears; None if it does not run."""
        port = member.port + 1
        listed = await self._answer(member, port, "/members")
        version = await self._answer(member, port, "/version")
        if listed is None or version is None:
            return None
        names = [it.name for it in msgspec.json.decode(listed, type=list[_ListedMember])]
        return Seen(token_of(names), b"not_decided" not in version, await self._serves(member))

    async def _serves(self, member: Member) -> bool:
        return b'"health":"true"' in (await self._answer(member, member.port, "/health") or b"")

    async def _answer(self, member: Member, port: int, path: str) -> bytes | None:
        """Return the content that a member answers a request with; None if it does not answer."""
        host = without_brackets(member.host)
        writer = None
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_connection(
                    host, port, ssl=self._context, server_hostname=SERVER_NAME
                )
                writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                head = await reader.readuntil(b"\r\n\r\n")
                # It does not always end the connection.
                fields = dict(
                    line.lower().split(b": ", 1) for line in head.splitlines() if b": " in line
                )
                return await reader.readexactly(int(fields.get(b"content-length", 0)))
        except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError):
            return None
        finally:
            if writer is not None:
                writer.transport.abort()

    def _write_certificates(self) -> ssl.SSLContext:
        """Write this member's certificates; return a client's context.

        Members compare a client's names with its address, which may be another one than its own
        name's: its certificate as their client has none.
        """
        host = without_brackets(self._own.host)
        write_certificates(issue(self._secret, (SERVER_NAME, host)), self._directory)
        client = issue(self._secret, ())
        names = (AUTHORITY, _PEER_CERTIFICATE, _PEER_KEY)
        write_certificates(client, self._directory, names)
        context = ssl.create_default_context(cadata=client.authority.decode())
        context.load_cert_chain(self._directory / _PEER_CERTIFICATE, self._directory / _PEER_KEY)
        return context


def _taken_place(members: Sequence[Member]) -> tuple[_Place | None, bool]:
    """Take the first name of this machine that is free; else return whether one may become so."""
    base = created_directory(runtime_directory())
    may_come = False
    for index, member in enumerate(members):
        host = without_brackets(member.host)
        try:
            bound_socket(host, 0).close()
        except OSError:
            continue  # It is another machine's.
        listed = "\0".join((member.endpoint, *(it.endpoint for it in members)))
        digest = hashlib.sha256(listed.encode()).hexdigest()[:12]
        directory = created_directory(base / f"coordinator-{digest}")
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        ports: list[ReservedPort] = []
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(directory).st_ino != os.fstat(lock).st_ino:
                raise FileNotFoundError(f"{directory} has just been removed by its last owner")
            for port in (member.port, member.port + 1):
                ports.append(ReservedPort(host, port))
        except BlockingIOError:
            os.close(lock)  # Another agent of this machine has it.
        except OSError:
            may_come = True
            for taken in ports:
                taken.close()
            with suppress(OSError):
                directory.rmdir()  # It stays if it has data.
            os.close(lock)
        else:
            return _Place(index, directory, lock, *ports), False
    return None, may_come


async def _listed(endpoint: Endpoint) -> Sequence[Listed]:
    reply = await endpoint.cluster.MemberList(rpc.MemberListRequest(), timeout=_CHANGE_S)
    return [Listed(member.ID, member.peerURLs[0]) for member in reply.members]


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _log_failure(running: asyncio.Task[None]) -> None:
    if not running.cancelled() and running.exception() is not None:
        log.error("the coordinator's member is not looked after", exc_info=running.exception())
