"""Mirrors the job as the coordinator holds it: folds listings and changes into typed records.

Pure. It names the keys, too. The rendezvous decides from a `View` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous import placements
from keepstep.elastic.rendezvous.placements import Place
from keepstep.elastic.rendezvous.records import (
    AbortOrder,
    CheckpointRecord,
    Closing,
    Eviction,
    Generation,
    History,
    Leadership,
    Member,
    NodePhase,
    NodeRecord,
    NodeReport,
    Pause,
    PersistRequest,
    Placement,
    PublishedVerdict,
    PublishedVerdicts,
    Record,
    Release,
    RestartRequest,
    Result,
    Scale,
    SnapshotCommit,
    StoreFailure,
    decode_number,
)
from keepstep.elastic.store.contract import Change, KeyValue, Listing

# A document of an older or newer version that others cannot read concerns its writer alone.
_OF_ONE_WRITER = ("nodes/", "evictions/", "restarts/")

_Members = Mapping[int, tuple[Member, ...]]
_COMPLETED: Mapping[str, Callable[[bytes, _Members], Record]] = {
    "generation": placements.decode_generation,
    "snapshot": placements.decode_commit,
    "persist": placements.decode_request,
}
"""Documents that are stored without the members that they name."""
_SINGLE: Mapping[str, type[Record]] = {
    "abort_order": AbortOrder,
    "closing": Closing,
    "checkpoint": CheckpointRecord,
    "store_failure": StoreFailure,
    "history": History,
    "leadership": Leadership,
    "pause": Pause,
    "release": Release,
    "result": Result,
    "scale": Scale,
    "verdicts": PublishedVerdicts,
}

_FOLLOWED = frozenset(
    (
        "secret", "leadership", "generation", "closing", "abort_order", "release", "snapshot",
        "persist", "checkpoint", "result", "scale", "pause",
    )
)  # fmt: skip
"""The documents that every agent follows, in addition to placements, evictions and restarts."""


@cache
def _prefix_of(job: str) -> str:
    name = job.replace("%", "%25").replace("/", "%2F")
    return f"/keepstep/{name}/"


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of one job's keys."""

    job: str

    @property
    def prefix(self) -> str:
        """Prefix of all of the job's keys, and of no other job's: a name may hold slashes."""
        return _prefix_of(self.job)

    @property
    def followed(self) -> str:
        """Prefix of the keys that every agent follows; the leader alone follows all of the job's.

        Its number of changes does not depend on the number of nodes.
        """
        return f"{self.prefix}control/"

    def node(self, node: str = "") -> str:
        """Key of a node's record; without a node the prefix of all of them."""
        return f"{self.prefix}nodes/{node}"

    def eviction(self, node: str) -> str:
        """Key whose presence asks a node to leave and not come back."""
        return f"{self.followed}evictions/{node}"

    def restart(self, rank: int | None = None) -> str:
        """Key whose presence asks for a rank's worker to be restarted; None for their prefix."""
        return f"{self.followed}restarts/{'' if rank is None else rank}"

    def placement(self, generation: int) -> str:
        """Key that names the members of a generation."""
        return f"{self.followed}placements/{generation}"

    def chunk(self, digest: str = "") -> str:
        """Key of some of a generation's members; without a digest the prefix of all of them."""
        return f"{self.prefix}members/{digest}"

    def single(self, name: str) -> str:
        """Key of one of the job-wide documents, such as `generation`."""
        return f"{self.followed if name in _FOLLOWED else self.prefix}{name}"

    def name(self, key: str) -> str:
        """Return a key without its prefixes."""
        return key.removeprefix(self.prefix).removeprefix("control/")


@dataclass(frozen=True, slots=True)
class JoinedNode:
    """A present node: its record, and the revision at which it joined, which is its seniority."""

    record: NodeRecord
    created: int


