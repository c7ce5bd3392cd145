"""Implements `keepstep logs` for a job that runs: a rank's output, on whichever node it is.

Agents send the output of their own workers (`keepstep.elastic.agent.output_files`). All nodes are
asked once; then those that have files of the rank, and the node that has the rank now. Nodes may
share a directory, so a file that several of them have is printed once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from keepstep.elastic.agent.output_files import (
    ListOutput,
    OutputFile,
    OutputFiles,
    OutputPiece,
    OutputReply,
    OutputRequest,
    ReadOutput,
)
from keepstep.elastic.agent.peer_connections import OUTPUT_PROTOCOL, AgentRequest
from keepstep.elastic.cli.follow import JobAddress, views_while_it_answers
from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.records import decode_secret
from keepstep.elastic.rendezvous.view import Keys, View, from_listing
from keepstep.elastic.store.etcd import EtcdStore
from keepstep.transport import Identity, StreamConnection, TransportError, open_stream

_CHECK_EVERY_S = 0.5
_ANSWER_S = 10.0
_HANDSHAKE_S = 4.0
_NODES_AT_ONCE = 32
_CLIENT = "keepstep logs"
_FileKey = tuple[int, int, bool]


@dataclass(frozen=True, slots=True)
class OutputChoice:
    """Whose output is printed.

    Args:
        rank: the rank; None: the lowest that has output.
        node: the only node to ask; None: all.
        since: the first generation; None: the newest in which the rank has output.
    """

    rank: int | None = None
    node: str | None = None
    since: int | None = None


def print_job_output(job: JobAddress, choice: OutputChoice, *, follow: bool) -> None:
    """Print a rank's output, and follow it over recoveries until the job ends or Ctrl-C.

    Raises:
        UsageError: there is no such job, node or output.
        StoreUnavailable: the coordinator does not answer.
    """
    try:
        asyncio.run(_print(job, choice, follow))
    except KeyboardInterrupt:
        return


def file_key(file: OutputFile) -> _FileKey:
    """Return what names a file among those of all nodes; keys sort as files are printed."""
    return file.generation, file.rank, file.stream == "stderr"


def holders(listed: Mapping[str, Iterable[OutputFile]]) -> dict[_FileKey, tuple[str, OutputFile]]:
    """Return each file with the node to read it from: where it is longest, in order of printing.

    On a shared file system, the node that writes it sees its end first.
    """
    found: dict[_FileKey, tuple[str, OutputFile]] = {}
    for node, files in sorted(listed.items()):
        for file in files:
            known = found.get(file_key(file))
            if known is None or known[1].nbytes < file.nbytes:
                found[file_key(file)] = (node, file)
    return dict(sorted(found.items()))


async def _print(job: JobAddress, choice: OutputChoice, follow: bool) -> None:
    keys = Keys(job.name)
    client = await EtcdStore.connect(job.coordinator)
    try:
        view = from_listing(keys, await client.read(keys.prefix))
        if not view.nodes or view.secret is None:
            raise UsageError(f"no node of job {job.name!r} is at this coordinator; see --store")
        if choice.node is not None and choice.node not in view.nodes:
            raise UsageError(
                f"job {job.name!r} has no node {choice.node!r}; "
                f"its nodes: {', '.join(sorted(view.nodes))}"
            )
        output = _JobOutput(view, decode_secret(view.secret), choice)
        following = asyncio.create_task(output.follow_view(client, keys))
        try:
            await output.print_first()
            while follow and not output.has_ended:
                if following.done() and not output.is_connected:
                    following.result()  # Raises: the coordinator has gone, and the nodes too.
                await asyncio.sleep(_CHECK_EVERY_S)
                await output.print_next()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            output.close()
    finally:
        await client.close()


class _JobOutput:
    """Prints a rank's output from the nodes' agents. `close` ends the connections."""

    def __init__(self, view: View, secret: bytes, choice: OutputChoice) -> None:
        self._view = view
        self._identity = Identity(_CLIENT, secret)
        self._choice = choice
        self._rank = choice.rank
        self._since = choice.since or 0
        self._printed: dict[_FileKey, int] = {}
        self._last: _FileKey | None = None
        self._connections: dict[str, StreamConnection[AgentRequest, OutputReply]] = {}
        self._addresses: dict[str, str] = {}
        # The addresses of agents that have ended, by node.
        self._ended: dict[str, str] = {}
        self._silent: set[str] = set()

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended, and every node's output is printed."""
        is_over = self._view.result is not None or not self._view.nodes
        return is_over and not self._connections

    @property
    def is_connected(self) -> bool:
        """Whether any node is connected to."""
        return bool(self._connections)

    async def follow_view(self, client: EtcdStore, keys: Keys) -> None:
        """Keep the view of the job current; without the coordinator, the last one stays."""
        async for view in views_while_it_answers(client, keys):
            self._view = view

    async def print_first(self) -> None:
        """Print what there is of the rank.

        Raises:
            UsageError: no node has output of the rank.
        """
        names = sorted(self._view.nodes) if self._choice.node is None else [self._choice.node]
        found = holders(await self._list(names))
        ranks = sorted({rank for _, rank, _ in found})
        if not ranks:
            raise UsageError(
                f"no node has output of {'workers' if self._rank is None else f'rank {self._rank}'}"
                " in files: it goes to the terminal of `keepstep run`, unless that is given --tee 3"
                " (to files as well) or --redirects 3 (to files only) on every node"
            )
        self._rank = ranks[0] if self._rank is None else self._rank
        if self._choice.since is None:
            self._since = max(generation for generation, rank, _ in found if rank == self._rank)
        await self._print_files(found)

    async def print_next(self) -> None:
        """Print what has come since."""
        names = sorted({*self._connections, *self._current_node()})
        await self._print_files(holders(await self._list(names)))
        for node in set(self._ended) & set(self._connections):
            self._connections.pop(node).close()

    def close(self) -> None:
        """End the connections."""
        for connection in self._connections.values():
            connection.close()

    def _current_node(self) -> Iterator[str]:
        """Yield the node that has the rank now, if it is to be asked."""
        for member in self._view.generation.members if self._view.generation is not None else ():
            joined = self._view.nodes.get(member.node)
            if (
                self._rank in member.ranks
                and self._choice.node in (None, member.node)
                and joined is not None
                and joined.record.agent != self._ended.get(member.node)
            ):
                yield member.node

    def _is_wanted(self, key: _FileKey) -> bool:
        return key[1] == self._rank and key[0] >= self._since

    async def _list(self, nodes: list[str]) -> dict[str, tuple[OutputFile, ...]]:
        """Return the files that each of these nodes has; those that do not answer are named."""
        turns = asyncio.Semaphore(_NODES_AT_ONCE)

        async def list_one(node: str) -> tuple[OutputFile, ...]:
            async with turns:
                request = ListOutput(rank=self._rank, since=self._since)
                reply = await self._ask(node, request)
            if not isinstance(reply, OutputFiles):
                return ()
            if reply.is_ending:
                self._ended[node] = self._addresses[node]
            if self._rank is None or not reply.files:
                # There may be more nodes than this process may have open connections.
                self._connections.pop(node).close()
            return reply.files

        return dict(zip(nodes, await asyncio.gather(*map(list_one, nodes)), strict=True))

    async def _print_files(self, found: Mapping[_FileKey, tuple[str, OutputFile]]) -> None:
        for key, (node, file) in found.items():
            if self._is_wanted(key) and file.nbytes > self._printed.get(key, 0):
                self._announce(key, node, file)
                await self._print_file(key, node, file)

    async def _print_file(self, key: _FileKey, node: str, file: OutputFile) -> None:
        """Print a file as far as it went when it was listed."""
        while (offset := self._printed.get(key, 0)) < file.nbytes:
            reply = await self._ask(node, ReadOutput(file=file, offset=offset))
            if not isinstance(reply, OutputPiece) or not reply.data:
                return
            sys.stdout.buffer.write(reply.data)
            sys.stdout.flush()
            self._printed[key] = offset + len(reply.data)

    def _announce(self, key: _FileKey, node: str, file: OutputFile) -> None:
        """Say on stderr where what follows comes from, if that is another file than before."""
        if key != self._last:
            self._last = key
            _note(f"rank {file.rank}, generation {file.generation}, node {node}, {file.stream}:")

    async def _ask(self, node: str, request: OutputRequest) -> OutputReply | None:
        """Return a node's answer; None if it has none, which is printed once."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                connection = self._connections.get(node)
                if connection is None:
                    connection = await self._open(node)
                if connection is not None:
                    await connection.send(request)
                    reply = await connection.receive()
                    if reply is not None:
                        self._silent.discard(node)
                        return reply
                    raise TransportError("its agent has ended")
        except (TransportError, TimeoutError) as error:
            with suppress(KeyError):
                self._connections.pop(node).close()
            if node not in self._ended and node not in self._silent:
                self._silent.add(node)
                _note(f"node {node} does not answer, its newest output may be missing: {error}")
        return None

    async def _open(self, node: str) -> StreamConnection[AgentRequest, OutputReply] | None:
        joined = self._view.nodes.get(node)
        if joined is None:
            return None
        self._addresses[node] = joined.record.agent
        connection = await open_stream(
            f"tcp:{joined.record.agent}", OUTPUT_PROTOCOL, self._identity, handshake_s=_HANDSHAKE_S
        )
        self._connections[node] = connection
        return connection


def _note(text: str) -> None:
    print(f"keepstep: {text}", file=sys.stderr, flush=True)
