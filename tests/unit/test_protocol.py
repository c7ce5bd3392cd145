"""PROTOCOL.md names every protocol, message, key and action that the code has, and no other.

`test_documents.py` compares the tables of messages and fields with the types.
"""

from __future__ import annotations

import re
import typing
from pathlib import Path

from keepstep.elastic.rendezvous import actions, view
from keepstep.elastic.rendezvous.view import Keys
from ops import protocol

ROOT = Path(__file__).parents[2]
ROOMS = ("checkpoint", "elastic", "monitor")
SOURCES = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
TEXT = (ROOT / "PROTOCOL.md").read_text()


def rows_under(head: str) -> list[list[str]]:
    """Return the cells of the table with this head line, without their backticks."""
    (rows,) = re.findall(rf"^{re.escape(head)}\n\|[-| ]+\n((?:\|.*\n)*)", TEXT, re.MULTILINE)
    return [re.split(r" *\| *", line.replace("`", ""))[1:-1] for line in rows.splitlines()]


def test_every_table_is_in_the_document() -> None:
    named = re.findall(r"<!-- table: ([\w ]+) -->", TEXT)
    assert sorted(named) == sorted([*protocol.PROTOCOLS, "protocols", "values", "records"])


def test_every_protocol_and_message_of_the_sources_is_listed() -> None:
    text = "".join(path.read_text() for path in SOURCES)
    protocols = re.findall(r"= Protocol\(\n    name=\"([\w ]+)\"", text)
    assert sorted(protocols) == sorted(protocol.PROTOCOLS)
    bases = set(re.findall(r"class (\w+)\(Message, [^)]*\):\n    \"\"\"Base of", text))
    sent = set(re.findall(rf"class (\w+)\((?:{'|'.join(['Message', *bases])}), ", text)) - bases
    listed = {kind.__name__ for name in protocol.PROTOCOLS for kind in protocol.messages_of(name)}
    assert sent == listed


def test_keys_are_those_of_the_code() -> None:
    keys = Keys("job")
    single = [*view._COMPLETED, *view._SINGLE, "secret", "last_join"]
    written = {
        keys.node("<node>"), keys.eviction("<node>"), keys.chunk("<digest>"),
        keys.followed + "placements/<generation>", keys.followed + "restarts/<rank>",
        *map(keys.single, single),
    }  # fmt: skip
    rows = rows_under("| key | record | writer | lease | fence |")
    assert sorted(row[0] for row in rows) == sorted(
        key.removeprefix(keys.prefix) for key in written
    )
    records = {row[0].removeprefix("control/"): row[1].split(",")[0] for row in rows}
    assert {name: records[name] for name in view._SINGLE} == {
        name: record.__name__ for name, record in view._SINGLE.items()
    }


def test_actions_are_those_of_the_leader() -> None:
    rows = rows_under("| action | writes | deletes | decided when |")
    assert [row[0] for row in rows] == [one.__name__ for one in typing.get_args(actions.Action)]
