"""Writes the tables of messages, values and records in PROTOCOL.md from the types that define them.

`python -m ops.protocol` rewrites the text between `<!-- table: NAME -->` and `<!-- end -->`. A row
has a type's name, its fields with their types, and its docstring. `tests/unit/test_documents.py`
fails while the document differs from what this script writes.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from keepstep.checkpoint.saving.messages import WRITER_PROTOCOL
from keepstep.checkpoint.snapshot.memory.messages import CONTROL_PROTOCOL, SNAPSHOT_PROTOCOL
from keepstep.elastic.agent import peer_connections
from keepstep.elastic.rendezvous import records
from keepstep.elastic.worker import fork_messages
from keepstep.elastic.worker import messages as worker_messages
from keepstep.monitor.preflight import messages as doctor_messages
from keepstep.transport import Codec, Message, Protocol

DOCUMENT = Path(__file__).parents[1] / "PROTOCOL.md"
PROTOCOLS: Mapping[str, tuple[Protocol[Any, Any], str, str, str]] = {
    "worker": (worker_messages.PROTOCOL, "worker", "agent", "socket pair"),
    "fork": (fork_messages.FORK_PROTOCOL, "agent", "fork server", "socket pair"),
    "snapshot control": (CONTROL_PROTOCOL, "agent", "snapshot server", "Unix socket"),
    "checkpoint writer": (WRITER_PROTOCOL, "rank", "its writing process", "socket pair"),
    "snapshot": (SNAPSHOT_PROTOCOL, "worker or server", "snapshot server", "Unix socket, TCP"),
    "agent": (peer_connections.PROTOCOL, "agent, `logs`", "agent", "TCP"),
    "doctor": (doctor_messages.PROTOCOL, "doctor", "doctor", "TCP"),
}
"""Every protocol with its client, its server, and the kind of connection."""

_TABLE = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rewritten(text: str) -> str:
    """Return a document with its tables as the types define them.

    Raises:
        KeyError: the document has a table of an unknown name.
    """
    tables = {"protocols": _protocol_table(), "values": _value_table(), "records": _record_table()}
    tables |= {name: _message_table(name) for name in PROTOCOLS}
    return _TABLE.sub(lambda found: found[1] + tables[found[2]] + found[3], text)


def messages_of(name: str) -> list[type]:
    """Return the messages of a protocol, with those that travel in the fields of others."""
    protocol = PROTOCOLS[name][0]
    return list(dict.fromkeys([*_sent(protocol.requests), *_sent(protocol.replies)]))


def _protocol_table() -> str:
    rows = []
    for name, (protocol, client, server, connection) in PROTOCOLS.items():
        oldest, newest = protocol.versions.oldest, protocol.versions.newest
        version = str(oldest) if oldest == newest else f"{oldest} to {newest}"
        longest = f"{protocol.max_body_nbytes // 2**20} MiB"
        rows.append((f"`{name}`", client, server, connection, version, longest))
    return _table(("protocol", "client", "server", "over", "version", "longest body"), rows)


def _message_table(name: str) -> str:
    protocol, client, server, _ = PROTOCOLS[name]
    by_client, by_server = _sent(protocol.requests), _sent(protocol.replies)
    rows = []
    for message in messages_of(name):
        senders = [client] * (message in by_client) + [server] * (message in by_server)
        rows.append((*_row(message), ", ".join(dict.fromkeys(senders))))
    return _table(("message", "fields", "meaning", "sender"), rows)


def _value_table() -> str:
    """List what messages hold, but for what is in the coordinator's records as well."""
    messages = [message for name in PROTOCOLS for message in messages_of(name)]
    values = [kind for kind in _reachable(messages) if not issubclass(kind, Message)]
    stored = _reachable(_stored_records())
    return _table(
        ("value", "fields", "meaning"), [_row(kind) for kind in values if kind not in stored]
    )


def _record_table() -> str:
    kinds = _reachable(_stored_records())
    return _table(("record", "fields", "meaning"), [_row(kind) for kind in kinds])


def _stored_records() -> list[type]:
    return [
        value
        for value in vars(records).values()
        if inspect.isclass(value) and issubclass(value, records.Record) and value != records.Record
    ]


def _sent(codec: Codec[Any]) -> list[type]:
    """Return the messages of one direction, each before those that it carries in its fields."""
    return [kind for kind in _reachable(codec.types) if issubclass(kind, Message)]


def _reachable(roots: Iterable[type]) -> list[type]:
    """Return these types, each followed by the types in its fields, each once."""
    reached: dict[type, None] = {}
    pending = list(roots)[::-1]
    while pending:
        kind = pending.pop()
        if kind in reached:
            continue
        reached[kind] = None
        hints = typing.get_type_hints(kind)
        fields = [] if issubclass(kind, enum.Enum) else _fields(kind)
        pending += [part for field in fields for part in _parts(hints[field])][::-1]
    return list(reached)


def _parts(hint: Any) -> list[type]:
    """Return the records, messages and enumerations in an annotation."""
    if inspect.isclass(hint) and not typing.get_args(hint):
        is_own = dataclasses.is_dataclass(hint) or issubclass(hint, (msgspec.Struct, enum.Enum))
        return [hint] if is_own else []
    return [part for argument in typing.get_args(hint) for part in _parts(argument)]


def _fields(kind: type) -> list[str]:
    if issubclass(kind, msgspec.Struct):
        return [field.name for field in msgspec.structs.fields(kind)]
    return [field.name for field in dataclasses.fields(kind)]


def _row(kind: type) -> tuple[str, str, str]:
    if issubclass(kind, enum.Enum):
        fields = ", ".join(f"`{member.value}`" for member in kind)
    else:
        fields = ", ".join(f"`{field}: {_annotation(kind, field)}`" for field in _fields(kind))
    return f"`{kind.__name__}`", fields, _meaning(kind)


def _annotation(kind: type, field: str) -> str:
    """Return a field's type as its source has it; a cell cannot hold the sign for "or"."""
    (text,) = (base.__annotations__[field] for base in kind.__mro__ if field in _annotated(base))
    return re.sub(r" \| None$", "?", str(text)).replace(" | ", " or ")


def _annotated(kind: type) -> Mapping[str, Any]:
    return vars(kind).get("__annotations__", {})


def _meaning(kind: type) -> str:
    """Return a docstring as one paragraph, without its list of fields."""
    text = re.split(r"\n(?:Args|Attributes):\n", inspect.getdoc(kind) or "")[0]
    return " ".join(text.split())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    DOCUMENT.write_text(rewritten(DOCUMENT.read_text()))
