"""Decides how the members of a coordinator that keepstep starts on several nodes form one etcd.

Pure. Each of the named nodes runs one member; `keepstep.elastic.store.member_process` observes the
others and acts. An etcd has a token, which is random and in the names of its members.

- Nodes without data found an etcd together: the first of the names that finds no other begins, and
  the others take its token. It begins to work when a majority of the names takes part, as Raft
  demands, so two cannot work at once.
- A member with data only ever starts with it, and goes on when a majority is back.
- A member without data never comes back as the one that it was, for that one has promised things
  that this one does not know: where an etcd works, it is removed from it, and added as a new one.
- A member whose etcd does not work leaves it for another one that does. So if a majority has lost
  its data, these found a new etcd, and the agents restore the job's keys there.

Invariant: an etcd has all of the names as members, but for one while that one is replaced. So a
majority of the names without data leaves it without a majority.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from keepstep.elastic.errors import UsageError

_SIZES = (3, 5)
_TURN_S = 3.0
"""Seconds for which a name without data waits for each of the names before it to begin."""
_DAMAGED_AFTER = 5
"""With these many ends in a row, a member's data is taken for damaged where no etcd works."""


@dataclass(frozen=True, slots=True)
class Member:
    """One of the names: where a member serves clients; the next port is for other members.

    Args:
        host: an IPv6 address is in brackets.
        port: for clients.
    """

    host: str
    port: int

    @property
    def endpoint(self) -> str:
        """Where clients reach it."""
        return f"{self.host}:{self.port}"

    @property
    def peer_endpoint(self) -> str:
        """Where other members reach it."""
        return f"{self.host}:{self.port + 1}"

    @property
    def peer_url(self) -> str:
        """The URL by which other members know it."""
        return f"https://{self.peer_endpoint}"

    def name(self, token: str) -> str:
        """Return the member's name in the etcd of a token."""
        return f"{self.endpoint}@{token}"


def parse_members(endpoints: Sequence[str]) -> tuple[Member, ...]:
    """Return the members that several names, `HOST:PORT` each, ask for.

    Raises:
        UsageError: their number would be of no use, or two use the same port.
    """
    members = tuple(
        Member(host, int(port))
        for host, _, port in (endpoint.rpartition(":") for endpoint in endpoints)
    )
    listed = ",".join(endpoints)
    if len(members) not in _SIZES:
        raise UsageError(
            f"--rdzv-endpoint {listed}: {len(members)} members survive the loss of no more than "
            f"{(len(members) - 1) // 2}; give one name, or three or five of different nodes"
        )
    used: set[str] = set()
    for member in members:
        if member.port == 65535 or {member.endpoint, member.peer_endpoint} & used:
            raise UsageError(
                f"--rdzv-endpoint {listed}: a member uses its port and the next one, and "
                f"{member.endpoint} has no two of its own; give each another port, such as "
                "29400 and 29402"
            )
        used |= {member.endpoint, member.peer_endpoint}
    return members


def token_of(names: Collection[str]) -> str:
    """Return the token in the names of an etcd's members; "" if none has a name yet."""
    return next((name.rpartition("@")[2] for name in names if "@" in name), "")


@dataclass(frozen=True, slots=True)
class Seen:
    """How a running member appears to the others.

    Args:
        token: of its etcd.
        is_formed: whether its etcd has ever worked.
        serves: whether it works now: the member answers, and has a majority.
    """

    token: str
    is_formed: bool
    serves: bool


@dataclass(frozen=True, slots=True)
class Own:
    """The member of this node.

    Args:
        token: of the etcd whose data is here; None: there is no data.
        runs: whether its process lives.
        ends: how often it has ended since it last served.
    """

    token: str | None
    runs: bool
    ends: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """Start a member of an etcd that does not work yet: of this token, or a new one if it is None.

    It works when a majority of the names has done so.
    """

    token: str | None


@dataclass(frozen=True, slots=True)
class Join:
    """Be replaced in the etcd that works, by way of the member of this index."""

    through: int


@dataclass(frozen=True, slots=True)
class Start:
    """Start the member with its data."""


@dataclass(frozen=True, slots=True)
class Discard:
    """End the member and remove its data."""

    why: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again later."""


Step = Found | Join | Start | Discard | Wait


def next_step(index: int, own: Own, seen: Mapping[int, Seen], waited_s: float) -> Step:
    """Return what the member of this node does next.

    Args:
        index: of this node among the names.
        own: its member.
        seen: the members that run, this one included, by index.
        waited_s: for how long this node has had no data.
    """
    others = {other: it for other, it in sorted(seen.items()) if other != index}
    serving = [other for other, it in others.items() if it.serves]
    founding = {other: it.token for other, it in others.items() if not it.is_formed}
    if own.token is None:
        if serving:
            return Join(serving[0])
        if founding:
            return Found(next(iter(founding.values())))
        return Found(None) if waited_s >= index * _TURN_S else Wait()
    mine = seen.get(index)
    if mine is not None and mine.serves:
        return Wait()
    if any(seen[other].token != own.token for other in serving):
        return Discard("the other members have formed another etcd")
    if not own.runs:
        if own.ends >= (2 if serving else _DAMAGED_AFTER):
            return Discard(f"it has ended {own.ends} times")
        return Start()
    is_founding = mine is not None and not mine.is_formed
    if is_founding and any(
        other < index and token != own.token for other, token in founding.items()
    ):
        return Discard("a node that is named before this one has begun as well")
    return Wait()


@dataclass(frozen=True, slots=True)
class Listed:
    """A member as a working etcd lists it.

    Args:
        id: its number.
        peer_url: where other members reach it.
    """

    id: int
    peer_url: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove the member of this number."""

    id: int


@dataclass(frozen=True, slots=True)
class Add:
    """Add a member with this URL."""

    peer_url: str


def next_change(
    listed: Sequence[Listed], own: Member, members: Sequence[Member], earlier: Collection[int]
) -> Remove | Add | None:
    """Return the next change to an etcd that replaces this node's member; None if it is done.

    A node may have ended between its two changes. It is added again before another one is removed,
    so that never two are missing.

    Args:
        listed: the etcd's members.
        own: of this node, which has no data.
        members: the names.
        earlier: the numbers of this node's members that may have had data.
    """
    by_url = {it.peer_url: it.id for it in listed}
    number = by_url.get(own.peer_url)
    if number is None:
        return Add(own.peer_url)
    if number not in earlier:
        return None
    missing = [member.peer_url for member in members if member.peer_url not in by_url]
    return Add(missing[0]) if missing else Remove(number)
