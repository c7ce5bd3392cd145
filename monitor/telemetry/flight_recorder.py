"""Reads dumps of PyTorch's Flight Recorder, one for each rank, for analysis after the fact.

There are two formats: JSON (`torch._C._distributed_c10d._dump_fr_trace_json`, and the files of its
dump pipe), and the pickle that the NCCL watchdog writes on a timeout and
`torch.distributed.flight_recorder` reads. A pickle is a program; these are read by an unpickler
that accepts containers and scalars only and refuses everything else. The rank is the number at the
end of the file's name, as there.

A dump contains no steps, phases, roots or failures, and no relation between clocks, so each rank
counts as a node of its own, which `keepstep.monitor.telemetry.clocks` aligns. Times are wall-clock
seconds. gloo never records the end of its operations: retired ones are assumed to have ended, and
flagged as unobserved. Nor do its dumps name the ranks of a group: the default group is all ranks
that any dump mentions, another group is the ranks that use it. Sends and receives are numbered in
the order of the dump. If its buffer has wrapped around, so that the first ones are missing, both
sides are numbered such that their last ended messages match.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keepstep.monitor.errors import DumpUnreadable
from keepstep.monitor.records import (
    DTYPES,
    RECORD,
    Communicator,
    Flag,
    JobRecords,
    Kind,
    Operation,
    RankRecords,
)

_SUPPORTED = ("2.",)

# Names of operations in PyTorch's back ends, without the prefix "nccl:" or "gloo:".
_OPERATIONS: Mapping[str, Operation] = {
    "all_reduce": Operation.ALL_REDUCE,
    "all_reduce_sparse": Operation.ALL_REDUCE,
    "allreduce_coalesced": Operation.ALL_REDUCE,
    "all_reduce_barrier": Operation.BARRIER,
    "barrier": Operation.BARRIER,
    "all_gather": Operation.ALL_GATHER,
    "_all_gather_base": Operation.ALL_GATHER,
    "all_gather_into_tensor_coalesced": Operation.ALL_GATHER,
    "allgather_into_tensor_coalesced": Operation.ALL_GATHER,
    "reduce_scatter": Operation.REDUCE_SCATTER,
    "_reduce_scatter_base": Operation.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": Operation.REDUCE_SCATTER,
    "broadcast": Operation.BROADCAST,
    "_broadcast_oop": Operation.BROADCAST,
    "reduce": Operation.REDUCE,
    "_reduce_oop": Operation.REDUCE,
    "gather": Operation.GATHER,
    "scatter": Operation.SCATTER,
    "all_to_all": Operation.ALL_TO_ALL,
    "alltoall": Operation.ALL_TO_ALL,
    "alltoall_base": Operation.ALL_TO_ALL,
    "send": Operation.SEND,
    "recv": Operation.RECEIVE,
}

# C++ names of dtypes: (index in DTYPES, bytes of an element).
_DTYPES: Mapping[str, tuple[int, int]] = {
    cpp_name: (DTYPES.index(dtype), nbytes)
    for cpp_name, dtype, nbytes in (
        ("Bool", "bool", 1), ("Byte", "uint8", 1), ("Char", "int8", 1), ("Short", "int16", 2),
        ("Int", "int32", 4), ("Long", "int64", 8), ("Half", "float16", 2),
        ("BFloat16", "bfloat16", 2), ("Float", "float32", 4), ("Double", "float64", 8),
        ("Float8_e4m3fn", "float8_e4m3fn", 1), ("Float8_e4m3fnuz", "float8_e4m3fnuz", 1),
        ("Float8_e5m2", "float8_e5m2", 1), ("Float8_e5m2fnuz", "float8_e5m2fnuz", 1),
        ("ComplexFloat", "complex64", 8), ("ComplexDouble", "complex128", 16),
    )
}  # fmt: skip
_PAIR_NAME = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_DEFAULT_GROUP = "default_pg"
_UNDESCRIBED = ("", "undefined")
_PROGRESS = ("state", "retired", "time_discovered_started_ns", "time_discovered_completed_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dump:
    """The content of one rank's file.

    Args:
        rank: from the file's name.
        entries: in the order of the calls.
        is_complete: whether no entry was overwritten by later ones.
        groups: ranks of its process groups, where they are recorded.
        mentioned: all ranks that it mentions.
    """

    rank: int
    entries: Sequence[Mapping[str, Any]]
    is_complete: bool
    groups: Mapping[str, tuple[int, ...]]
    mentioned: frozenset[int]


def read_dumps(places: Iterable[Path]) -> JobRecords:
    """Read the dumps of a job's ranks.

    Args:
        places: dump files, or directories that contain nothing else.

    Raises:
        DumpUnreadable: there is none; or a file is not a dump, cannot be read, is damaged, or
            would run code.
    """
    try:
        paths = [
            path
            for place in places
            for path in (sorted(place.iterdir()) if place.is_dir() else [place])
        ]
    except OSError as error:
        raise DumpUnreadable(f"{error.filename} cannot be read: {error.strerror}") from error
    if not paths:
        raise DumpUnreadable("there is no dump: the directory is empty")
    dumps = {dump.rank: dump for dump in map(_read, paths)}
    if len(dumps) < len(paths):
        raise DumpUnreadable(
            f"{len(paths)} files of only {len(dumps)} ranks: analyze one set of dumps at a time"
        )
    groups = _groups(dumps)
    ranks = {dump.rank: _convert(dump, groups[dump.rank]) for dump in dumps.values()}
    _match_messages(ranks, {rank for rank, dump in dumps.items() if not dump.is_complete})
    communicators = {group.identity: group for used in groups.values() for group in used.values()}
    return JobRecords(ranks, communicators)


def _read(path: Path) -> _Dump:
    try:
        data = path.read_bytes()
        match = re.search(r"(\d+)(\.json)?$", path.name)
        if match is None:
            raise DumpUnreadable(
                "the rank is not known: the file's name must end in the rank's number"
            )
        content = json.loads(data) if data[:1] == b"{" else _Unpickler(io.BytesIO(data)).load()
        version = str(content["version"])
        if not version.startswith(_SUPPORTED):
            raise DumpUnreadable(f"Flight Recorder's format {version} is not supported, only 2.x")
        members = {
            name: tuple(json.loads(group["ranks"]))
            for name, group in content.get("pg_config", {}).items()
        }
        entries = sorted(content.get("entries") or (), key=lambda entry: entry["record_id"])
        is_complete = not entries or entries[0]["record_id"] == 0
        entries = _merge_coalesced(entries)
    except DumpUnreadable as error:
        raise DumpUnreadable(f"{path}: {error}") from None
    except OSError as error:
        raise DumpUnreadable(f"{path} cannot be read: {error.strerror}") from error
    except (
        pickle.UnpicklingError, ValueError, KeyError, TypeError, AttributeError, EOFError,
        IndexError, OverflowError, MemoryError, RecursionError,
    ) as error:  # fmt: skip
        raise DumpUnreadable(
            f"{path} is no dump of Flight Recorder, or is damaged: {error!r}"
        ) from error
    rank = int(match[1])
    return _Dump(
        rank=rank,
        entries=entries,
        is_complete=is_complete,
        # gloo records the ranks of its newest group only, without the group's name.
        groups={name: ranks for name, ranks in members.items() if name},
        mentioned=frozenset({rank}.union(*members.values())),
    )


def _merge_coalesced(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge the parts of operations that NCCL coalesced, and give them their common progress.

    The entry of the coalesced operation follows those of its parts, which record no progress
    themselves. Parts of a collective share its number and become one entry, the first; sends and
    receives remain separate.
    """
    merged: list[dict[str, Any]] = []
    newest: dict[str, tuple[tuple[bool, int], list[dict[str, Any]]]] = {}
    for original in entries:
        entry = dict(original)
        own = _own_name(entry)
        is_pair = bool(entry.get("is_p2p"))
        key = (is_pair, entry["p2p_seq_id" if is_pair else "collective_seq_id"])
        before, parts = newest.get(_group(entry), (key, []))
        if parts and (own == "coalesced" or (own.endswith("_coalesced") and key == before)):
            for part in parts:
                part |= {name: entry[name] for name in _PROGRESS}
            del newest[_group(entry)]
            continue
        if key != before:
            parts = []
        if not parts or is_pair:
            merged.append(entry)
        parts.append(entry)
        newest[_group(entry)] = (key, parts)
    return merged


