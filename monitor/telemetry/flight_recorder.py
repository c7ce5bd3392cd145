"""Reads dumps of PyTorch's Flight Recorder, one a rank, for analysis after the fact.

Two forms: JSON (`torch._C._distributed_c10d._dump_fr_trace_json`, and the files of its dump pipe), and what the NCCL watchdog writes on a
timeout and `torch.distributed.flight_recorder` reads: a pickle. A pickle is a program; these are read by an unpickler that knows
containers and scalars only and refuses whatever else one asks for. The rank is the number at the end of the file's name, as there.

What such a dump does not tell: steps and phases, roots, failures, and how a clock relates to another's, so each rank counts as a node of
its own, for `keepstep.monitor.telemetry.clocks` to align. Times are wall clock seconds. gloo's operations never tell their end: retired ones are taken as
over, and marked as unobserved. Nor do its dumps name the ranks of a group: the default group is all ranks that any dump knows of, another
one those who use it. Sends and receives are numbered as they lie in the dump; where its buffer had gone round, so that the first are
missing, both sides are numbered such that the last ones that ended are the same one.
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

# How PyTorch's back ends call their operations, without "nccl:" or "gloo:".
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
    name: (DTYPES.index(ours), nbytes)
    for name, ours, nbytes in (
        ("Bool", "bool", 1), ("Byte", "uint8", 1), ("Char", "int8", 1), ("Short", "int16", 2), ("Int", "int32", 4),
        ("Long", "int64", 8), ("Half", "float16", 2), ("BFloat16", "bfloat16", 2), ("Float", "float32", 4),
        ("Double", "float64", 8), ("Float8_e4m3fn", "float8_e4m3fn", 1), ("Float8_e4m3fnuz", "float8_e4m3fnuz", 1),
        ("Float8_e5m2", "float8_e5m2", 1), ("Float8_e5m2fnuz", "float8_e5m2fnuz", 1),
        ("ComplexFloat", "complex64", 8), ("ComplexDouble", "complex128", 16),
    )
}  # fmt: skip
_PAIR_NAME = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_DEFAULT_GROUP = "default_pg"
_UNDESCRIBED = ("", "undefined")
_PROGRESS = ("state", "retired", "time_discovered_started_ns", "time_discovered_completed_ns")


@dataclass(frozen=True, slots=True)
class _Dump:
    """What one rank's file holds.

    Args:
        rank: from the file's name.
        entries: in the order of the calls.
        is_whole: whether no entry was overwritten by later ones.
        groups: ranks of its process groups, where it tells them.
        known: all ranks that it mentions.
    """

    rank: int
    entries: Sequence[Mapping[str, Any]]
    is_whole: bool
    groups: Mapping[str, tuple[int, ...]]
    known: frozenset[int]


def read_dumps(places: Iterable[Path]) -> JobRecords:
    """Read the dumps of a job's ranks.

    Args:
        places: files, or directories of nothing else.

    Raises:
        DumpUnreadable: there is none; or a file is no dump, cannot be read, is damaged, or asks to run something.
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
    _match_messages(ranks, {rank for rank, dump in dumps.items() if not dump.is_whole})
    return JobRecords(
        ranks, {group.identity: group for used in groups.values() for group in used.values()}
    )


def _read(path: Path) -> _Dump:
    try:
        data = path.read_bytes()
        found = re.search(r"(\d+)(\.json)?$", path.name)
        if found is None:
            raise DumpUnreadable(
                "which rank's is it? The file's name must end in the rank's number"
            )
        told = json.loads(data) if data[:1] == b"{" else _Unpickler(io.BytesIO(data)).load()
        version = str(told["version"])
        if not version.startswith(_SUPPORTED):
            raise DumpUnreadable(f"Flight Recorder's format {version}; this reads 2.x")
        members = {
            name: tuple(json.loads(group["ranks"]))
            for name, group in told.get("pg_config", {}).items()
        }
        entries = sorted(told.get("entries") or (), key=lambda entry: entry["record_id"])
        is_whole = not entries or entries[0]["record_id"] == 0
        entries = _settled(entries)
    except DumpUnreadable as error:
        raise DumpUnreadable(f"{path}: {error}") from None
    except OSError as error:
        raise DumpUnreadable(f"{path} cannot be read: {error.strerror}") from error
    except (
        pickle.UnpicklingError, ValueError, KeyError, TypeError, AttributeError, EOFError, IndexError, OverflowError,
        MemoryError, RecursionError,
    ) as error:  # fmt: skip
        raise DumpUnreadable(
            f"{path} is no dump of Flight Recorder, or is damaged: {error!r}"
        ) from error
    # gloo tells of its newest group's ranks, without the group's name.
    rank = int(found[1])
    groups = {name: ranks for name, ranks in members.items() if name}
    return _Dump(
        rank,
        entries,
        is_whole,
        groups,
        frozenset({rank, *(one for ranks in members.values() for one in ranks)}),
    )