@dataclass(frozen=True, slots=True)
class View:
    """The coordinator's content about a job at one revision.

    The leader's view shows everything. A follower's shows what is under `Keys.followed` and the
    members that placements list: no nodes, and no history, store failures or verdicts.
    """

    revision: int = 0
    nodes: Mapping[str, JoinedNode] = field(default_factory=dict)
    evictions: Mapping[str, Eviction] = field(default_factory=dict)
    restarts: Mapping[int, RestartRequest] = field(default_factory=dict)
    generation: Generation | None = None
    leadership: Leadership | None = None
    closing: Closing | None = None
    abort_order: AbortOrder | None = None
    release: Release | None = None
    snapshot: SnapshotCommit | None = None
    persist: PersistRequest | None = None
    checkpoint: CheckpointRecord | None = None
    store_failure: StoreFailure | None = None
    history: History = field(default_factory=History)
    result: Result | None = None
    scale: Scale | None = None
    pause: Pause | None = None
    verdicts: PublishedVerdicts | None = None
    secret: bytes | None = None
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Why records of nodes, evictions and restarts, by the key's name, count as absent."""
    placements: Mapping[int, Placement] = field(default_factory=dict)
    members: Mapping[int, tuple[Member, ...]] = field(default_factory=dict)
    """The members of each generation that has a placement."""
    chunks: Mapping[str, tuple[Place, ...]] = field(default_factory=dict)
    """The chunks that placements list, by digest; also those that none lists any more."""
    revisions: Mapping[str, int] = field(default_factory=dict)
    """At which revision each job-wide document was last written; without those that are absent."""
    gone: frozenset[str] = frozenset()
    """Addresses of agents that have ended with what their nodes held, as the leader has found."""

    @property
    def generation_revision(self) -> int:
        """Revision at which the current generation was opened; 0 before the first."""
        return self.revisions.get("generation", 0)

    @property
    def generation_number(self) -> int:
        """The current generation's number; 0 before the first."""
        return self.generation.generation if self.generation else 0

    @property
    def is_restored(self) -> bool:
        """Whether a node has restored the job's keys, and no generation was opened since."""
        return self.generation is not None and (
            self.generation_revision == self.revisions.get("secret")
        )

    @property
    def is_kept(self) -> bool:
        """Whether the job has failed, and its nodes keep its state in memory."""
        return self.result is not None and self.result.kept > 0

    @property
    def leader(self) -> str | None:
        """The node that decides; None while nobody has taken the lead."""
        return self.leadership.node if self.leadership is not None else None

    @property
    def is_closing(self) -> bool:
        """Whether the current generation is over and the next not yet open."""
        return self.closing is not None and self.closing.generation == self.generation_number

    @property
    def current_verdicts(self) -> tuple[PublishedVerdict, ...]:
        """The verdicts about the current generation's ranks, without those about older ones."""
        return (
            self.verdicts.verdicts
            if self.verdicts is not None and self.verdicts.generation == self.generation_number
            else ()
        )

    def restarts_on(self, node: str) -> tuple[RestartRequest, ...]:
        """Return the restarts that a node is to carry out on its own ranks in this generation."""
        member = self.generation.member(node) if self.generation is not None else None
        if member is None:
            return ()
        return tuple(
            request
            for rank, request in sorted(self.restarts.items())
            if rank in member.ranks and request.generation == self.generation_number
        )


def from_listing(keys: Keys, listing: Listing) -> View:
    """Build the view of all keys of a job."""
    changes = (Change(item.key, item, listing.revision) for item in listing.items)
    return replace(apply(keys, View(), changes), revision=listing.revision)


def apply(keys: Keys, view: View, changes: Iterable[Change]) -> View:
    """Fold the changes of one or more revisions into the view."""
    ordered = sorted(changes, key=lambda change: (change.revision, _order(keys, change)))
    if not ordered:
        return view
    draft = _Draft(**{name: dict(getattr(view, name)) for name in _DRAFTED})
    for change in ordered:
        draft.fold(keys.name(change.key), change.value)
    updates = {name: getattr(draft, name) for name in _DRAFTED} | draft.documents
    return replace(view, revision=ordered[-1].revision, **updates)


def _order(keys: Keys, change: Change) -> int:
    """Return the order within a revision: members come before the documents that name them."""
    section, _, _ = keys.name(change.key).partition("/")
    if section not in ("members", "placements"):
        return 2
    if change.value is None:
        return 3
    return 0 if section == "members" else 1


def missing_chunks(keys: Keys, view: View, items: Iterable[KeyValue]) -> frozenset[str]:
    """Return the digests of members that placements among these items list and a view lacks."""
    listed: set[str] = set()
    for item in items:
        if keys.name(item.key).startswith("placements/"):
            listed.update(Placement.decode(item.value).chunks)
    return frozenset(listed - view.chunks.keys())


def with_chunks(keys: Keys, view: View, items: Iterable[KeyValue]) -> View:
    """Add members, under their own keys, that a follower has read."""
    changes = (Change(item.key, item, view.revision) for item in items)
    return apply(keys, view, changes)