def _groups(dumps: Mapping[int, _Dump]) -> dict[int, dict[str, Communicator]]:
    """Return the process groups that each rank uses, by name.

    Groups without a common rank may have the same name.
    """
    users: dict[str, set[int]] = defaultdict(set)
    descriptions: dict[str, str] = {}
    for dump in dumps.values():
        for entry in dump.entries:
            users[_group(entry)].add(dump.rank)
            descriptions[_group(entry)] = str(entry["process_group"][1])
    all_ranks = sorted(
        {rank for dump in dumps.values() for rank in dump.mentioned}.union(*users.values())
    )
    described = {(name, ranks) for dump in dumps.values() for name, ranks in dump.groups.items()}
    groups: dict[int, dict[str, Communicator]] = {rank: {} for rank in dumps}
    for name, ranks in users.items():
        description = descriptions[name]
        full_name = name if description in _UNDESCRIBED else f"{name} ({description})"
        for rank in ranks:
            members = dumps[rank].groups.get(name) or next(
                (
                    members
                    for other, members in sorted(described)
                    if other == name and rank in members
                ),
                None,
            )
            if members is None:
                # A group that no dump describes consists of the ranks that use it.
                members = tuple(all_ranks if description == _DEFAULT_GROUP else sorted(ranks))
            groups[rank][name] = Communicator.of(full_name, members)
    return groups