def _settled(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give the parts of what NCCL coalesced the progress of the whole, whose entry follows theirs: of themselves they tell none.

    Parts of a collective share its number and become the first of them; sends and receives stay what they are.
    """
    settled: list[dict[str, Any]] = []
    newest: dict[str, tuple[tuple[bool, int], list[dict[str, Any]]]] = {}
    for one in entries:
        entry = dict(one)
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
            settled.append(entry)
        parts.append(entry)
        newest[_group(entry)] = (key, parts)
    return settled


def _groups(dumps: Mapping[int, _Dump]) -> dict[int, dict[str, Communicator]]:
    """Return for each rank the process groups that it uses, by name; groups without a common rank may bear one name."""
    users: dict[str, set[int]] = defaultdict(set)
    descriptions: dict[str, str] = {}
    for dump in dumps.values():
        for entry in dump.entries:
            users[_group(entry)].add(dump.rank)
            descriptions[_group(entry)] = str(entry["process_group"][1])
    everybody = sorted(
        {rank for dump in dumps.values() for rank in dump.known} | set().union(*users.values())
    )
    described = {(name, ranks) for dump in dumps.values() for name, ranks in dump.groups.items()}
    found: dict[int, dict[str, Communicator]] = {rank: {} for rank in dumps}
    for name, ranks in users.items():
        told = descriptions[name]
        shown = name if told in _UNDESCRIBED else f"{name} ({told})"
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
                # Where nobody tells who belongs to a group, it is those who use it.
                members = tuple(everybody if told == _DEFAULT_GROUP else sorted(ranks))
            found[rank][name] = Communicator.of(shown, members)
    return found


def _match_messages(ranks: Mapping[int, RankRecords], cut: Set[int]) -> None:
    """Number, in place, sends and receives of ranks whose first entries are missing, and what answers them."""
    told: dict[tuple[int, int, int], list[tuple[int, np.ndarray, np.ndarray]]] = defaultdict(list)
    for rank, one in ranks.items():
        records = one.records
        for code in (Operation.SEND, Operation.RECEIVE):
            mine = (records["code"] == code) & (records["peer"] >= 0)
            for identity, peer in np.unique(records[mine][["communicator", "peer"]]).tolist():
                at = np.flatnonzero(
                    mine & (records["communicator"] == identity) & (records["peer"] == peer)
                )
                pair = (rank, peer) if code == Operation.SEND else (peer, rank)
                told[identity, *pair].append((rank, records, at))
    for (_, sender, receiver), sides in told.items():
        if cut.isdisjoint((sender, receiver)):
            continue
        ended = [int((records["ended_s"][at] > 0).sum()) for _, records, at in sides]
        for (_, records, at), count in zip(sides, ended, strict=True):
            records["number"][at] += max(ended) - count


class _Unpickler(pickle.Unpickler):
    """Builds containers and scalars, for which a pickle names no class and calls no function."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise DumpUnreadable(
            f"a dump holds plain values, and this one asks for {module_name}.{global_name}: do not trust it"
        )

    def persistent_load(self, identity: Any) -> Any:
        raise DumpUnreadable("a dump refers to nothing outside, and this one does: do not trust it")


def _group(entry: Mapping[str, Any]) -> str:
    return str(entry["process_group"][0])


def _own_name(entry: Mapping[str, Any]) -> str:
    """Return an operation's name without that of its back end."""
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
                2 * entry["record_id"] + 2, Kind.OPERATION, operation, dtype, flags, group.identity, number, nbytes, peer, 0,
                created_s, started_s, ended_s,
            )  # fmt: skip
            last_s = max(last_s, created_s, ended_s)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise DumpUnreadable(
            f"the dump of rank {dump.rank} has an entry that cannot be read: {error!r}"
        ) from error
    return RankRecords(dump.rank, f"host of rank {dump.rank}", records, last_s)


def _operation(own: str, group: Communicator) -> tuple[Operation, int]:
    """Return operation and peer (global rank; -1: none) of, for example, "send 0->1"."""
    if pair := _PAIR_NAME.match(own):
        return _OPERATIONS[pair[1]], group.ranks[int(pair[3])]
    return _OPERATIONS.get(own, Operation.OTHER), -1


def _payload(dtypes: Sequence[str], sizes: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return dtype (index in DTYPES) and bytes of tensors."""
    if not dtypes:
        return 0, 0
    other = (DTYPES.index("other"), 0)
    nbytes = sum(
        math.prod(size) * _DTYPES.get(dtype, other)[1]
        for dtype, size in zip(dtypes, sizes, strict=len(dtypes) == len(sizes))
    )
    return _DTYPES.get(dtypes[0], other)[0], nbytes