def without_unlisted_chunks(view: View) -> View:
    """Forget members that no placement lists; a follower does not learn when they are removed."""
    listed = {digest for placement in view.placements.values() for digest in placement.chunks}
    if len(listed) == len(view.chunks):
        return view
    chunks = {digest: chunk for digest, chunk in view.chunks.items() if digest in listed}
    return replace(view, chunks=chunks)


def with_reports(view: View, reports: Mapping[str, NodeReport]) -> View:
    """Fold in the reports that nodes have sent to this leader.

    A report is newer than the record while the node starts or runs, unless the record names a newer
    snapshot: then reports do not reach this leader any more. From draining on the record counts.
    Reports of another lease, generation or snapshot server are ignored: a server that died holds
    nothing of what it reported.
    """
    nodes = dict(view.nodes)
    for node, report in reports.items():
        joined = nodes.get(node)
        if joined is None:
            continue
        record = joined.record
        is_current = (record.lease, record.generation, record.server) == (
            report.lease, report.generation, report.server
        )  # fmt: skip
        if is_current and record.phase in (NodePhase.STARTING, NodePhase.RUNNING):
            protected = max(record.protected, report.protected, key=lambda held: held[-1:])
            newer = replace(
                record, sealed=protected, protected=protected, step=max(record.step, report.step)
            )
            nodes[node] = JoinedNode(newer, joined.created)
    return replace(view, nodes=nodes)


@dataclass(slots=True)
class _Draft:
    """The mutable parts of a view while changes are being folded into it.

    A listing of thousands of nodes is thousands of changes: none of them copies a view.
    """

    nodes: dict[str, JoinedNode]
    evictions: dict[str, Eviction]
    restarts: dict[int, RestartRequest]
    unreadable: dict[str, str]
    placements: dict[int, Placement]
    members: dict[int, tuple[Member, ...]]
    chunks: dict[str, tuple[Place, ...]]
    revisions: dict[str, int]
    documents: dict[str, Any] = field(default_factory=dict)
    """The job-wide documents that changed, by the names of the view's fields."""

    def fold(self, name: str, item: KeyValue | None) -> None:
        """Fold one key's new value, None if the key was deleted.

        An unreadable document that one writer wrote about itself counts as absent.

        Raises:
            UsageError: a document about the whole job is unreadable.
        """
        self.unreadable.pop(name, None)
        try:
            self._set(name, item)
        except UsageError as error:
            if not name.startswith(_OF_ONE_WRITER):
                raise
            self._set(name, None)
            self.unreadable[name] = str(error)

    def _set(self, name: str, item: KeyValue | None) -> None:
        section, _, rest = name.partition("/")
        match section:
            case "nodes":
                if item is None:
                    self.nodes.pop(rest, None)
                else:
                    self.nodes[rest] = JoinedNode(NodeRecord.decode(item.value), item.created)
            case "members":
                self.chunks.pop(rest, None)
                if item is not None:
                    self.chunks[rest] = placements.decode_chunk(rest, item.value)
            case "placements":
                self._place(decode_number(rest), item)
            case "evictions":
                self.evictions.pop(rest, None)
                if item is not None:
                    self.evictions[rest] = Eviction.decode(item.value)
            case "restarts":
                for rank in [rank for rank in self.restarts if str(rank) == rest]:
                    del self.restarts[rank]
                if item is not None:
                    self.restarts[decode_number(rest)] = RestartRequest.decode(item.value)
            case _:
                self._set_document(name, item)

    def _place(self, generation: int, item: KeyValue | None) -> None:
        """Set the placement of a generation, and its members."""
        self.placements.pop(generation, None)
        self.members.pop(generation, None)
        if item is not None:
            placement = Placement.decode(item.value)
            self.members[generation] = placements.members_of(placement, self.chunks)
            self.placements[generation] = placement

    def _set_document(self, name: str, item: KeyValue | None) -> None:
        """Set a job-wide document; names of newer versions are ignored."""
        if name in _COMPLETED:
            decode = _COMPLETED[name]
            self.documents[name] = decode(item.value, self.members) if item is not None else None
        elif name in _SINGLE:
            absent = History() if name == "history" else None
            self.documents[name] = _SINGLE[name].decode(item.value) if item is not None else absent
        elif name == "secret":
            self.documents[name] = item.value if item is not None else None
        elif name != "last_join":
            return
        self.revisions.pop(name, None)
        if item is not None:
            self.revisions[name] = item.modified


_DRAFTED = tuple(each.name for each in fields(_Draft) if each.name != "documents")
"""The view's mappings that a draft has copies of."""
