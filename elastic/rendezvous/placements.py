"""Writes the members of a generation once, in pieces that later generations share.

Pure. At thousands of nodes the members of a generation are too many for one request to etcd, and
too many to be sent to every agent with every commit. So the key `placements/<generation>` names
them: it lists chunks by digest, and each chunk is written once, under `members/<digest>`. Members
keep their places from one generation to the next (`rank_assignment`), so most chunks of the next
generation exist already, and nobody writes or reads them again. The documents that name members or
holders (`generation`, `snapshot`, `persist`) are written without them, and completed when they are
read: a snapshot's holders are the members of its generation.

Invariants:
- The chunk of a digest never changes.
- The members of a generation that is open, or whose snapshot is committed, stay readable: only
  chunks that no placement lists are removed.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec

from keepstep.elastic.rendezvous.records import (
    Generation,
    Member,
    PersistRequest,
    Placement,
    SnapshotCommit,
    unreadable,
)

MEMBERS_PER_CHUNK = 64

Place = tuple[str, str, int, str, str, str]
"""A member without the fields that follow from its place: node, host, workers, agent, server,
domain."""

_MAX_NBYTES = 2**24
_DIGEST_DIGITS = 16


def place(members: Sequence[Member]) -> tuple[Placement, Mapping[str, bytes]]:
    """Return the placement of these members, and the chunks that it lists, by digest."""
    chunks: dict[str, bytes] = {}
    digests = []
    for first in range(0, len(members), MEMBERS_PER_CHUNK):
        places = [
            (member.node, member.host, member.nproc, member.agent, member.server, member.domain)
            for member in members[first : first + MEMBERS_PER_CHUNK]
        ]
        digests.append(_digest(msgspec.json.encode(places)))
        chunks[digests[-1]] = encode_chunk(places)
    groups = [member.group for member in members]
    # Groups are assigned in turn, so their differences repeat.
    steps = [groups[0], *(after - before for before, after in pairwise(groups))] if groups else []
    compressed = zlib.compress(msgspec.json.encode(steps), 9)
    return Placement(tuple(digests), base64.b64encode(compressed).decode()), chunks


def encode_chunk(places: Sequence[Place]) -> bytes:
    """Return a chunk of members as it is stored under its digest."""
    return zlib.compress(msgspec.json.encode(places), 9)


def decode_chunk(digest: str, data: bytes) -> tuple[Place, ...]:
    """Parse a chunk of members.

    Raises:
        UsageError: the data is no chunk, or not the one of this digest.
    """
    try:
        listed = _decompress(data)
        places = msgspec.json.decode(listed, type=tuple[Place, ...])
    except (zlib.error, ValueError, RecursionError) as error:
        raise unreadable("list of members", error) from error
    if _digest(listed) != digest:
        raise unreadable("list of members", ValueError(f"it is not {digest:.40}"))
    return places


def members_of(placement: Placement, chunks: Mapping[str, tuple[Place, ...]]) -> tuple[Member, ...]:
    """Return the members that a placement names.

    Raises:
        UsageError: a chunk is missing, or the placement is malformed.
    """
    missing = [digest for digest in placement.chunks if digest not in chunks]
    if missing:
        raise unreadable("placement", ValueError(f"{missing[0]:.40} is missing"))
    places = [member for digest in placement.chunks for member in chunks[digest]]
    try:
        steps = msgspec.json.decode(
            _decompress(base64.b64decode(placement.groups)), type=tuple[int, ...]
        )
    except (zlib.error, ValueError, RecursionError) as error:
        raise unreadable("placement", error) from error
    if len(steps) != len(places):
        raise unreadable("placement", ValueError(f"{len(steps)} groups of {len(places)} members"))
    members = []
    first_rank = group = 0
    for (node, host, nproc, agent, server, domain), step in zip(places, steps, strict=True):
        group += step
        members.append(Member(node, host, nproc, first_rank, agent, server, group, domain))
        first_rank += nproc
    return tuple(members)


def encode_generation(generation: Generation) -> bytes:
    """Return a generation without its members."""
    resume = generation.resume
    bare = replace(generation, members=(), resume=_without_holders(resume) if resume else None)
    return bare.encode()


def encode_commit(commit: SnapshotCommit) -> bytes:
    """Return a commit without its holders."""
    return _without_holders(commit).encode()


def encode_request(request: PersistRequest) -> bytes:
    """Return a request to store without the holders who are asked."""
    return replace(request, commit=_without_holders(request.commit)).encode()


def decode_generation(data: bytes, members: Mapping[int, tuple[Member, ...]]) -> Generation:
    """Parse a generation, and complete it.

    Args:
        data: a result of `encode_generation`.
        members: of each generation whose placement is known.

    Raises:
        UsageError: the data is no generation, or a placement is missing.
    """
    bare = Generation.decode(data)
    resume = with_holders(bare.resume, members) if bare.resume is not None else None
    return replace(bare, members=_placed(bare.generation, members), resume=resume)


def decode_commit(data: bytes, members: Mapping[int, tuple[Member, ...]]) -> SnapshotCommit:
    """Parse a commit, and complete it. Args and errors as for `decode_generation`."""
    return with_holders(SnapshotCommit.decode(data), members)


def decode_request(data: bytes, members: Mapping[int, tuple[Member, ...]]) -> PersistRequest:
    """Parse a request, and complete it. Args and errors as for `decode_generation`."""
    bare = PersistRequest.decode(data)
    return replace(bare, commit=with_holders(bare.commit, members))


def with_holders(
    commit: SnapshotCommit, members: Mapping[int, tuple[Member, ...]]
) -> SnapshotCommit:
    """Return a commit with its holders: its generation's members, but for those absent.

    Raises:
        UsageError: the placement of its generation is missing.
    """
    holders = _placed(commit.snapshot.generation, members)
    if commit.absent:
        absent = set(commit.absent)
        holders = tuple(member for member in holders if member.node not in absent)
    return replace(commit, holders=holders)


def _without_holders(commit: SnapshotCommit) -> SnapshotCommit:
    return replace(commit, holders=())


def _placed(generation: int, members: Mapping[int, tuple[Member, ...]]) -> tuple[Member, ...]:
    if generation not in members:
        raise unreadable(
            "document", ValueError(f"the members of generation {generation} are not there")
        )
    return members[generation]


def _digest(listed: bytes) -> str:
    return hashlib.sha256(listed).hexdigest()[:_DIGEST_DIGITS]


def _decompress(data: bytes) -> bytes:
    """Raises zlib.error, or ValueError for data that are cut off or too long."""
    decompressor = zlib.decompressobj()
    content = decompressor.decompress(data, _MAX_NBYTES)
    if not decompressor.eof:
        raise ValueError("it is incomplete, or too long")
    return content