def _match_messages(ranks: Mapping[int, RankRecords], incomplete: Set[int]) -> None:
    """Renumber, in place, the messages from and to ranks whose first entries are missing."""
    by_pair: dict[tuple[int, int, int], list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for rank, rank_records in ranks.items():
        records = rank_records.records
        for code in (Operation.SEND, Operation.RECEIVE):
            has_code = (records["code"] == code) & (records["peer"] >= 0)
            for identity, peer in np.unique(records[has_code][["communicator", "peer"]]).tolist():
                at = np.flatnonzero(
                    has_code & (records["communicator"] == identity) & (records["peer"] == peer)
                )
                pair = (rank, peer) if code == Operation.SEND else (peer, rank)
                by_pair[identity, *pair].append((records, at))
    for (_, sender, receiver), sides in by_pair.items():
        if incomplete.isdisjoint((sender, receiver)):
            continue
        ended = [int((records["ended_s"][at] > 0).sum()) for records, at in sides]
        for (records, at), count in zip(sides, ended, strict=True):
            records["number"][at] += max(ended) - count


class _Unpickler(pickle.Unpickler):
    """Loads containers and scalars, for which a pickle names no class and calls no function."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise DumpUnreadable(
            f"a dump contains plain values only, and this one requires {module_name}."
            f"{global_name}: do not trust it"
        )

    def persistent_load(self, identity: Any) -> Any:
        raise DumpUnreadable(
            "a dump contains no external references, and this one does: do not trust it"
        )


def _group(entry: Mapping[str, Any]) -> str:
    return str(entry["process_group"][0])


def _own_name(entry: Mapping[str, Any]) -> str:
    """Return an operation's name without the prefix of its back end."""
    name: str = entry["profiling_name"]
    return name.partition(":")[2] or name


def _convert(dump: _Dump, groups: Mapping[str, Communicator]) -> RankRecords:
    records = np.zeros(len(dump.entries), RECORD)
    pairs: dict[tuple[int, int, int], int] = defaultdict(int)
    last_s = 0.0
    try:
        for position, entry in enumerate(dump.entries):
            group = groups[_group(entry)]
            operation, peer = _operation(_own_name(entry), group)
            number = entry["collective_seq_id"]
            if operation in (Operation.SEND, Operation.RECEIVE):
                pair = (group.identity, operation, peer)
                pairs[pair] += 1
                number = pairs[pair]
            side = "output" if operation == Operation.SCATTER else "input"
            dtype, nbytes = _payload(entry[f"{side}_dtypes"], entry[f"{side}_sizes"])
            if operation == Operation.BARRIER:
                dtype = nbytes = 0
            created_s = entry["time_created_ns"] / 10**9
            started_s = (entry["time_discovered_started_ns"] or 0) / 10**9 or created_s
            ended_s = (entry["time_discovered_completed_ns"] or 0) / 10**9
            flags = 0
            if not ended_s and (entry["state"] == "completed" or entry["retired"]):
                ended_s, flags = started_s, int(Flag.UNOBSERVED)
            records[position] = (
                2 * entry["record_id"] + 2, Kind.OPERATION, operation, dtype, flags,
                group.identity, number, nbytes, peer, 0, created_s, started_s, ended_s,
            )  # fmt: skip
            last_s = max(last_s, created_s, ended_s)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise DumpUnreadable(
            f"the dump of rank {dump.rank} has an entry that cannot be read: {error!r}"
        ) from error
    return RankRecords(dump.rank, f"host of rank {dump.rank}", records, last_s)


def _operation(own: str, group: Communicator) -> tuple[Operation, int]:
    """Return the operation and the peer (global rank; -1: none) of a name such as "send 0->1"."""
    if pair := _PAIR_NAME.match(own):
        return _OPERATIONS[pair[1]], group.ranks[int(pair[3])]
    return _OPERATIONS.get(own, Operation.OTHER), -1


def _payload(dtypes: Sequence[str], sizes: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the dtype (index in DTYPES) and the size in bytes of tensors."""
    if not dtypes:
        return 0, 0
    other = (DTYPES.index("other"), 0)
    nbytes = sum(
        math.prod(size) * _DTYPES.get(dtype, other)[1]
        for dtype, size in zip(dtypes, sizes, strict=len(dtypes) == len(sizes))
    )
    return _DTYPES.get(dtypes[0], other)[0], nbytes
